"""One request in each line, with run-length coded ids of full blocks; the rows determine the block size."""

from collections.abc import Iterator

from pagedkv.planner.traces.block_runs import InferredBlockSize, count_ids, expand_runs
from pagedkv.planner.traces.clocks import ArrivalClock
from pagedkv.planner.traces.formats.parsing import Lengths, SessionName, check_row, decoded
from pagedkv.planner.traces.formats.row_format import Reading, RowFormat
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["HashRunRows"]


class _HashRunRow(Lengths):
    timestamp: float | str
    hash_runs: list[tuple[int, int]]
    session: SessionName | None = None


class HashRunRows(RowFormat):
    """Reads ``timestamp`` (ms), ``session``, lengths, ``hash_runs`` of global ids; full blocks only.

    Args:
        reading: has the block size, or None to infer it.
    """

    starts_with_header = False
    session_per_row = False

    def __init__(self, reading: Reading) -> None:
        self._block_size = InferredBlockSize(reading.block_size)
        self._any_order = reading.any_order
        self._reading = reading
        self._clock = ArrivalClock("ms", reading.time_unit)

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return f"hash_runs, {self._clock.description}"

    @property
    def notes(self) -> list[str]:
        """List warnings about the times."""
        return self._reading.notes_of(self._clock)

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request; the first request with ids determines the block size."""
        row = decoded(line, _HashRunRow)
        arrival_s = self._clock.seconds(line, row.timestamp, any_order=self._any_order)
        check_row(line, row, arrival_s)
        block_size = self._block_size.learn(line, row.input_length, count_ids(line, row.hash_runs))
        yield Request(
            arrival_s=arrival_s,
            input_length=row.input_length,
            output_length=row.output_length,
            block_ids=expand_runs(row.hash_runs),
            block_size=block_size,
            session=row.session,
        )
