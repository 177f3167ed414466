"""Reads the tenant of each request from a field of its line, for formats without tenants.

For formats whose lines are JSON objects and yield all their requests at once; logs and CSV read the field with the row.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pagedkv.planner.traces.formats.bodies import name_under
from pagedkv.planner.traces.formats.parsing import decoded
from pagedkv.planner.traces.formats.row_format import RowFormat
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["TenantRows"]


class TenantRows(RowFormat):
    """Rows of another format, each with the tenant from a field of its line.

    Args:
        rows: the other format.
        field: name of the field; dots lead into objects.
    """

    def __init__(self, rows: RowFormat, field: str) -> None:
        self._rows = rows
        self._field = field
        self.starts_with_header = rows.starts_with_header
        self.session_per_row = rows.session_per_row

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return self._rows.recognised

    @property
    def notes(self) -> list[str]:
        """List warnings about the file."""
        return self._rows.notes

    def requests(self, line: Line) -> Iterator[Request]:
        """Read one line at once, and yield its requests with their tenant lazily. Raises TraceError."""
        tenant = name_under(decoded(line, dict[str, Any]), self._field)
        return (replace(request, tenant=tenant) for request in self._rows.requests(line))

    def finish(self) -> Iterator[Request]:
        """Yield the held requests: the wrapped formats have none."""
        return self._rows.finish()
