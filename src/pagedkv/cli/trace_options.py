"""How a trace is read: what the file does not state, selection and order.

Options for reading a file that does not state everything, shared by all commands that read one.

Selection and order of a trace's requests: options of the commands that run or measure a trace.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Annotated, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.errors import ConfigurationError, OutputError
from pagedkv.planner.traces.bad_lines import BadLines
from pagedkv.planner.traces.clocks import GeneratedArrivals, parse_arrivals, rebased, require_time_unit, spread_stamps
from pagedkv.planner.traces.formats.csv_rows import CSV_ROLES, parse_columns
from pagedkv.planner.traces.merging import interleave_sessions, sorted_by_arrival
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.texts import TextTokens, text_tokens
from pagedkv.planner.traces.windows import WindowRule, parse_window

__all__ = [
    "NO_MERGING",
    "MergingOptions",
    "SeveralTimedTracesOptions",
    "SeveralTracesOptions",
    "SourceOptions",
    "TimedTraceOptions",
    "TraceOptions",
    "in_order_of_arrival",
    "require_limit",
]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options, as typed.

    Raises:
        ConfigurationError: a unit is unknown, columns have unknown roles, or there is no such tokenizer.
    """

    time_unit: Annotated[
        str | None,
        typer.Option(
            metavar="UNIT", help="Unit of arrivals: s, ms, us, ns. Default: the file's own.", rich_help_panel=opt.TRACE
        ),
    ] = None
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=COLUMN,...",
            help=f"Columns of CSV or Parquet, by name or number: {', '.join(CSV_ROLES)}.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A tokenizer.json that turns texts into tokens.", rich_help_panel=opt.TRACE),
    ] = None
    chars_per_token: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Characters a token, without a tokenizer. Default: 4.", rich_help_panel=opt.TRACE
        ),
    ] = None

    fields: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=FIELD,...",
            help="The same for JSON lines; dots lead into objects: prompt=request.text.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(
            metavar="poisson:RATE",
            help="Random times instead of the file's, RATE a second.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None
    spread_s: Annotated[
        float | None,
        typer.Option(
            "--spread",
            metavar="S",
            help="Spread requests of one stamp over S seconds, as 1 for whole seconds.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None
    keep_failed: Annotated[
        bool,
        typer.Option("--keep-failed", help="Keep requests that failed.", rich_help_panel=opt.TRACE),
    ] = False
    skip_bad: Annotated[
        int,
        typer.Option(metavar="N", help="Skip up to N lines that cannot be read.", rich_help_panel=opt.TRACE),
    ] = 0

    tenant_by: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Column or field of the tenant: user, metadata.team. Results are given by tenant.",
            rich_help_panel=opt.TRACE,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse options that are invalid for every file."""
        require_time_unit(self.time_unit)
        if self.columns is not None and self.fields is not None:
            raise ConfigurationError("--columns and --fields both name the parts of a row: give one of them")
        self._columns()
        self._texts()
        self._arrivals()
        self.in_time(())
        BadLines(self.skip_bad)

    def open(self, path: str, trace_block_size: int | None, *, any_order: bool = False) -> TraceReader:
        """Open a file. Raises ConfigurationError and TraceError as TraceReader does."""
        return TraceReader(
            path,
            trace_block_size,
            any_order=any_order,
            time_unit=self.time_unit,
            columns=self._columns(),
            texts=self._texts(),
            keep_failed=self.keep_failed,
            arrivals=self._arrivals(),
            skip_bad=self.skip_bad,
            tenant_by=self.tenant_by,
            is_spread=self.spread_s is not None,
        )

    def in_time(self, requests: Iterable[Request]) -> Iterable[Request]:
        """Spread sorted requests of one stamp, if requested. Raises ConfigurationError."""
        return requests if self.spread_s is None else spread_stamps(requests, self.spread_s)

    def _columns(self) -> Mapping[str, str] | None:
        if self.fields is not None:
            return parse_columns(self.fields, "fields", needs_arrival=self.arrivals is None)
        return None if self.columns is None else parse_columns(self.columns, needs_arrival=self.arrivals is None)

    def _arrivals(self) -> GeneratedArrivals | None:
        return None if self.arrivals is None else parse_arrivals(self.arrivals)

    def _texts(self) -> TextTokens:
        return text_tokens(self.tokenizer, self.chars_per_token)


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
    source: SourceOptions = SourceOptions()

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
