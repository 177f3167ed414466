"""A request a line, with run-length coded block ids of full blocks, and a block size that the rows imply."""

from collections.abc import Iterator

from pagedkv.traces.block_runs import InferredBlockSize, count_ids, expand_runs
from pagedkv.traces.formats.parsing import Lengths, SessionName, check_row, decoded
from pagedkv.traces.lines import Line
from pagedkv.traces.request import Request

__all__ = ["HashRunRows"]


class _HashRunRow(Lengths):
    timestamp: float
    hash_runs: list[tuple[int, int]]
    session: SessionName | None = None


class HashRunRows:
    """``timestamp`` (ms), ``session``, lengths, ``hash_runs`` of global ids; full blocks only.

    Args:
        block_size: tokens an id stands for, or None to find out.
    """

    starts_with_header = False
    session_per_row = False

    def __init__(self, block_size: int | None) -> None:
        self._block_size = InferredBlockSize(block_size)

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request; the first with ids settles the block size."""
        row = decoded(line, _HashRunRow)
        check_row(line, row, row.timestamp / 1000)
        block_size = self._block_size.learn(line, row.input_length, count_ids(line, row.hash_runs))
        yield Request(
            arrival_s=row.timestamp / 1000,
            input_length=row.input_length,
            output_length=row.output_length,
            block_ids=expand_runs(row.hash_runs),
            block_size=block_size,
            session=row.session,
        )
