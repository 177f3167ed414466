"""Buffers of one region: no two overlap, all come back, and neighbours are one extent again."""

import gc

import numpy as np
from hypothesis import given, strategies as st

from pagedkv.device.memory import PinnedArena

SIZES = st.integers(0, 700)


def new_arena(nbytes: int = 4096, alignment: int = 64) -> PinnedArena:
    """An arena of pageable memory."""
    return PinnedArena(nbytes, "a test", is_pinned=False, alignment=alignment)


@given(st.lists(st.tuples(SIZES, st.integers(0, 5))))
def test_buffers_never_overlap_and_all_come_back(asked: list[tuple[int, int]]) -> None:
    arena = new_arena()
    held: list[tuple[memoryview, int]] = []
    for number, (nbytes, num_released) in enumerate(asked):
        buffer = arena.take(nbytes)
        if buffer is None:
            taken = sum(max(1, -(-len(each) // 64)) * 64 for each, _ in held)
            assert arena.free_nbytes == arena.nbytes - taken
        else:
            content = np.asarray(buffer)
            assert len(content) == nbytes
            content[:] = number % 251
            held.append((buffer, number % 251))
            del content, buffer
        for _ in range(min(num_released, len(held))):
            held.pop(nbytes % len(held))
        assert all(set(each.tobytes()) <= {value} for each, value in held)
    held.clear()
    assert arena.free_nbytes == arena.nbytes
    assert arena.take(arena.nbytes) is not None, "the region is one extent again"


def test_a_buffer_is_taken_until_its_last_view_is_gone() -> None:
    arena = new_arena()
    buffer = arena.take(4096)
    assert buffer is not None
    part = np.asarray(buffer[100:200])
    del buffer
    gc.collect()
    assert arena.take(1) is None
    part[:] = 7
    del part
    assert arena.take(4096) is not None


def test_buffers_are_aligned_and_in_the_region() -> None:
    arena = new_arena(alignment=512)
    for nbytes in (1, 513, 64):
        buffer = arena.take(nbytes)
        address = np.asarray(buffer).__array_interface__["data"][0]
        assert arena.holds(address)
        assert (address - arena.address) % 512 == 0
    assert not arena.holds(arena.address + arena.nbytes)
    assert not arena.holds(arena.address - 1)


def test_holes_of_one_size_are_filled_again() -> None:
    arena = new_arena(64 * 64)
    buffers = [arena.take(640) for _ in range(6)]
    assert arena.take(640) is None
    for place in (1, 4, 2):
        buffers[place] = None
    again = [arena.take(640) for _ in range(4)]
    assert [each is not None for each in again] == [True, True, True, False]
