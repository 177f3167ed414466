"""What all formats have in common: lines in, requests out."""

from collections.abc import Iterator
from typing import Protocol

from pagedkv.traces.lines import Line
from pagedkv.traces.request import Request

__all__ = ["RowFormat"]


class RowFormat(Protocol):
    """Turns the lines of one trace, in order, into requests."""

    starts_with_header: bool
    """Whether the first line holds no request."""

    session_per_row: bool
    """Whether a line is a whole session, with arrivals on the session's own clock and checked to be in order."""

    def requests(self, line: Line) -> Iterator[Request]:
        """Read one line now, and make its requests as they are asked for.

        May remember what later lines must agree with.

        Raises:
            TraceError: something is wrong with the line.
        """
        ...
