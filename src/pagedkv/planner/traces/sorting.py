"""Requests of a trace that may not fit in memory, sorted by arrival: an external merge sort.

Requests are gathered up to a bound, sorted, and written to a temporary file as a *run*; then the runs are merged. Both
steps are stable, and runs are merged in the order of reading, so equal arrivals keep their order. The temporary files
have no names: they vanish with the process, however it ends. They lie in the folder of the environment variable TMPDIR,
or in the system's folder for such files.

Source: Knuth, "The Art of Computer Programming", volume 3, section 5.4 (external sorting).
"""

import heapq
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from operator import attrgetter
from tempfile import TemporaryFile
from typing import IO, Final

from pagedkv.contract.extras import needing
from pagedkv.planner.traces.formats.trace_row import TraceRow, request_of, row_of
from pagedkv.planner.traces.request import Request

with needing("cli", "sorting traces"):
    import msgspec

__all__ = ["sorted_by_arrival"]

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
                merged = files.enter_context(_written(_merged(runs)))
                for run in runs:
                    run.close()
                runs = [merged]
        yield from heapq.merge(*map(_read, runs), sorted(gathered, key=_ARRIVAL), key=_ARRIVAL)


def _nbytes(request: Request) -> int:
    arrays = (request.block_ids, request.prompt_token_ids, request.output_token_ids)
    return REQUEST_NBYTES + sum(array.nbytes for array in arrays if array is not None)


def _merged(runs: list[IO[bytes]]) -> Iterator[Request]:
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
