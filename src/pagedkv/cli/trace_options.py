"""How a trace is read: what the file does not state, selection and order; one trace, or several as one.

Its requests can be divided, by the options and by their content: by tenant, by window of time.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import PurePath
from typing import Annotated, ClassVar, Final, Self

from pagedkv.cli import options as opt
from pagedkv.cli.options import flag, option
from pagedkv.cli.user_errors import as_typed
from pagedkv.contract.arrays import Float64Array
from pagedkv.errors import ConfigurationError, OutputError, TraceError
from pagedkv.planner.capacity.references import BlockReferences, Partition
from pagedkv.planner.traces.clocks import (
    GeneratedArrivals,
    Rebased,
    Window,
    WindowRule,
    parse_arrivals,
    parse_window,
    rebased,
    require_time_unit,
    spread_stamps,
)
from pagedkv.planner.traces.formats.csv_rows import CSV_ROLES, parse_columns
from pagedkv.planner.traces.merging import LogFile, MergedLogs, interleave_sessions, sorted_by_arrival
from pagedkv.planner.traces.reader import BadLines, TraceReader
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import TextTokens, text_tokens


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options, as typed.

    Raises:
        ConfigurationError: a unit is unknown, columns have unknown roles, or there is no such tokenizer.
    """

    PANEL: ClassVar = opt.TRACE
    time_unit: Annotated[str | None, option("UNIT", "Unit of arrivals: s, ms, us, ns. Default: the file's own.")] = None
    columns: Annotated[
        str | None, option("WHAT=COLUMN,...", f"Columns of CSV or Parquet, by name or number: {', '.join(CSV_ROLES)}.")
    ] = None
    tokenizer: Annotated[str | None, option("FILE", "A tokenizer.json that turns texts into tokens.")] = None
    chars_per_token: Annotated[float | None, option("X", "Characters a token, without a tokenizer. Default: 4.")] = None

    fields: Annotated[
        str | None, option("WHAT=FIELD,...", "The same for JSON lines; dots lead into objects: prompt=request.text.")
    ] = None
    arrivals: Annotated[str | None, option("poisson:RATE", "Random times instead of the file's, RATE a second.")] = None
    spread_s: Annotated[
        float | None, option("S", "Spread requests of one stamp over S seconds, as 1 for whole seconds.", "--spread")
    ] = None
    keep_failed: Annotated[bool, flag("Keep requests that failed.")] = False
    skip_bad: Annotated[int, option("N", "Skip up to N lines that cannot be read.")] = 0

    tenant_by: Annotated[
        str | None, option("FIELD", "Column or field of the tenant: user, metadata.team. Results are given by tenant.")
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
        elif (self.sort or trace.is_folder) and not trace.session_per_row:
            yield from in_order_of_arrival(trace)
        else:
            yield from trace


def partitions_of(references: BlockReferences, options: TraceOptions, origin_s: float) -> Iterator[Partition]:
    """Yield the divisions of a trace's requests. Raises ConfigurationError: there are no such windows."""
    if references.tenants:
        yield Partition("tenant", references.tenants, references.tenant_numbers)
    if options.windows is not None:
        windows, numbers = options.windows.divide(references.arrivals_s, origin_s)
        yield Partition("window", [window.name for window in windows], numbers)


def windows_of(arrivals_s: Float64Array, options: TraceOptions, origin_s: float) -> list[Window]:
    """Return the windows of arrivals; none if none are requested. Raises ConfigurationError."""
    return [] if options.windows is None else options.windows.divide(arrivals_s, origin_s)[0]


MOST_FILES: Final = 256


@dataclass(frozen=True, slots=True)
class MergingOptions:
    """How several traces become one.

    Args:
        shared_ids: whether all files share one numbering of blocks.
        start_together: whether all files begin at the same time.
    """

    PANEL: ClassVar = opt.TRACE
    shared_ids: Annotated[bool, flag("The block ids of several files share one numbering.")] = False
    start_together: Annotated[bool, flag("Begin each of several files at 0.")] = False


NO_MERGING: Final = MergingOptions()


class TraceSources:
    """Traces that are read as one; iterate over :meth:`requests` once, inside a ``with`` block.

    Args:
        paths: paths of the traces, at least one.
        options: how each is read.
        merging: how they become one.

    Raises:
        ConfigurationError, TraceError: as TraceReader does; too many files; sessions without times of their own.

    Attributes:
        origin_s: the seconds by which arrivals were shifted; recorded times are arrivals plus ``origin_s``. Set by the
            first request.
    """

    def __init__(self, paths: Sequence[str], options: TraceOptions, merging: MergingOptions = NO_MERGING) -> None:
        require_several_can_be_one(paths)
        self._paths = paths
        self._options = options
        self._merging = merging
        self._files = ExitStack()
        self._readers: list[TraceReader] = []
        self._merged: MergedLogs | None = None
        self._rebased: Rebased | None = None
        for path in paths:
            self._readers.append(self._files.enter_context(options.open(path)))

    def __enter__(self) -> Self:
        """Hold the files open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._files.close()

    @property
    def name(self) -> str:
        """Name of the trace, for titles and bars."""
        return name_of(self._paths)

    @property
    def num_bytes(self) -> int | None:
        """Size of the files as stored, or None if one is a pipe."""
        sizes = [reader.num_bytes for reader in self._readers]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def num_bytes_read(self) -> int:
        """Stored bytes read so far."""
        return sum(reader.num_bytes_read for reader in self._readers)

    @property
    def is_of_agents(self) -> bool:
        """Whether turns wait for the answers before them, as in one trace of agents' sessions. Raises TraceError."""
        return len(self._readers) == 1 and self._readers[0].is_of_agents

    @property
    def recognised(self) -> str:
        """The recognised formats, and whether tenants are isolated, as text for users."""
        kinds = Counter(as_typed(reader.recognised) for reader in self._readers)
        several = len(self._paths) > 1
        formats = "; ".join(f"{number} x {kind}" if several else kind for kind, number in kinds.items())
        return f"{formats}; tenants isolated (--isolate)" if self._options.isolates else formats

    @property
    def notes(self) -> list[str]:
        """List warnings about figures, one sentence each; complete when all has been read."""
        if len(self._paths) == 1:
            notes = self._readers[0].notes
        else:
            files = zip(self._paths, self._readers, strict=True)
            notes = [f"{path}: {note}" for path, reader in files for note in reader.notes]
            notes += self._merged.notes if self._merged is not None else ()
        return [as_typed(note) for note in notes]

    @property
    def origin_s(self) -> float:
        """The seconds by which arrivals were shifted: recorded times are arrivals plus this."""
        return 0.0 if self._rebased is None else self._rebased.origin_s

    def requests(self) -> Iterator[Request]:
        """Return the requests of all files, on a clock that begins no more than an hour before the first.

        The first is read at once, so that files without any are refused before anything is compiled or loaded.

        Raises:
            TraceError: at once or while iterating, a fault of a file.
            ConfigurationError: tenants are to be isolated, and there are none.
        """
        self._rebased = Rebased(self._in_order())
        requests = islice(self._with_salts(self._rebased), self._options.limit)
        return chain(list(islice(requests, 1)), requests)

    def _in_order(self) -> Iterator[Request]:
        streams = [self._options.in_order(reader) for reader in self._readers]
        if len(streams) == 1:
            return streams[0]
        for path, reader in zip(self._paths, self._readers, strict=True):
            if reader.session_per_row and self._options.session_interval_s is None:
                reason = "each session has a clock of its own, which no other file shares"
                raise TraceError(
                    path, None, reason, "State the seconds between the starts of two sessions: --session-interval 60"
                )
        by_file = self._options.source.tenant_by is None
        names = _distinct_names(self._paths) if by_file else [None] * len(streams)
        files = [LogFile(*each) for each in zip(self._paths, names, streams, strict=True)]
        merging = self._merging
        self._merged = MergedLogs(files, has_shared_ids=merging.shared_ids, starts_together=merging.start_together)
        return iter(self._merged)

    def _with_salts(self, requests: Rebased) -> Iterator[Request]:
        """Add the tenant's salt to each request if tenants are isolated; require tenants if they were requested."""
        options = self._options
        has_tenants = False
        for request in requests:
            has_tenants = has_tenants or request.tenant is not None
            yield replace(request, salt=request.tenant) if options.isolates else request
        if not has_tenants and options.source.tenant_by is not None:
            field = options.source.tenant_by
            raise ConfigurationError(
                f"--tenant-by {field:.60}: no request of {self.name} has anything there; dots lead into objects, as in "
                "metadata.team"
            )
        if not has_tenants and options.isolates:
            raise ConfigurationError(
                "--isolate separates tenants, and the trace names none: name their field (--tenant-by), or give "
                "a file for each"
            )


def name_of(paths: Sequence[str]) -> str:
    """Return the name of a trace, or of several, for titles."""
    names = [PurePath(path).name for path in paths]
    return names[0] if len(names) == 1 else f"{len(names)} traces ({', '.join(names)})"


def require_several_can_be_one(paths: Sequence[str]) -> None:
    """Refuse more files than are read at once, and a file that is named twice. Raises ConfigurationError."""
    if len(paths) > MOST_FILES:
        raise ConfigurationError(f"{len(paths)} traces are more than {MOST_FILES} at once")
    twice = [path for path, number in Counter(paths).items() if number > 1]
    if twice:
        raise ConfigurationError(f"{twice[0]} is named twice: each trace is a tenant of its own")


def _distinct_names(paths: Sequence[str]) -> list[str]:
    """Return names of tenants by their files, without folders if the names stay distinct."""
    names = [PurePath(path).name for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


SESSION_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class TimedTraceOptions(TraceOptions):
    """How to read a trace for a replay, whose sessions overlap: one begins every minute by default."""

    session_interval_s: opt.SessionInterval = SESSION_INTERVAL_S


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
