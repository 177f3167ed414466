"""BlockTable: one sequence's blocks as an object, on the state of a block space."""

from collections.abc import Sequence

import numpy as np

from pagedkv.contract.answers import Shortage
from pagedkv.contract.arguments import as_count, as_token_array, require_instance
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import TokenIds, keeps_state
from pagedkv.errors import FreedSequenceError, OutOfBlocksError, SequenceError, TokenError
from pagedkv.space import BlockSpace


class BlockTable:
    """A view of one sequence. It owns nothing, and raises FreedSequenceError once the sequence is freed.

    Args:
        space: the block space of the sequence.
        row: its row.
        group: the group whose table is shown; growing affects all groups.

    >>> from pagedkv import BlockSpace, BlockTable, FullAttention, SpaceConfig
    >>> space = BlockSpace(SpaceConfig((FullAttention(block_size=4),), num_blocks=100))
    >>> table = BlockTable.allocate(space, [1, 2, 3, 4, 5])
    >>> table.append_token_ids([6, 7, 8, 9])
    >>> table.physical_block_ids, table.num_full_slots
    ([1, 2, 3], 9)
    """

    def __init__(self, space: BlockSpace, row: int, group: int = 0) -> None:
        """View a row. Raises ConfigurationError for a wrong space or group, and SequenceError for a wrong row."""
        require_instance(space, BlockSpace, "space")
        space.block_size(group)
        self._space = space
        self._group = group
        self._generation = space.generation(row)
        self._row = row

    @property
    def row(self) -> int:
        """Row of the sequence. Raises FreedSequenceError once it is freed, even if another sequence has the row."""
        if self._space.generation_or_none(self._row) != self._generation:
            raise FreedSequenceError(f"the sequence that had row {self._row} was freed")
        return self._row

    @classmethod
    def allocate(
        cls, space: BlockSpace, token_ids: TokenIds, num_lookahead_slots: int = 0, *, keys: RequestKeys = NO_KEYS
    ) -> "BlockTable":
        """Allocate a new sequence; ``keys`` are the extra keys of its content.

        Raises OutOfBlocksError, with nothing changed.
        """
        require_instance(space, BlockSpace, "space")
        allocation = space.allocate(token_ids, keys=keys, num_lookahead=num_lookahead_slots)
        if isinstance(allocation, Shortage):
            raise OutOfBlocksError(str(allocation))
        return cls(space, allocation.row)

    @staticmethod
    def get_num_required_blocks(token_ids: TokenIds, block_size: int, num_lookahead_slots: int = 0) -> int:
        """Count the blocks for these tokens and reserved slots. O(1). Raises ConfigurationError or TokenError."""
        size = as_count(block_size, "block_size", least=1)
        num_slots = _num_tokens(token_ids) + as_count(num_lookahead_slots, "num_lookahead_slots")
        return -(-num_slots // size)

    def append_token_ids(self, token_ids: TokenIds, num_lookahead_slots: int = 0) -> None:
        """Append tokens, copying on write. Raises OutOfBlocksError, with nothing changed."""
        self._append(token_ids, num_lookahead_slots)

    def ensure_num_empty_slots(self, num_empty_slots: int) -> None:
        """Reserve slots beyond the tokens. Raises OutOfBlocksError, with nothing changed."""
        self._append([], num_empty_slots)

    def _append(self, token_ids: TokenIds, num_lookahead_slots: int) -> None:
        tokens = as_token_array(token_ids)
        shortage = self._space.append(self.row, tokens, [len(tokens)], num_lookahead=num_lookahead_slots)
        if shortage is not None:
            raise OutOfBlocksError(str(shortage))

    def truncate(self, num_tokens: int) -> None:
        """Roll back to an earlier length and free reserved slots (see :meth:`BlockSpace.truncate`)."""
        self._space.truncate(self.row, [num_tokens])

    def fork(self) -> "BlockTable":
        """Make a sequence that shares every block. Copies no keys or values."""
        return BlockTable(self._space, int(self._space.fork(self.row)[0]), self._group)

    def free(self) -> None:
        """Free the sequence."""
        self._space.free(self.row)

    @property
    def physical_block_ids(self) -> list[int]:
        """Physical blocks, reserved ones included; 0 where a window has moved on."""
        return self._space.block_ids(self.row, self._group)

    @property
    def num_full_slots(self) -> int:
        """Slots that hold tokens."""
        return self._space.num_tokens(self.row)

    def get_unseen_token_ids(self, sequence_token_ids: list[int]) -> list[int]:
        """Tokens of the sequence that were not appended yet."""
        if _num_tokens(sequence_token_ids) < self.num_full_slots:
            raise SequenceError(
                f"row {self.row} holds {self.num_full_slots} tokens, the sequence has only {len(sequence_token_ids)}"
            )
        return sequence_token_ids[self.num_full_slots :]

    def get_num_blocks_touched_by_append_slots(self, token_ids: TokenIds, num_lookahead_slots: int = 0) -> int:
        """Count the blocks that appending would write or reserve: a partly filled one, and new ones. Changes nothing.

        A partly filled one that other sequences share is copied first. A recurrent state reserves no slots.
        """
        num_reserved = as_count(num_lookahead_slots, "num_lookahead_slots", error=TokenError)
        block_size = self._space.block_size(self._group)
        is_state = keeps_state(self._space.config.groups[self._group])
        num_slots = _num_tokens(token_ids) + (0 if is_state else num_reserved)
        if num_slots == 0:
            return 0
        end = self.num_full_slots + num_slots
        return -(-end // block_size) - self.num_full_slots // block_size


def _num_tokens(token_ids: TokenIds) -> int:
    """Count tokens without checking them. Raises TokenError for anything but a list or array."""
    is_array = isinstance(token_ids, np.ndarray) and token_ids.ndim == 1
    is_list = isinstance(token_ids, Sequence | bytearray | memoryview) and not isinstance(token_ids, str)
    if not is_array and not is_list:
        raise TokenError(f"token ids must be a list or an array of integers, got {token_ids!r}")
    return len(token_ids)
