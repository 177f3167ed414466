"""Points of a curve, measured in parallel by threads of one process.

The compiled loops release Python's lock. Threads share the references of the trace, so only the caches take additional
memory. Points run in parallel while their caches together are no larger than the largest alone, so a curve takes as
much memory with many threads as with one.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event
from typing import NamedTuple, TypeAlias

from pagedkv.contract.arrays import Int64Array

__all__ = ["Pause", "Point", "go_on", "measure_side_by_side"]

Pause: TypeAlias = Callable[[], None]
"""Called by a measurement every few milliseconds; raises an exception to end the measurement."""


class StoppedError(Exception):
    """Ends a measurement whose result is no longer needed."""


class Point(NamedTuple):
    """One measurement.

    Args:
        num_blocks: blocks of its cache.
        measure: counts the hits, in all and by parts; calls its argument every few milliseconds.
    """

    num_blocks: int
    measure: Callable[[Pause], Int64Array]


def go_on() -> None:
    """Never stop a measurement; used by measurements that run alone."""


def measure_side_by_side(points: Sequence[Point], num_threads: int, show: Callable[[int], None]) -> list[Int64Array]:
    """Measure points, the largest first. After a failure, stop the others and raise the first error.

    Args:
        points: in any order.
        num_threads: most points that run at a time.
        show: called after each point with the number of finished points.

    Returns:
        The hits of each point.
    """
    waiting = sorted(range(len(points)), key=lambda place: points[place].num_blocks)
    running: dict[Future[Int64Array], int] = {}
    hits: dict[int, Int64Array] = {}
    room = max((point.num_blocks for point in points), default=0)
    is_over = Event()

    def pause() -> None:
        if is_over.is_set():
            raise StoppedError

    with ThreadPoolExecutor(num_threads) as threads:
        try:
            while waiting or running:
                taken = sum(points[place].num_blocks for place in running.values())
                for place in _chosen(points, waiting, num_threads - len(running), room - taken):
                    waiting.remove(place)
                    running[threads.submit(points[place].measure, pause)] = place
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    hits[running.pop(done)] = done.result()
                    show(len(points) - len(waiting) - len(running))
        finally:
            is_over.set()
    return [hits[place] for place in range(len(points))]


def _chosen(points: Sequence[Point], waiting: Sequence[int], num_threads: int, room: int) -> list[int]:
    """Choose the points to start: those with the largest caches that fit together."""
    chosen: list[int] = []
    for place in reversed(waiting):
        if len(chosen) < num_threads and points[place].num_blocks <= room:
            chosen.append(place)
            room -= points[place].num_blocks
    return chosen
