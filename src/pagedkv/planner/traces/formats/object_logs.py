"""Logs of JSON objects: a layout locates the items of a row; the rest is common to all."""

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
    """Locates the items in the rows of a log."""

    @property
    def title(self) -> str:
        """Name of the log, for users."""
        ...

    def calls(self, line: Line, row: dict[str, Any]) -> Iterator[Call]:
        """Yield the calls of a row: one, several, or none. Raises TraceError."""
        ...


class ObjectLogRows(RowFormat):
    """Reads the rows of one layout.

    Args:
        layout: makes the layout from ``reading`` and the calls.
        reading: the user's statements about the file.
        unit: unit of the times, unless their values determine it.
        usage: name of the field with stated lengths, for messages.
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
        """The recognised format, as text for users."""
        return f"{self._layout.title}, {self._calls.description}"

    @property
    def notes(self) -> list[str]:
        """List warnings about the file."""
        return self._calls.notes

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the requests that are complete and in order."""
        row = decoded(line, dict[str, Any])
        for call in self._layout.calls(line, row):
            if self._tenant_by is not None and call.tenant is None:
                call.tenant = name_under(row, self._tenant_by)
            yield from self._calls.requests(call)

    def finish(self) -> Iterator[Request]:
        """Yield the requests that were held back."""
        return self._calls.finish()
