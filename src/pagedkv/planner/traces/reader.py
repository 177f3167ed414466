"""TraceReader: a trace file as a stream of requests.

It combines :mod:`~pagedkv.planner.traces.lines`, which reads files, and :mod:`~pagedkv.planner.traces.formats`, which
reads rows. Only the row being read is in memory.
"""

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from types import TracebackType
from typing import Self

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.bad_lines import BadLines
from pagedkv.planner.traces.clocks import ArrivalOrder, GeneratedArrivals, require_time_unit
from pagedkv.planner.traces.formats import Reading, RowFormat, detect_format
from pagedkv.planner.traces.lines import Line, LineReader, array_elements, parquet_rows
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.texts import CharacterTokens, TextTokens

__all__ = ["TraceReader"]


class TraceReader:
    """Reads one trace, in any known format; iterate over it once, inside a ``with`` block.

    Args:
        path: the file, plain, gzip, zst or Parquet; its content determines which, and the format.
        block_size: tokens per id; replaces the trace's own or the inferred value.
        time_unit: unit of the arrivals; replaces the format's own, or the one that its numbers determine.
        columns: columns of a CSV or Parquet file, or fields of JSON lines, by role: arrival, input, output, session,
            user, prompt, answer, status; dots lead into objects.
        texts: how texts become tokens; 4 characters a token by default.
        keep_failed: whether failed requests are read too; by default they are left out and counted.
        arrivals: times that replace the file's, which may have none.
        skip_bad: most bad lines to skip; skipped lines are counted.
        tenant_by: the column or field with the tenant.
        is_spread: whether the caller spreads requests of one stamp.
        any_order: whether unsorted requests are accepted. By default arrivals must not decrease; in a trace of
            sessions, within each session. A line that has a whole session is always sorted by arrival.

    Raises:
        ConfigurationError: ``block_size`` is not positive, or the unit of time is unknown.
        TraceError: the file cannot be opened; while iterating, also every fault of its content.
    """

    def __init__(  # noqa: PLR0913 - one file and all options of its reading, by keywords
        self,
        path: str | os.PathLike[str],
        block_size: int | None = None,
        *,
        any_order: bool = False,
        time_unit: str | None = None,
        columns: Mapping[str, str] | None = None,
        texts: TextTokens | None = None,
        keep_failed: bool = False,
        arrivals: GeneratedArrivals | None = None,
        skip_bad: int = 0,
        tenant_by: str | None = None,
        is_spread: bool = False,
    ) -> None:
        require_time_unit(time_unit)
        if block_size is not None and block_size < 1:
            raise ConfigurationError(f"the trace's block size must be at least 1 token, got {block_size}")
        self._any_order = any_order
        self._arrivals = arrivals
        self._bad_lines = BadLines(skip_bad)
        self._reading = Reading(
            block_size,
            any_order,
            time_unit,
            columns,
            texts or CharacterTokens(),
            keep_failed,
            has_generated_arrivals=arrivals is not None,
            tenant_by=tenant_by,
            is_spread=is_spread,
        )
        self._lines = LineReader(path)

    @property
    def num_bytes(self) -> int | None:
        """Size of the file as stored, or None for a pipe."""
        return self._lines.num_bytes

    @property
    def num_bytes_read(self) -> int:
        """Stored bytes read so far, as a measure of progress."""
        return self._lines.num_bytes_read

    @property
    def recognised(self) -> str:
        """The recognised format, times and texts, as text for users; complete when all has been read.

        Raises:
            TraceError: as :attr:`session_per_row`.
        """
        recognised = self._format.recognised
        return recognised if self._arrivals is None else f"{recognised}, {self._arrivals.description}"

    @property
    def notes(self) -> list[str]:
        """List warnings about figures, one sentence each; complete when all has been read.

        Raises:
            TraceError: as :attr:`session_per_row`.
        """
        generated = [] if self._arrivals is None else [self._arrivals.note]
        return [*generated, *self._format.notes, *self._bad_lines.notes]

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
        if self._arrivals is None:
            return self._in_file_order()
        if self.session_per_row:
            reason = "the requests of a session have a clock of their own"
            raise TraceError(self._lines.path, None, reason, "State when sessions begin (`session_interval_s`)")
        return self._arrivals.applied_to(self._in_file_order())

    def _in_file_order(self) -> Iterator[Request]:
        check_order = not (self._any_order or self.session_per_row or self._arrivals is not None)
        order = ArrivalOrder()
        for line, requests in self._rows():
            for request in requests:
                if check_order:
                    order.follow(line, request.arrival_s)
                yield request

    def sessions(self) -> Iterator[Iterator[Request]]:
        """Yield the sessions of a trace with a session a line, each as its requests, on its own clock.

        A session may be iterated at any time, even after later ones were read. A session without requests is yielded
        too.

        Raises:
            TraceError: the trace is not one of sessions, or a line is wrong.
        """
        if not self.session_per_row:
            raise TraceError(
                self._lines.path, None, "the requests have one common clock already", "Leave the session interval out"
            )
        for _, requests in self._rows():
            yield requests

    def _rows(self) -> Iterator[tuple[Line, Iterator[Request]]]:
        """Yield every line with its requests; raise an error for a trace without any request."""
        row_format, has_requests = self._format, False
        last = self._first
        for line in self._remaining if row_format.starts_with_header else chain([self._first], self._remaining):
            requests = self._bad_lines.requests(row_format, line)
            last = line
            if not has_requests:
                begin = next(requests, None)
                has_requests = begin is not None
                requests = chain([begin], requests) if begin is not None else requests
            yield line, requests
        held_back = list(row_format.finish())
        if held_back:
            yield last, iter(held_back)
        elif not has_requests:
            raise self._first.fault("no request follows", "Name a trace with at least one request")

    @cached_property
    def _format(self) -> RowFormat:
        return detect_format(self._first, self._reading)

    @cached_property
    def _first(self) -> Line:
        """The first line that is not blank."""
        first = next(self._remaining, None)
        if first is None:
            raise TraceError(self._lines.path, None, "the file is empty", "Name a trace with at least one request")
        return first

    @cached_property
    def _remaining(self) -> Iterator[Line]:
        if self._lines.is_parquet:
            return parquet_rows(self._lines.path)
        return array_elements(self._lines.pieces()) if self._lines.is_array else iter(self._lines)
