"""Which blocks are where: against counting by hand."""

import pytest

from pagedkv.planner.recording.recorder import LIFETIME_EDGES_S, MOST_POINTS, Residency
from pagedkv.wire import BlocksRemoved, BlocksStored


def store(*hashes: int, medium: str = "GPU") -> BlocksStored:
    return BlocksStored(hashes, None, None, 2, medium)


def test_an_empty_cache_is_followed_exactly() -> None:
    residency = Residency()
    residency.advance(10.0)
    residency.begin_empty()
    residency.store(store(1, 2, 3))
    residency.advance(12.0)
    residency.store(store(3, 4))  # a copy of 3
    residency.remove(BlocksRemoved((1, 2)))
    residency.advance(14.0)
    gpu = residency.media["GPU"]
    assert (gpu.num_stored, gpu.num_removed, gpu.num_blocks, gpu.peak) == (4, 2, 2, 4)
    assert gpu.mean == (3 * 2 + 2 * 2) / 4
    assert gpu.timeline == [(10.0, 0), (10.0, 3), (12.0, 4), (12.0, 2)]
    assert gpu.lifetimes[LIFETIME_EDGES_S.index(2)] == sum(gpu.lifetimes) == 2


def test_media_and_groups_are_apart() -> None:
    residency = Residency()
    residency.advance(0.0)
    residency.begin_empty()
    residency.store(store(1))
    residency.store(store(1, medium="CPU"))
    residency.store(BlocksStored((1,), None, None, 2, "GPU", 1))
    residency.remove(BlocksRemoved((1,), "GPU", 1))
    assert {name: medium.num_blocks for name, medium in residency.media.items()} == {"GPU": 1, "CPU": 1}


def test_what_a_gap_hides_is_unknown_until_the_cache_is_cleared() -> None:
    residency = Residency()
    residency.advance(0.0)
    residency.begin_empty()
    residency.store(store(1, 2))
    residency.advance(4.0)
    residency.lose_track()
    assert (residency.is_exact, residency.num_censored) == (False, 2)
    residency.store(store(3))
    residency.remove(BlocksRemoved((1,)))
    residency.advance(100.0)
    gpu = residency.media["GPU"]
    assert (gpu.num_removed, gpu.num_removed_unseen, gpu.seconds, gpu.mean) == (0, 1, 4.0, 2.0)
    residency.clear()
    residency.store(store(9))
    residency.advance(104.0)
    assert residency.is_exact
    assert (gpu.num_blocks, gpu.seconds, gpu.mean) == (1, 8.0, 1.5)
    assert gpu.timeline[-3:] == [(4.0, None), (100.0, 0), (100.0, 1)]


def test_a_clock_that_goes_back_stands() -> None:
    residency = Residency()
    residency.advance(5.0)
    residency.begin_empty()
    residency.store(store(1))
    residency.advance(3.0)
    residency.remove(BlocksRemoved((1,)))
    assert residency.media["GPU"].lifetimes[0] == 1


def test_a_long_timeline_is_thinned() -> None:
    residency = Residency()
    residency.advance(0.0)
    residency.begin_empty()
    for number in range(5 * MOST_POINTS):
        residency.advance(float(number))
        residency.store(store(number))
    gpu = residency.media["GPU"]
    times = [time_s for time_s, _ in gpu.timeline]
    assert MOST_POINTS / 4 < len(times) <= MOST_POINTS
    assert times == sorted(times)
    assert all(num_blocks == pytest.approx(time_s + 1) for time_s, num_blocks in gpu.timeline[1:])


def test_a_cleared_cache_is_that_of_the_device_alone() -> None:
    residency = Residency()
    residency.advance(0.0)
    residency.begin_empty()
    residency.store(store(1, 2))
    residency.store(store(1, 2, 3, medium="CPU"))
    residency.advance(2.0)
    residency.clear()
    residency.advance(4.0)
    gpu, cpu = residency.media["GPU"], residency.media["CPU"]
    assert (gpu.num_blocks, gpu.num_removed, gpu.mean) == (0, 2, 2 * 2 / 4)
    assert (cpu.num_blocks, cpu.num_removed, cpu.mean) == (3, 0, 3.0)
    residency.lose_track()
    residency.clear()  # which tells nothing of what the host holds
    residency.store(store(5, medium="CPU"))
    residency.advance(10.0)
    assert (gpu.seconds, cpu.seconds, residency.is_exact) == (10.0, 4.0, True)


def test_a_clear_empties_the_host_memory_of_sglang_too() -> None:
    residency = Residency()
    residency.advance(0.0)
    residency.store(store(1, 2))
    residency.store(store(1, 2, medium="CPU_PINNED"))
    residency.store(store(1, 2, medium="DISK"))
    residency.advance(2.0)
    residency.clear()
    residency.store(store(7, medium="CPU_PINNED"))
    residency.advance(4.0)
    found = {name: (medium.num_blocks, medium.num_removed, medium.mean) for name, medium in residency.media.items()}
    assert found == {"GPU": (0, 2, 0.0), "CPU_PINNED": (1, 2, 1.0), "DISK": (2, 0, None)}


def test_content_is_there_until_the_last_copy_goes() -> None:
    residency = Residency()
    residency.advance(0.0)
    residency.begin_empty()
    for _ in range(3):
        residency.store(store(1))
    residency.remove(BlocksRemoved((1,)))
    residency.remove(BlocksRemoved((1,)))
    gpu = residency.media["GPU"]
    assert (gpu.num_blocks, gpu.num_stored, gpu.num_copies, gpu.num_removed) == (1, 1, 2, 0)
    residency.remove(BlocksRemoved((1,)))
    assert (gpu.num_blocks, gpu.num_removed, gpu.num_removed_unseen) == (0, 1, 0)
    residency.store(store(1, 1))
    residency.clear()
    residency.store(store(1))
    residency.lose_track()
    residency.remove(BlocksRemoved((1,)))
    assert (gpu.num_blocks, gpu.num_copies, gpu.num_removed, gpu.num_removed_unseen) == (0, 3, 2, 1)
