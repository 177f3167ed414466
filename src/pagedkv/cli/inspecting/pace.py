"""Pace: lets virtual time pass at a speed of this machine's time, and runs work of another thread meanwhile.

::

    replay      | step |   hold   | step | hold | step |    hold     |
    calls                ^  ^^                              ^           run within a hold, between two steps
"""

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Final, TypeVar, final

from pagedkv.errors import EngineError

__all__ = ["Pace"]

T = TypeVar("T")

MOST_LAG_S: Final = 0.5
"""Time that a slow machine makes up for later; more is lost, so that a long stretch does not rush by afterwards."""


LONGEST_WAIT_S: Final = 0.5
"""A signal that comes just before a wait is handled after it."""


@final
class Pace:
    """The pace of one replay. Its thread calls ``hold``, ``stay`` and ``close``, any thread ``call_soon``.

    Args:
        speed: virtual seconds for each second of this machine; None: holds take no time.
        clock: returns monotonic seconds.

    Attributes:
        is_paused: whether virtual time stands still. Changed by calls alone.
    """

    def __init__(self, speed: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.speed = speed
        self.is_paused = False
        self._clock = clock
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._unanswered: set[Future[Any]] = set()  # also of a call that an interruption took from the queue unrun
        self._is_closed = False
        self._passed_s = 0.0
        self._end_s = 0.0
        self._last_at = clock()  # when virtual time was at passed_s

    @property
    def now_s(self) -> float:
        """Virtual seconds that have passed. Only the replay's thread may ask."""
        return self._passed_s

    def call_soon(self, work: Callable[[], T]) -> Future[T]:
        """Run work in the replay's thread, within a hold. The future has its result, or EngineError after the end."""
        future: Future[T] = Future()
        self._unanswered.add(future)
        future.add_done_callback(self._unanswered.discard)
        self._calls.put(_Call(work, future))
        if self._is_closed:
            self._refuse_all()
        return future

    def hold(self, from_s: float, duration_s: float) -> None:
        """Let virtual time pass, and run the calls that come meanwhile."""
        self._passed_s, self._end_s = max(self._passed_s, from_s), from_s + duration_s
        while True:
            self._run_waiting()
            left_s = 0.0 if self.is_paused else self._due_at() - self._clock()
            if left_s <= 0 and not self.is_paused:
                break
            self._run_next(LONGEST_WAIT_S if self.is_paused else min(left_s, LONGEST_WAIT_S))
        self._last_at = max(self._due_at(), self._clock() - MOST_LAG_S)
        self._passed_s = max(self._passed_s, self._end_s)

    def _due_at(self) -> float:
        """Return when this hold is over."""
        return self._last_at + (0.0 if self.speed is None else (self._end_s - self._passed_s) / self.speed)

    def _run_waiting(self) -> None:
        while not self._calls.empty():
            self._run_next(LONGEST_WAIT_S)

    def _run_next(self, timeout_s: float) -> None:
        """Wait for a call, and run it."""
        with suppress(queue.Empty):
            call = self._calls.get(timeout=timeout_s)
            self._advance()
            call.run()

    def _advance(self) -> None:
        """Count the virtual time that has passed within this hold."""
        now = self._clock()
        if self.is_paused or self.speed is None:
            self._last_at = now
            return
        passed_s = min(self._end_s - self._passed_s, max(0.0, now - self._last_at) * self.speed)
        self._passed_s += passed_s
        self._last_at += passed_s / self.speed

    def pause(self, *, is_paused: bool) -> None:
        """Let virtual time stand still, or pass again; takes effect within the next hold, or in this one."""
        self.call_soon(lambda: self._set_paused(is_paused=is_paused))

    def _set_paused(self, *, is_paused: bool) -> None:
        self.is_paused = is_paused
        self._last_at = self._clock()

    def stay(self) -> None:
        """Run calls until Ctrl-C, which this raises."""
        while True:
            self._run_next(LONGEST_WAIT_S)

    def close(self) -> None:
        """Refuse all calls from now on, and those without an answer."""
        self._is_closed = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        for future in self._unanswered.copy():
            with suppress(InvalidStateError):  # answered or cancelled meanwhile
                future.set_exception(EngineError("the replay has ended"))


@final
class _Call:
    """Work, and the future of its result."""

    def __init__(self, work: Callable[[], Any], future: Future[Any]) -> None:
        self._work = work
        self._future = future

    def run(self) -> None:
        """Run the work, unless the caller has cancelled it."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            result = self._work()
        except Exception as problem:  # noqa: BLE001 - the caller's, who gets it
            self._future.set_exception(problem)
        else:
            self._future.set_result(result)
