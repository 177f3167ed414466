"""Logs of JSON objects: a layout finds the items of a row, and the rest is common to all."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pagedkv.planner.traces.formats.bodies import name_under
from pagedkv.planner.traces.formats.calls import Call, Calls
from pagedkv.planner.traces.formats.parsing import decoded
from pagedkv.planner.traces.formats.row_format import Reading, RowFormat
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["Layout", "ObjectLogRows"]


class Layout(Protocol):
    """Where the rows of a log have each item."""

    @property
    def title(self) -> str:
        """Name the log, for humans."""
        ...

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Give the calls of a row: one, several, or none. Raises TraceError."""
        ...


class ObjectLogRows(RowFormat):
    """Rows of one layout.

    Args:
        layout: made from ``reading`` and the clock.
        reading: what the user stated about the file.
        unit: of the times, unless their values determine it.
        usage: the name of the field that states lengths, for messages.
    """

    starts_with_header = False
    session_per_row = False

    def __init__(
        self, layout: Callable[[Reading, Calls], Layout], reading: Reading, unit: str = "s", usage: str = "usage"
    ) -> None:
        self._calls = Calls(reading, unit, usage)
        self._layout = layout(reading, self._calls)
        self._tenant_by = reading.tenant_by

    @property
    def recognised(self) -> str:
        """Say which format was recognised."""
        return f"{self._layout.title}, {self._calls.told}"

    @property
    def notes(self) -> list[str]:
        """List what a reader must know about it."""
        return self._calls.notes

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the requests that are complete and in order."""
        row = decoded(line, dict[str, Any])
        for call in self._layout.calls(line, row):
            if self._tenant_by is not None and call.tenant is None:
                call.tenant = name_under(row, self._tenant_by)
            yield from self._calls.requests(call)

    def finish(self) -> Iterator[Request]:
        """Yield what was held back."""
        return self._calls.finish()
