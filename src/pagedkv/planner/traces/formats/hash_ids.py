"""One request in each line, with its block ids written out: the Mooncake release, and the Qwen-Bailian traces."""

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
import numpy as np

from pagedkv.planner.traces.block_runs import MAX_BLOCK_ID, wrong_number_of_ids
from pagedkv.planner.traces.clocks import ArrivalClock
from pagedkv.planner.traces.formats.parsing import Lengths, check_row, decoded
from pagedkv.planner.traces.formats.row_format import Reading, RowFormat
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import Request

__all__ = ["BailianRows", "HashIdRows"]

MOONCAKE_BLOCK_SIZE: Final = 512
BAILIAN_BLOCK_SIZE: Final = 16
NO_PARENT: Final = -1
MOST_CHATS: Final = 2**18
"""Number of chats whose session is remembered; a turn comes soon after the previous one."""

_BlockIds = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]]


class _HashIdRow(Lengths):
    timestamp: float | str
    hash_ids: _BlockIds


class HashIdRows(RowFormat):
    """Reads ``timestamp`` (ms), lengths, ``hash_ids``; a partly filled last block has an id too.

    Args:
        reading: has the block size, or None for the release's 512.
    """

    starts_with_header = False
    session_per_row = False

    def __init__(self, reading: Reading) -> None:
        self._block_size = reading.block_size or MOONCAKE_BLOCK_SIZE
        self._any_order = reading.any_order
        self._reading = reading
        self._clock = ArrivalClock("ms", reading.time_unit)

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return f"Mooncake's hash_ids of {self._block_size} tokens, {self._clock.description}"

    @property
    def notes(self) -> list[str]:
        """List warnings about the times."""
        return self._reading.notes_of(self._clock)

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request."""
        row = decoded(line, _HashIdRow)
        arrival_s = self._clock.seconds(line, row.timestamp, any_order=self._any_order)
        check_row(line, row, arrival_s)
        if len(row.hash_ids) != -(-row.input_length // self._block_size):
            raise wrong_number_of_ids(line, row.input_length, len(row.hash_ids), self._block_size)
        yield Request(
            arrival_s=arrival_s,
            input_length=row.input_length,
            output_length=row.output_length,
            block_ids=np.array(row.hash_ids, dtype=np.int64),
            block_size=self._block_size,
        )


class _BailianRow(_HashIdRow):
    chat_id: int
    parent_chat_id: int = NO_PARENT


class BailianRows(RowFormat):
    """The Qwen-Bailian traces: as above, but ``timestamp`` is in seconds, blocks have 16 tokens, and chats form chains.

    The last, partly filled block may have an id or none. A session has the name of its first chat.

    Args:
        reading: has the block size, or None for 16.
    """

    starts_with_header = False
    session_per_row = False

    def __init__(self, reading: Reading) -> None:
        self._block_size = reading.block_size or BAILIAN_BLOCK_SIZE
        self._any_order = reading.any_order
        self._reading = reading
        self._clock = ArrivalClock("s", reading.time_unit)
        self._first_chats: dict[int, int] = {}

    @property
    def recognised(self) -> str:
        """The recognised format, as text for users."""
        return f"Qwen-Bailian's hash_ids of {self._block_size} tokens, {self._clock.description}"

    @property
    def notes(self) -> list[str]:
        """List warnings about the times."""
        return self._reading.notes_of(self._clock)

    def requests(self, line: Line) -> Iterator[Request]:
        """Yield the line's one request."""
        row = decoded(line, _BailianRow)
        arrival_s = self._clock.seconds(line, row.timestamp, any_order=self._any_order)
        check_row(line, row, arrival_s)
        num_full = row.input_length // self._block_size
        if len(row.hash_ids) not in {num_full, -(-row.input_length // self._block_size)}:
            raise wrong_number_of_ids(line, row.input_length, len(row.hash_ids), self._block_size)
        yield Request(
            arrival_s=arrival_s,
            input_length=row.input_length,
            output_length=row.output_length,
            block_ids=np.array(row.hash_ids, dtype=np.int64),
            block_size=self._block_size,
            session=str(self._first_chat(row)),
        )

    def _first_chat(self, row: _BailianRow) -> int:
        first = self._first_chats.get(row.parent_chat_id, row.chat_id)
        self._first_chats[row.chat_id] = first
        if len(self._first_chats) > MOST_CHATS:
            del self._first_chats[next(iter(self._first_chats))]
        return first
