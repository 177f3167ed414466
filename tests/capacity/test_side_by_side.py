"""Points measured in threads: which run beside each other, and how they end."""

from collections.abc import Callable
from threading import Barrier, Event, Lock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.contract.arrays import Int64Array
from pagedkv.planner.capacity.pool_hits import Pause, Point, measure_side_by_side

PATIENCE_S = 60.0


def told(_: int) -> None:
    """Nobody watches."""


def counted(hits: int) -> Int64Array:
    return np.array([hits])


def hits_of(points: list[Int64Array]) -> list[int]:
    return [int(hits[0]) for hits in points]


def point(num_blocks: int, hits: int = 0) -> Point:
    return Point(num_blocks, lambda _pause: counted(hits))


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 4))
def test_together_they_take_no_more_than_the_largest(sizes: list[int], num_threads: int) -> None:
    """And no more run at once than there are threads, and each is measured, and its hits stand in its place."""
    guard, running, most = Lock(), [], []

    def measure(place: int) -> Callable[[Pause], Int64Array]:
        def measured(_pause: Pause) -> Int64Array:
            with guard:
                running.append(sizes[place])
                most.append((sum(running), len(running)))
            with guard:
                running.remove(sizes[place])
            return counted(100 + place)

        return measured

    counts: list[int] = []
    points = [Point(size, measure(place)) for place, size in enumerate(sizes)]
    assert hits_of(measure_side_by_side(points, num_threads, counts.append)) == [
        100 + place for place in range(len(sizes))
    ]
    assert all(blocks <= max(sizes) and count <= num_threads for blocks, count in most)
    assert counts == sorted(set(counts))
    assert counts[-1:] == [len(sizes)][: len(sizes)]


def test_those_that_fit_run_at_the_same_time() -> None:
    """The second largest waits for the largest, and then runs beside the smallest: each waits for the other."""
    both = Barrier(2, timeout=PATIENCE_S)

    def meet(_pause: Pause) -> Int64Array:
        both.wait()
        return counted(1)

    assert hits_of(measure_side_by_side([Point(4, meet), point(10, 5), Point(6, meet)], 2, told)) == [1, 5, 1]


def test_one_that_fails_stops_those_beside_it() -> None:
    begun, stopped = Event(), Event()

    def endless(pause: Pause) -> Int64Array:
        begun.set()
        try:
            while True:
                pause()
        finally:
            stopped.set()

    def failing(_pause: Pause) -> Int64Array:
        assert begun.wait(PATIENCE_S)
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        measure_side_by_side([Point(5, endless), Point(5, failing), point(10)], 2, told)
    assert stopped.is_set()


def test_who_watches_may_end_it_all() -> None:
    """As Ctrl-C does, which comes while the first thread waits."""

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    begun: list[int] = []

    def measure(_pause: Pause) -> Int64Array:
        begun.append(1)
        return counted(0)

    with pytest.raises(KeyboardInterrupt):
        measure_side_by_side([Point(1, measure)] * 3, 1, interrupted)
    assert len(begun) == 1
