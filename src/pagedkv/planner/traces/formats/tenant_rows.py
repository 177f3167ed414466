"""The tenant of each request, from a field of its line: wraps formats without tenants.

For formats whose lines are JSON objects and give all their requests at once; logs and CSV look up the field when they
read the row.
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
    """Rows of another format, each with the tenant that a field of its line names.

    Args:
        rows: the format.
        field: the field; dots lead into objects.
    """

    def __init__(self, rows: RowFormat, field: str) -> None:
        self._rows = rows
        self._field = field
        self.starts_with_header = rows.starts_with_header
        self.session_per_row = rows.session_per_row

    @property
    def recognised(self) -> str:
        """Say which format was recognised."""
        return self._rows.recognised

    @property
    def notes(self) -> list[str]:
        """List what a reader must know about it."""
        return self._rows.notes

    def requests(self, line: Line) -> Iterator[Request]:
        """Read one line now, and give its requests with their tenant lazily. Raises TraceError."""
        tenant = name_under(decoded(line, dict[str, Any]), self._field)
        return (replace(request, tenant=tenant) for request in self._rows.requests(line))

    def finish(self) -> Iterator[Request]:
        """Give the held requests: none, in the formats that are wrapped."""
        return self._rows.finish()
