"""Selection and order of a trace's requests: options of the commands that run or measure a trace."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Annotated, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.source_options import SourceOptions
from pagedkv.errors import ConfigurationError, OutputError
from pagedkv.planner.traces.clocks import rebased
from pagedkv.planner.traces.interleaving import interleave_sessions
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.sorting import sorted_by_arrival
from pagedkv.planner.traces.windows import WindowRule, parse_window

__all__ = [
    "NO_MERGING",
    "MergingOptions",
    "SeveralTimedTracesOptions",
    "SeveralTracesOptions",
    "TimedTraceOptions",
    "TraceOptions",
    "in_order_of_arrival",
    "require_limit",
]

SESSION_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How to read a trace.

    Args:
        session_interval_s: seconds between the starts of sessions, in a trace with one session in each line, each with
            its own clock; None: one session after the other, in file order.
        max_gap_s: longest gap within a session; longer ones are cut to it.
        trace_block_size: tokens per block id; replaces the trace's own value.
        limit: most requests to read.
        window: windows of recorded time by which figures are divided.
        utc_offset: hours that times of day are ahead of UTC.
        isolates: whether blocks of one tenant are hidden from all others.
        sort: whether requests are sorted by arrival; else unsorted ones are refused.
        source: properties of the file that its content does not determine.

    Raises:
        ConfigurationError: a time is negative or not finite, the limit is out of range, or a window is invalid.
    """

    session_interval_s: opt.SessionIntervalOrNone = None
    max_gap_s: opt.MaxGap = None
    trace_block_size: opt.TraceBlockSize = None
    limit: opt.Limit = None
    window: opt.WindowName = None
    utc_offset: opt.UtcOffset = 0.0
    isolates: opt.Isolates = False
    sort: opt.Sort = False
    source: SourceOptions = SourceOptions()  # noqa: RUF009 - a value: frozen

    def __post_init__(self) -> None:
        """Refuse options that are invalid for every trace."""
        require_limit(self.limit)
        if self.max_gap_s is not None and self.session_interval_s is None:
            raise ConfigurationError("--max-gap cuts the gaps within sessions: give --session-interval, too")
        interleave_sessions((), self.session_interval_s or 0.0, self.max_gap_s)
        self.windows  # noqa: B018 - raises

    @property
    def windows(self) -> WindowRule | None:
        """The windows of recorded time, if requested. Raises ConfigurationError."""
        if self.window is None:
            if self.utc_offset:
                raise ConfigurationError("--utc-offset is the time zone of --window's times of day: give both")
            return None
        return parse_window(self.window, self.utc_offset)

    @property
    def names_tenants(self) -> bool:
        """Whether an option names tenants, or requires them."""
        return self.source.tenant_by is not None or self.isolates

    def open(self, path: str) -> TraceReader:
        """Open a trace. Raises ConfigurationError and TraceError as TraceReader does."""
        return self.source.open(path, self.trace_block_size, any_order=self.sort)

    def requests(self, trace: TraceReader) -> Iterator[Request]:
        """Return the requests of an open trace, on a clock that begins no more than an hour before the first.

        The first is read at once, so that a file without any is refused before anything is compiled or loaded.

        Raises:
            TraceError: at once or while iterating, a fault of the trace.
        """
        requests = islice(rebased(self.in_order(trace)), self.limit)
        return chain(list(islice(requests, 1)), requests)

    def in_order(self, trace: TraceReader) -> Iterator[Request]:
        """Return the requests of an open trace on its own clock. Raises TraceError."""
        return iter(self.source.in_time(self._in_order(trace)))

    def _in_order(self, trace: TraceReader) -> Iterator[Request]:
        if self.session_interval_s is not None and trace.session_per_row:
            yield from interleave_sessions(trace.sessions(), self.session_interval_s, self.max_gap_s)
        elif self.sort and not trace.session_per_row:
            yield from in_order_of_arrival(trace)
        else:
            yield from trace


@dataclass(frozen=True, slots=True)
class TimedTraceOptions(TraceOptions):
    """How to read a trace for a replay, whose sessions overlap: one begins every minute by default."""

    session_interval_s: opt.SessionInterval = SESSION_INTERVAL_S


@dataclass(frozen=True, slots=True)
class MergingOptions:
    """How several traces become one.

    Args:
        shared_ids: whether all files share one numbering of blocks.
        start_together: whether all files begin at the same time.
    """

    shared_ids: Annotated[
        bool,
        typer.Option(
            "--shared-ids", help="The block ids of several files share one numbering.", rich_help_panel=opt.TRACE
        ),
    ] = False
    start_together: Annotated[
        bool,
        typer.Option("--start-together", help="Begin each of several files at 0.", rich_help_panel=opt.TRACE),
    ] = False


NO_MERGING: Final = MergingOptions()


@dataclass(frozen=True, slots=True)
class SeveralTracesOptions(TraceOptions):
    """How to read one trace, or several as one."""

    merging: MergingOptions = NO_MERGING


@dataclass(frozen=True, slots=True)
class SeveralTimedTracesOptions(TimedTraceOptions):
    """The same, for a replay."""

    merging: MergingOptions = NO_MERGING


def in_order_of_arrival(requests: Iterable[Request]) -> Iterator[Request]:
    """Sort requests, which need not fit in memory. Raises OutputError."""
    try:
        yield from sorted_by_arrival(requests)
    except OSError as error:
        reason = f"sorting cannot write its temporary files: {error.strerror or error}"
        raise OutputError(f"{reason}. Name a folder with room in the environment variable TMPDIR") from error


def require_limit(limit: int | None) -> None:
    """Check the number of requests to stop after. Raises ConfigurationError."""
    if limit is not None and not 1 <= limit <= sys.maxsize:
        raise ConfigurationError(f"--limit must be from 1 to {sys.maxsize} requests, got {limit}")
