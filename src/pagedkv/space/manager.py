"""BlockSpaceManager: the scheduler's door in the words of the classic block managers.

One sequence or sequence group at a time, by sequence id, as vLLM's first block manager had it (Kwon et al.,
SOSP 2023). It owns the map from sequences to rows and nothing else; the state is that of
:class:`~pagedkv.space.block_space.BlockSpace` (``manager.space``), so both styles can be mixed on it.

Actions presume that the matching question was asked: where blocks are short after all, they raise
:class:`~pagedkv.errors.OutOfBlocksError` and change nothing. Each scheduling round ends with
``space.plan_step()`` and, when it has run, ``space.acknowledge(...)``.
"""

from collections.abc import Sequence as AbstractSequence

import numpy as np

from pagedkv.core.blocks import Int32Array
from pagedkv.errors import OutOfBlocksError, SequenceError, UnknownSequenceError
from pagedkv.keys import NO_KEYS, RequestKeys
from pagedkv.plan import BlockMoves, Shortage
from pagedkv.space.block_space import BlockSpace
from pagedkv.space.block_table import BlockTable
from pagedkv.spec import AllocStatus, RecurrentState, Row, Sequence, SequenceGroup, SpaceConfig

__all__ = ["BlockSpaceManager"]


class BlockSpaceManager:
    """Allocates, shares, grows, swaps and frees the blocks of sequences, by sequence id.

    Raises (all methods that take sequences): :class:`~pagedkv.errors.UnknownSequenceError` for sequences that
    were never allocated or are freed already; nothing is changed then.

    >>> from pagedkv import BlockSpaceManager, FullAttention, Sequence, SequenceGroup, SpaceConfig
    >>> manager = BlockSpaceManager(SpaceConfig((FullAttention(block_size=4),), num_blocks=100))
    >>> parent, child = Sequence(0, [1, 2, 3, 4, 5]), Sequence(1, [1, 2, 3, 4, 5])
    >>> manager.allocate(SequenceGroup("request", [parent]))
    >>> manager.fork(parent, child)
    >>> child.token_ids.append(6)
    >>> manager.append_slots(child)
    [(2, 3)]
    >>> manager.get_block_table(parent), manager.get_block_table(child)
    ([1, 2], [1, 3])
    """

    def __init__(self, config: SpaceConfig) -> None:
        """Build an empty block space. O(blocks)."""
        self.space = BlockSpace(config)
        self._places: dict[int, tuple[int, int]] = {}  # sequence id -> its row, and that row's generation

    # Allocation

    def can_allocate(
        self, seq_group: SequenceGroup, num_lookahead_slots: int = 0, *, keys: RequestKeys = NO_KEYS
    ) -> AllocStatus:
        """Tell whether a group's prompt fits: now, later or never. Changes nothing."""
        prompt, num_sequences = self._prompt(seq_group), len(seq_group.seqs)
        return self.space.can_allocate(
            prompt, keys=keys, num_lookahead=num_lookahead_slots, num_sequences=num_sequences
        )

    def allocate(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0, *, keys: RequestKeys = NO_KEYS) -> None:
        """Give a group's prompt its blocks; all sequences of the group share them.

        Raises:
            SequenceError: the group is empty, its sequences differ, or one is allocated already; several
                sequences where a group is a recurrent state (fork them after the prompt's step).
            OutOfBlocksError: too few free blocks. TooManySequencesError: too few rows.
        """
        prompt = self._prompt(seq_group)
        first, *others = seq_group.seqs
        self.space.require_vacant_rows(len(seq_group.seqs))
        allocation = self.space.allocate(prompt, keys=keys, num_lookahead=num_lookahead_slots)
        if isinstance(allocation, Shortage):
            raise OutOfBlocksError(f"request {seq_group.request_id}: {allocation}")
        children = self.space.fork(allocation.row, len(others)).tolist() if others else []
        for seq, row in zip((first, *others), (allocation.row, *children), strict=True):
            self._seat(seq, row)

    def _seat(self, seq: Sequence, row: int) -> None:
        self._places[seq.seq_id] = row, self.space.generation(row)

    def _is_known(self, seq: Sequence) -> bool:
        """Tell whether a sequence is allocated; one whose row was freed through the other door is not."""
        place = self._places.get(seq.seq_id)
        if place is not None and self.space.generation_or_none(place[0]) != place[1]:
            del self._places[seq.seq_id]
        return seq.seq_id in self._places

    def _prompt(self, seq_group: SequenceGroup) -> list[int]:
        name, seqs = seq_group.request_id, seq_group.seqs
        if not seqs:
            raise SequenceError(f"request {name} has no sequences")
        if len({seq.seq_id for seq in seqs}) != len(seqs):
            raise SequenceError(f"request {name} names a sequence twice: {[seq.seq_id for seq in seqs]}")
        if len(seqs) > 1 and any(isinstance(group, RecurrentState) for group in self.space.config.groups):
            raise SequenceError(
                f"request {name} has {len(seqs)} sequences: a recurrent state can be shared only once its prompt is "
                "computed; allocate one and fork it after the step"
            )
        for seq in seqs:
            if self._is_known(seq):
                raise SequenceError(f"sequence {seq.seq_id} of request {name} is allocated already")
            if seq.token_ids != seqs[0].token_ids:
                raise SequenceError(f"the sequences of request {name} must share one prompt")
        return seqs[0].token_ids

    # Growth

    def can_append_slots(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> bool:
        """Tell exactly whether the unseen tokens of a group's sequences and the lookahead fit. Changes nothing."""
        rows = [self.row_of(seq) for seq in seq_group.seqs]
        counts = [len(self._unseen(seq)) for seq in seq_group.seqs]
        return self.space.can_append(rows, counts, num_lookahead=num_lookahead_slots)

    def append_slots(self, seq: Sequence, num_lookahead_slots: int = 0) -> list[tuple[int, int]]:
        """Give a sequence slots for the tokens it has got since the last call, and lookahead slots.

        Returns the copies on write ``(src, dst)`` in the first group's pool; the plan has those of all pools.

        Raises:
            OutOfBlocksError: too few free blocks.
            SequenceError: the sequence has become shorter (see :meth:`BlockTable.truncate`).
        """
        unseen = self._unseen(seq)
        copies = self.space.append_with_copies(
            self.row_of(seq), unseen, np.array([len(unseen)], np.int32), num_lookahead=num_lookahead_slots
        )
        if isinstance(copies, Shortage):
            raise OutOfBlocksError(f"sequence {seq.seq_id}: {copies}")
        return copies

    def _unseen(self, seq: Sequence) -> list[int]:
        num_known = self.space.num_tokens(self.row_of(seq))
        if len(seq.token_ids) < num_known:
            raise SequenceError(
                f"sequence {seq.seq_id} has {len(seq.token_ids)} tokens, {num_known} were known: truncate its table"
            )
        return seq.token_ids[num_known:]

    # Sharing

    def fork(self, parent_seq: Sequence, child_seq: Sequence) -> None:
        """Let a new sequence share every block of another one. Copies no keys or values.

        Raises:
            SequenceError: the child is allocated already, or its tokens do not begin with those that the
                parent's blocks hold.
        """
        if self._is_known(child_seq):
            raise SequenceError(f"sequence {child_seq.seq_id} is allocated already: it cannot become a child")
        parent = self.row_of(parent_seq)
        num_known = self.space.num_tokens(parent)
        if child_seq.token_ids[:num_known] != parent_seq.token_ids[:num_known]:
            raise SequenceError(
                f"sequence {child_seq.seq_id} cannot become a child of {parent_seq.seq_id}: it does not begin with "
                f"the {num_known} tokens that the parent's blocks hold"
            )
        self._seat(child_seq, int(self.space.fork(parent)[0]))

    def free(self, seq: Sequence) -> None:
        """Give up one sequence, wherever its blocks are. Cached blocks stay findable until evicted."""
        self.space.free(self.row_of(seq))
        del self._places[seq.seq_id]

    # Swapping

    def can_swap_out(self, seq_group: SequenceGroup) -> bool:
        """Tell whether the host pool can take the group now. Changes nothing."""
        return self.space.can_swap_out(self._group_rows(seq_group)) is AllocStatus.OK

    def swap_out(self, seq_group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group to the host pool; returns device block -> host block of the first group's pool.

        Its device blocks become free when the step that copies them is acknowledged, not before: swap out what
        one round needs, then plan and acknowledge it.

        Raises:
            OutOfBlocksError: too few host blocks. NoHostPoolError: none at all.
        """
        return self._pairs(seq_group, self.space.swap_out(self._group_rows(seq_group)))

    def can_swap_in(self, seq_group: SequenceGroup) -> AllocStatus:
        """Tell whether a swapped-out group fits the device: now, later or never. Changes nothing."""
        return self.space.can_swap_in(self._group_rows(seq_group))

    def swap_in(self, seq_group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group back to the device; returns host block -> device block of the first group's pool."""
        return self._pairs(seq_group, self.space.swap_in(self._group_rows(seq_group)))

    def _group_rows(self, seq_group: SequenceGroup) -> Int32Array:
        return np.array([self.row_of(seq) for seq in seq_group.seqs], np.int32)

    def _pairs(self, seq_group: SequenceGroup, moves: tuple[BlockMoves, ...] | Shortage) -> list[tuple[int, int]]:
        if isinstance(moves, Shortage):
            raise OutOfBlocksError(f"request {seq_group.request_id}: {moves}")
        first = self.space.config.groups[0].pool
        return [
            pair
            for move in moves
            if move.pool == first
            for pair in zip(move.src_ids.tolist(), move.dst_ids.tolist(), strict=True)
        ]

    # Computed blocks

    def mark_blocks_as_computed(self, seq_group: SequenceGroup) -> None:
        """State that the group's tokens are computed, ahead of the step's acknowledgement.

        The round still ends with ``plan_step`` and ``acknowledge``: these free what its copies and swaps used.
        """
        self.space.mark_computed(self._group_rows(seq_group))

    def get_common_computed_block_ids(self, seqs: AbstractSequence[Sequence]) -> list[int]:
        """Leading computed blocks that all these sequences hold, in the first group."""
        tables = [self.space.computed_block_ids(self.row_of(seq)) for seq in seqs]
        common: list[int] = []
        for entries in zip(*tables, strict=False):
            if len(set(entries)) != 1:
                break
            common.append(entries[0])
        return common

    # Seeing

    def row_of(self, seq: Sequence) -> Row:
        """Row of a sequence, for the batch operations of ``manager.space``."""
        if not self._is_known(seq):
            raise UnknownSequenceError(f"sequence {seq.seq_id} is unknown: never allocated, or freed already")
        return Row(self._places[seq.seq_id][0])

    def get_block_table(self, seq: Sequence, group: int = 0) -> list[int]:
        """Physical blocks of a sequence, reserved ones included."""
        return self.space.block_ids(self.row_of(seq), group)

    def block_table(self, seq: Sequence) -> BlockTable:
        """View of one sequence's blocks, with the classic operations of a block table."""
        return BlockTable(self.space, self.row_of(seq))

    def get_num_free_blocks(self, pool: str | None = None) -> int:
        """Device blocks that can be handed out now."""
        return self.space.num_free_blocks(pool)
