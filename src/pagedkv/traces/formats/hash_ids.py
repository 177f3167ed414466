"""The format of the Mooncake release: a request a line, with the ids of its blocks written out."""

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
import numpy as np

from pagedkv.traces.block_runs import MAX_BLOCK_ID, wrong_number_of_ids
from pagedkv.traces.formats.parsing import Lengths, check_row, decoded
from pagedkv.traces.lines import Line
from pagedkv.traces.request import Request

__all__ = ["HashIdRows"]

MOONCAKE_BLOCK_SIZE: Final = 512


class _HashIdRow(Lengths):
    timestamp: float
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]]


class HashIdRows:
    """``timestamp`` (ms), lengths, ``hash_ids``; a partly filled last block has an id too.

    Args:
        block_size: tokens an id stands for, or None for the release's 512.
    """

    starts_with_header = False
    session_per_row = False

    def __init__(self, block_size: int | None) -> None:
        self._block_size = block_size or MOONCAKE_BLOCK_SIZE

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request."""
        row = decoded(line, _HashIdRow)
        check_row(line, row, row.timestamp / 1000)
        if len(row.hash_ids) != -(-row.input_length // self._block_size):
            raise wrong_number_of_ids(line, row.input_length, len(row.hash_ids), self._block_size)
        yield Request(
            arrival_s=row.timestamp / 1000,
            input_length=row.input_length,
            output_length=row.output_length,
            block_ids=np.array(row.hash_ids, dtype=np.int64),
            block_size=self._block_size,
        )
