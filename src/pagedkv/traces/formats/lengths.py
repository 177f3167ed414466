"""CSV of arrivals and lengths: nothing is known of content."""

from collections.abc import Iterator
from textwrap import shorten
from typing import Final

from pagedkv.traces.formats.parsing import FIX_THE_ROW, Lengths, check_row, converted
from pagedkv.traces.lines import Line
from pagedkv.traces.request import Request

__all__ = ["LENGTH_COLUMNS", "LengthRows", "is_length_header"]

LENGTH_COLUMNS: Final = ("arrived_s", "input_length", "output_length")


class _LengthRow(Lengths):
    arrived_s: float


def is_length_header(line: Line) -> bool:
    """Tell whether a line names all the columns needed."""
    return set(LENGTH_COLUMNS) <= set(_columns(line))


class LengthRows:
    """``arrived_s``, ``input_length``, ``output_length``, in any order, other columns ignored; no ids.

    Args:
        header: the line that names the columns.

    Raises:
        TraceError: a column that is needed is there twice.
    """

    starts_with_header = True
    session_per_row = False

    def __init__(self, header: Line) -> None:
        self._columns = _columns(header)
        for column in LENGTH_COLUMNS:
            if self._columns.count(column) > 1:
                raise header.fault(f"the column {column} is there twice", "Remove or rename one of them")

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request."""
        cells = line.text.split(",")
        if len(cells) != len(self._columns):
            reason = f"{len(cells)} columns, where the header has {len(self._columns)}: {shorten(line.text, 60)!r}"
            raise line.fault(reason, FIX_THE_ROW)
        row = converted(line, dict(zip(self._columns, map(str.strip, cells), strict=True)), _LengthRow)
        check_row(line, row, row.arrived_s)
        yield Request(row.arrived_s, row.input_length, row.output_length)


def _columns(header: Line) -> list[str]:
    return [column.strip() for column in header.text.split(",")]
