"""A trace file as a stream of requests.

Joins the two halves of reading: :mod:`~pagedkv.traces.lines`, which knows files, and
:mod:`~pagedkv.traces.formats`, which knows rows. Only the row being read is in memory.
"""

import os
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from types import TracebackType
from typing import Self

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.traces.arrival_order import ArrivalOrder
from pagedkv.traces.formats import RowFormat, detect_format
from pagedkv.traces.lines import Line, LineReader
from pagedkv.traces.request import Request

__all__ = ["TraceReader"]


class TraceReader:
    """Reads one trace, in any known format; iterate over it once, inside a ``with`` block.

    Args:
        path: the file, plain or gzip; both the compression and the format are told by its content.
        block_size: tokens an id stands for, when the trace's own (or the inferred) value must not be used.
        any_order: take requests as they come. By default arrivals must not fall, in a trace of sessions within each.
            A line that holds a whole session is put in order of arrival, as all of it is in memory.

    Raises:
        ConfigurationError: ``block_size`` is not positive.
        TraceError: the file cannot be opened; while iterating, also whatever is wrong with its content.
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int | None = None, *, any_order: bool = False) -> None:
        if block_size is not None and block_size < 1:
            raise ConfigurationError(f"the trace's block size must be at least 1 token, got {block_size}")
        self._block_size = block_size
        self._any_order = any_order
        self._lines = LineReader(path)

    @property
    def num_bytes(self) -> int | None:
        """Size of the file as stored, or None for a pipe."""
        return self._lines.num_bytes

    @property
    def num_bytes_read(self) -> int:
        """Stored bytes read so far: how far the iteration has come."""
        return self._lines.num_bytes_read

    def __enter__(self) -> Self:
        """Hold the file open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        self._lines.__exit__(kind, error, traceback)

    @property
    def session_per_row(self) -> bool:
        """Whether each line is a session with a clock of its own; reads the first line.

        Raises:
            TraceError: the file is empty, of no known format, or cannot be read.
        """
        return self._format.session_per_row

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in file order, those of a trace of sessions session by session."""
        check_order = not (self._any_order or self.session_per_row)
        order = ArrivalOrder()
        for line, requests in self._rows():
            for request in requests:
                if check_order:
                    order.follow(line, request.arrival_s)
                yield request

    def sessions(self) -> Iterator[Iterator[Request]]:
        """Yield the sessions of a trace with a session a line, each as its requests, on its own clock.

        A session may be drawn from at any time, also when later ones have been read. One without requests counts.

        Raises:
            TraceError: the trace is not such a one, or a line is wrong.
        """
        if not self.session_per_row:
            raise TraceError(
                self._lines.path, None, "the requests have one common clock already", "Do without a session interval"
            )
        for _, requests in self._rows():
            yield requests

    def _rows(self) -> Iterator[tuple[Line, Iterator[Request]]]:
        """Yield every line with its requests; refuse a trace without any request."""
        row_format, has_requests = self._format, False
        for line in self._remaining if row_format.starts_with_header else chain([self._first], self._remaining):
            requests = row_format.requests(line)
            if not has_requests:
                begin = next(requests, None)
                has_requests = begin is not None
                requests = chain([begin], requests) if begin is not None else requests
            yield line, requests
        if not has_requests:
            raise self._first.fault("no request follows", "Name a trace with at least one request")

    @cached_property
    def _format(self) -> RowFormat:
        return detect_format(self._first, self._block_size, any_order=self._any_order)

    @cached_property
    def _first(self) -> Line:
        """The first line that is not blank."""
        first = next(self._remaining, None)
        if first is None:
            raise TraceError(self._lines.path, None, "the file is empty", "Name a trace with at least one request")
        return first

    @cached_property
    def _remaining(self) -> Iterator[Line]:
        return iter(self._lines)
