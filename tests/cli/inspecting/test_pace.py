"""Pace: virtual time passes at its speed, and the calls of another thread run between two steps."""

from collections import deque
from concurrent.futures import CancelledError, Future
from functools import partial
from queue import Empty
from threading import Thread
from typing import Any, cast

import pytest

from pagedkv.cli.replay_page import MOST_LAG_S, Pace
from pagedkv.errors import EngineError

pytestmark = pytest.mark.plain_only


class Clock:
    """A clock that is set, and the calls of a pace: waiting for one moves the clock on."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self._calls: deque[Any] = deque()

    def __call__(self) -> float:
        """Return its time."""
        return self.now_s

    def put(self, call: object) -> None:
        """Add a call."""
        self._calls.append(call)

    def empty(self) -> bool:
        """Whether no call waits."""
        return not self._calls

    def get(self, timeout: float) -> object:
        """Return the first call, or wait to no end."""
        if self._calls:
            return self._calls.popleft()
        self.now_s += timeout
        raise Empty


def paced(speed: float | None) -> tuple[Pace, Clock]:
    clock = Clock()
    pace = Pace(speed, clock)
    pace._calls = cast("Any", clock)
    return pace, clock


@pytest.mark.parametrize("speed", [0.5, 1.0, 64.0])
def test_a_hold_takes_its_seconds_at_the_speed(speed: float) -> None:
    pace, clock = paced(speed)
    for number in range(20):
        pace.hold(number * 0.125, 0.125)
        assert pace.now_s == (number + 1) * 0.125
        assert clock.now_s - 50 == pytest.approx(pace.now_s / speed)


def test_as_fast_as_it_can_no_time_passes() -> None:
    pace, clock = paced(None)
    for number in range(1000):
        pace.hold(number * 1e6, 1e6)
    assert (pace.now_s, clock.now_s) == (1e9, 50.0)


def test_little_lag_is_made_up_for_and_much_is_not() -> None:
    pace, clock = paced(1.0)
    clock.now_s += 0.25
    pace.hold(0.0, 1.0)
    assert clock.now_s == 51.0
    clock.now_s += 100.0
    pace.hold(1.0, 1.0)
    assert clock.now_s == 151.0, "over at once"
    pace.hold(2.0, 1.0)
    assert clock.now_s == 152.0 - MOST_LAG_S


def test_calls_run_within_a_hold_and_see_time_go_on() -> None:
    pace, clock = paced(2.0)
    seen: list[float] = []

    def ask() -> None:
        seen.append(pace.now_s)
        clock.now_s += 0.25
        if len(seen) < 5:
            pace.call_soon(ask)

    pace.call_soon(ask)
    pace.hold(10.0, 10.0)
    assert seen == [10.0, 10.5, 11.0, 11.5, 12.0]
    assert (pace.now_s, clock.now_s) == (20.0, 55.0)


def test_time_within_a_hold_does_not_pass_its_end() -> None:
    pace, clock = paced(1.0)
    seen: list[float] = []
    clock.now_s += 0.75
    pace.call_soon(lambda: seen.append(pace.now_s))
    pace.hold(0.0, 0.5)
    assert seen == [0.5]


@pytest.mark.parametrize("speed", [None, 1.0])
def test_time_stands_still_while_paused(speed: float | None) -> None:
    pace, clock = paced(speed)
    pace.pause(is_paused=True)
    seen: list[float] = []

    def ask() -> None:
        seen.append(pace.now_s)
        clock.now_s += 7.0
        if len(seen) < 200:
            pace.call_soon(ask)
        else:
            pace.pause(is_paused=False)

    pace.call_soon(ask)
    pace.hold(3.0, 0.5)
    assert seen == [3.0] * 200
    assert not pace.is_paused
    assert pace.now_s == 3.5
    assert clock.now_s == 50 + 200 * 7 + (0 if speed is None else 0.5), "a pause is not made up for"


def test_an_error_is_the_callers_and_a_cancelled_call_does_not_run() -> None:
    pace, ran = Pace(None), []
    broken: Future[float] = pace.call_soon(lambda: 1 / 0)
    cancelled = pace.call_soon(lambda: ran.append(1))
    cancelled.cancel()
    pace.hold(0.0, 1.0)
    assert isinstance(broken.exception(), ZeroDivisionError)
    with pytest.raises(CancelledError):
        cancelled.result()
    assert ran == []


def test_calls_after_the_end_are_refused() -> None:
    pace = Pace(None)
    before = pace.call_soon(lambda: 1)
    pace.close()
    for refused in (before, pace.call_soon(lambda: 1)):
        with pytest.raises(EngineError, match="the replay has ended"):
            refused.result()


def test_another_thread_is_answered_while_it_stays() -> None:
    pace, answers = Pace(None), list[int]()

    ended: list[Future[None]] = []

    def end() -> None:
        raise KeyboardInterrupt

    def asking() -> None:
        answers.extend(pace.call_soon(partial(int, number)).result(60) for number in range(5))
        ended.append(pace.call_soon(end))

    thread = Thread(target=asking)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pace.stay()
    thread.join()
    pace.close()
    assert answers == [0, 1, 2, 3, 4]
    with pytest.raises(EngineError):
        ended[0].result(60)


def test_a_call_is_refused_that_was_taken_but_not_run() -> None:
    """Ctrl-C may come between the two."""
    interrupted = False

    def clock() -> float:
        if interrupted:
            raise KeyboardInterrupt
        return 0.0

    pace = Pace(None, clock)
    call = pace.call_soon(lambda: 1)
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        pace.stay()
    assert not call.done()
    pace.close()
    with pytest.raises(EngineError, match="the replay has ended"):
        call.result(60)
