"""One trace, or several as one, and divisions of its requests.

Divisions of a trace's requests, by its options and its content: by tenant, by window of time.

One trace, or several as one: the source of requests for the commands that run or measure traces.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice
from pathlib import PurePath
from types import TracebackType
from typing import Final, Self

from pagedkv.cli.trace_options import NO_MERGING, MergingOptions, TraceOptions
from pagedkv.cli.typed_names import as_typed
from pagedkv.contract.arrays import Float64Array
from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.capacity.references import BlockReferences, Partition
from pagedkv.planner.traces.clocks import Rebased
from pagedkv.planner.traces.merging import LogFile, MergedLogs
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.windows import Window

__all__ = ["TraceSources", "name_of", "partitions_of", "require_several_can_be_one", "windows_of"]


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
