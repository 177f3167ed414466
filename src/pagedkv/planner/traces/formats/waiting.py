"""Calls of an engine's log that have arrived and are not answered yet.

Requests are yielded in order of arrival, so a call is held until all earlier ones are answered. The number of held
calls is bounded; beyond the bound, the oldest call is yielded without an answer.
"""

from collections.abc import Callable, Iterator
from typing import Final

from pagedkv.planner.traces.formats.calls import Call, Calls
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["WaitingCalls"]

MOST_WAITING: Final = 1024


class WaitingCalls:
    """Waiting calls, by their names in the log.

    Args:
        calls: turns the calls into requests, in order of arrival.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._waiting: dict[str, Call] = {}

    def arrived(self, line: Line, name: str, arrival: Callable[[], float | str]) -> Call:
        """Return the call of that name; an unknown name gets a new call with its time of arrival. Raises TraceError."""
        if name not in self._waiting:
            arrival_s = self._calls.arrival_s(line, arrival())
            self._waiting[name] = Call(line, arrival_s, is_answered=False)
        return self._waiting[name]

    def get(self, name: str) -> Call | None:
        """Return the call of that name, if it waits."""
        return self._waiting.get(name)

    def due(self) -> Iterator[Request]:
        """Yield the requests that are complete and in order. Raises TraceError."""
        while self._waiting:
            name, first = next(iter(self._waiting.items()))
            is_over = first.is_answered or first.failure is not None
            if not is_over and len(self._waiting) <= MOST_WAITING:
                return
            del self._waiting[name]
            yield from self._calls.requests(first)

    def finish(self) -> Iterator[Request]:
        """Yield the rest. Raises TraceError."""
        for name in list(self._waiting):
            yield from self._calls.requests(self._waiting.pop(name))
        yield from self._calls.finish()
