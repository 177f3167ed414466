"""The order of requests: sessions interleaved, requests sorted, several logs merged.

A trace of sessions has the time of each request within its session, but not the beginnings of the sessions. Here
session k (from 0, in file order, including those without requests) begins at ``k * interval_s``. A gap between two
requests of a session may be cut, because long pauses of users would dominate a cache under study.

A heap holds the next request of each session under way. Sessions are read only until the next one begins after the
earliest request in the heap, so memory is that of the sessions that overlap.

Requests that may not fit in memory are sorted by an external merge sort. They are gathered up to a bound, sorted, and
written to a temporary file as a *run*; then the runs are merged. Both steps are stable, and runs are merged in the
order of reading, so equal arrivals keep their order. The temporary files have no names: they vanish with the process,
however it ends. They lie in the folder of the environment variable TMPDIR, or in the system's folder for such files.
Source: Knuth, "The Art of Computer Programming", volume 3, section 5.4 (external sorting).

Several logs become one trace: their requests on one clock, each with the tenant of its log. Files share a clock if all
count from 1970, or if none does; then each clock begins with its file. A mixture of the two is refused, unless all
files are to begin together. Equal arrivals come in the order of the files. Block ids of different files are made
distinct, unless the files share one numbering. Tokens and texts are compared across files.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from operator import attrgetter
from tempfile import TemporaryFile
from typing import IO, Final

from pagedkv.contract.extras import needing
from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.clocks import FIRST_EPOCH_S
from pagedkv.planner.traces.formats.parsing import TraceRow, request_of, row_of
from pagedkv.planner.traces.request import Request
from pagedkv.planner.traces.token_blocks import with_ids_apart

NUM_DECIMALS: Final = 6
"""Arrivals are rounded to the microsecond, so that equal times from different sums are equal."""


def interleave_sessions(
    sessions: Iterable[Iterable[Request]], interval_s: float, max_gap_s: float | None = None
) -> Iterator[Request]:
    """Merge sessions into one order of arrival; equal arrivals come in the order of their sessions.

    Args:
        sessions: each session's requests, in order of arrival on the session's clock, which starts at 0.
        interval_s: seconds from the start of one session to that of the next, at least 0.
        max_gap_s: longest time between two requests of a session, in seconds; longer ones are cut to it. None: gaps
            are kept. The time from a session's start to its first request is always kept.

    Returns:
        the requests, with arrivals on the common clock that never decrease. O(log of sessions under way) each.

    Raises:
        ConfigurationError: a time is negative or not finite.
    """
    _require_time("the interval between sessions", interval_s)
    if max_gap_s is not None:
        _require_time("the longest gap within a session", max_gap_s)
    return _merged(iter(sessions), interval_s, max_gap_s)


def _merged(sessions: Iterator[Iterable[Request]], interval_s: float, max_gap_s: float | None) -> Iterator[Request]:
    # Entries are ordered by arrival and number, so requests are never compared.
    under_way: list[tuple[float, int, Request, Iterator[Request]]] = []
    for number in count():
        start_s = interval_s * number
        while under_way and under_way[0][0] < start_s:
            yield _advance(under_way)
        session = next(sessions, None)
        if session is None:
            break
        requests = _on_common_clock(session, start_s, max_gap_s)
        first = next(requests, None)
        if first is not None:
            heapq.heappush(under_way, (first.arrival_s, number, first, requests))
    while under_way:
        yield _advance(under_way)


def _advance(under_way: list[tuple[float, int, Request, Iterator[Request]]]) -> Request:
    """Return the earliest request, and replace it by the next one of its session."""
    _, number, earliest, requests = under_way[0]
    following = next(requests, None)
    if following is None:
        heapq.heappop(under_way)
    else:
        heapq.heapreplace(under_way, (following.arrival_s, number, following, requests))
    return earliest


def _on_common_clock(session: Iterable[Request], start_s: float, max_gap_s: float | None) -> Iterator[Request]:
    """Shift a session's requests to its start, and cut its gaps."""
    cut_s = arrival_s = 0.0
    local_s = None
    for request in session:
        if max_gap_s is not None and local_s is not None:
            cut_s += max(0.0, request.arrival_s - local_s - max_gap_s)
        local_s = request.arrival_s
        # The larger one: a rounding error must not let arrivals fall.
        arrival_s = max(arrival_s, round(start_s + local_s - cut_s, NUM_DECIMALS))
        pause_s = request.pause_s if max_gap_s is None or request.pause_s is None else min(max_gap_s, request.pause_s)
        yield replace(request, arrival_s=arrival_s, pause_s=pause_s)


def _require_time(name: str, value_s: float) -> None:
    if not (value_s >= 0 and math.isfinite(value_s)):
        raise ConfigurationError(f"{name} must be at least 0 seconds, and finite, got {value_s}")


with needing("cli", "sorting traces"):
    import msgspec
DEFAULT_RUN_NBYTES: Final = 64 * 2**20
MAX_NUM_RUNS: Final = 64
"""Files merged at once: well below the limit of open files of a process."""
REQUEST_NBYTES: Final = 500
"""Size of a request's Python objects, apart from its arrays."""
_ARRIVAL: Final = attrgetter("arrival_s")


class _Record(msgspec.Struct):
    """A line of a run: a row, and the block size, which a trace has in its header."""

    row: TraceRow
    block_size: int


def sorted_by_arrival(
    requests: Iterable[Request], *, max_run_nbytes: int = DEFAULT_RUN_NBYTES, max_num_runs: int = MAX_NUM_RUNS
) -> Iterator[Request]:
    """Yield requests in order of arrival; equal arrivals keep their order.

    Args:
        requests: in any order; all of them are read before the first is yielded.
        max_run_nbytes: memory of the requests gathered for one run.
        max_num_runs: runs merged at once, at least 2; above it, runs are first merged into one.

    Raises:
        OSError: a temporary file cannot be written.
    """
    with ExitStack() as files:
        runs: list[IO[bytes]] = []
        gathered: list[Request] = []
        nbytes = 0
        for request in requests:
            gathered.append(request)
            nbytes += _nbytes(request)
            if nbytes >= max_run_nbytes:
                runs.append(files.enter_context(_written(sorted(gathered, key=_ARRIVAL))))
                gathered, nbytes = [], 0
            if len(runs) == max_num_runs:
                merged = files.enter_context(_written(_runs_merged(runs)))
                for run in runs:
                    run.close()
                runs = [merged]
        yield from heapq.merge(*map(_read, runs), sorted(gathered, key=_ARRIVAL), key=_ARRIVAL)


def _nbytes(request: Request) -> int:
    arrays = (request.block_ids, request.prompt_token_ids, request.output_token_ids)
    return REQUEST_NBYTES + sum(array.nbytes for array in arrays if array is not None)


def _runs_merged(runs: list[IO[bytes]]) -> Iterator[Request]:
    return heapq.merge(*map(_read, runs), key=_ARRIVAL)


def _written(requests: Iterable[Request]) -> IO[bytes]:
    """Write a run to a new temporary file."""
    encoder = msgspec.json.Encoder()
    with ExitStack() as on_failure:
        file = on_failure.enter_context(TemporaryFile())
        for request in requests:
            file.write(encoder.encode(_Record(row_of(request), request.block_size)) + b"\n")
        on_failure.pop_all()
    return file


def _read(run: IO[bytes]) -> Iterator[Request]:
    """Read a run from its start. This module wrote the runs, so nothing is checked."""
    run.seek(0)
    decoder = msgspec.json.Decoder(_Record)
    for line in run:
        record = decoder.decode(line)
        assert record.row.input_length is not None
        assert record.row.output_length is not None
        yield request_of(record.row, record.row.input_length, record.row.output_length, record.block_size)


ARRIVAL: Final = attrgetter("arrival_s")
PLACES: Final = 9
TOGETHER: Final = "Let all files begin together (`starts_together`)"


@dataclass(frozen=True, slots=True)
class LogFile:
    """One of several logs.

    Args:
        path: the file's path, for messages.
        tenant: tenant of the requests without one; None: no tenant.
        requests: requests in order of arrival, on the file's clock.
    """

    path: str
    tenant: str | None
    requests: Iterable[Request]


class MergedLogs:
    """Merges logs. Iterate once; notes are complete when all requests have been read.

    Args:
        files: the logs, at least one.
        has_shared_ids: whether all files share one numbering of blocks.
        starts_together: whether each file's first request arrives at 0.
    """

    def __init__(
        self, files: Sequence[LogFile], *, has_shared_ids: bool = False, starts_together: bool = False
    ) -> None:
        self._files = files
        self._has_shared_ids = has_shared_ids
        self._starts_together = starts_together
        self._spans_s: list[tuple[float, float] | None] = [None] * len(files)
        self._has_ids: set[int] = set()
        self._epoch_file: str | None = None
        self._other_file: str | None = None

    @property
    def notes(self) -> list[str]:
        """List warnings about several files together, one sentence each."""
        return [*self._clock_notes(), *self._id_notes()] if len(self._files) > 1 else []

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests of all files in order of arrival.

        Raises:
            TraceError: a file cannot be read; the files have no common clock.
        """
        return heapq.merge(*(self._of_file(number, file) for number, file in enumerate(self._files)), key=ARRIVAL)

    def _of_file(self, number: int, file: LogFile) -> Iterator[Request]:
        origin_s = last_s = None
        for request in file.requests:
            if origin_s is None:
                self._require_one_clock(file.path, request.arrival_s)
                origin_s = request.arrival_s if self._starts_together else 0.0
            arrival_s = round(request.arrival_s - origin_s, PLACES) if origin_s else request.arrival_s
            last_s = arrival_s
            first_s, _ = self._spans_s[number] or (arrival_s, arrival_s)
            self._spans_s[number] = first_s, last_s
            separate = request if len(self._files) == 1 or self._has_shared_ids else with_ids_apart(request, number)
            if request.block_ids is not None:
                self._has_ids.add(number)
            tenant = file.tenant if request.tenant is None else request.tenant
            yield (
                replace(separate, arrival_s=arrival_s, tenant=tenant)
                if origin_s or tenant != separate.tenant
                else separate
            )

    def _require_one_clock(self, path: str, first_s: float) -> None:
        if self._starts_together:
            return
        if first_s >= FIRST_EPOCH_S:
            self._epoch_file = self._epoch_file or path
        else:
            self._other_file = self._other_file or path
        if self._epoch_file is not None and self._other_file is not None:
            reason = f"its times count from its own start, those of {self._epoch_file} from 1970"
            raise TraceError(self._other_file, None, reason, TOGETHER)

    def _clock_notes(self) -> Iterator[str]:
        spans = [(span, file.path) for file, span in zip(self._files, self._spans_s, strict=True) if span is not None]
        latest_s, latest = math.inf, ""
        for (begin_s, end_s), path in sorted(spans):
            if begin_s > latest_s:
                gap = f"{begin_s - latest_s:,.0f} s"
                yield f"{path} begins {gap} after {latest} ends, so they never overlap (`starts_together` changes that)"
            if latest_s == math.inf or end_s > latest_s:
                latest_s, latest = end_s, path

    def _id_notes(self) -> Iterator[str]:
        if len(self._has_ids) > 1 and not self._has_shared_ids:
            yield (
                "each file numbers its blocks on its own, so files share no block: set `has_shared_ids` if all ids are "
                "of one numbering, as those of `anonymized` with one `salt`"
            )
