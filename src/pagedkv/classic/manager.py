"""BlockSpaceManager: the block space under the names of the classic block managers.

It owns the map from sequences to rows (:class:`RowMap`) and two sums for the hit rate. All other state is that of its
:class:`~pagedkv.space.block_space.BlockSpace` (``manager.space``), so both interfaces can be mixed. Any class with the
attributes of :class:`~pagedkv.Sequence` and :class:`~pagedkv.SequenceGroup` is accepted, since schedulers have their
own.

Call the matching query (``can_...``) before an action: an action that finds too few blocks raises
:class:`~pagedkv.errors.OutOfBlocksError` and changes nothing. The device executes the actions at the end of the
scheduling round, and only then do their tokens count as computed::

    can_allocate / allocate / can_append_slots / append_slots / fork / free / swap_out / swap_in     in any order
    manager.end_round(run)                   plan the step, let the device run it, acknowledge it (or abort it)

or, with several rounds in flight, ``space.plan_step()`` and later ``space.acknowledge(...)``.
"""

from collections.abc import Callable, Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np

from pagedkv.classic.block_table import BlockTable
from pagedkv.contract.answers import Shortage
from pagedkv.contract.arguments import as_count, as_flag
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.plan import BlockMoves, StepPlan
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import AllocStatus, Row, Sequence, SequenceGroup, keeps_state
from pagedkv.errors import (
    ConfigurationError,
    OutOfBlocksError,
    SequenceError,
    StepError,
    UnknownSequenceError,
)
from pagedkv.space import BlockSpace


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one sequence.

    Args:
        row: its row.
        generation: :meth:`BlockSpace.generation` of the row when the sequence got it.
        num_cached_tokens: tokens of its prompt that hit when the prompt was allocated.
    """

    row: Row
    generation: int
    num_cached_tokens: int


class RowMap:
    """The map from sequence ids to rows, and back: at most one sequence a row, and one row a sequence.

    The space has rows and no sequence ids. Rows may be freed without the map (``manager.space.free``), so an entry is
    valid only while its row still serves the same sequence, which the row's generation shows. A stale entry is dropped
    when its row is given to another sequence, so there is never more than one entry a row.
    """

    def __init__(self, space: BlockSpace) -> None:
        """Start empty."""
        self._space = space
        self._places: dict[int, Place] = {}
        self._sequence_of: dict[int, int] = {}  # row -> the sequence that got it last

    def __len__(self) -> int:
        """Count the entries, stale ones included: at most ``max_sequences``."""
        return len(self._places)

    def find(self, seq_id: int) -> Place | None:
        """Return the place of a sequence, or None if it has no row (any more). Changes nothing. O(1)."""
        place = self._places.get(seq_id)
        if place is None or self._space.generation_or_none(place.row) != place.generation:
            return None
        return place

    def enter(self, seq_id: int, row: Row, num_cached_tokens: int) -> None:
        """Record that a sequence has got a row; drop the row's former sequence and this one's former row. O(1)."""
        former = self._sequence_of.get(row)
        if former is not None:
            self.leave(former)
        self.leave(seq_id)
        self._places[seq_id] = Place(row, self._space.generation(row), num_cached_tokens)
        self._sequence_of[row] = seq_id

    def leave(self, seq_id: int) -> None:
        """Drop the entry of a sequence, if there is one. O(1)."""
        place = self._places.pop(seq_id, None)
        if place is not None:
            del self._sequence_of[place.row]


def as_sequence(seq: Sequence) -> Sequence:
    """Check a sequence: a number, or a name, and tokens. O(1). Raises SequenceError."""
    try:
        hash(seq.seq_id)
        has_tokens = _is_list(seq.token_ids)
    except (AttributeError, TypeError):
        has_tokens = False
    if not has_tokens:
        raise SequenceError(f"a sequence has a number, seq_id, and a list, token_ids; got {seq!r}")
    return seq


def as_sequences(seqs: AbstractSequence[Sequence]) -> AbstractSequence[Sequence]:
    """Check a list of sequences. O(sequences). Raises SequenceError."""
    if not _is_list(seqs):
        raise SequenceError(f"sequences must be a list of them, got {seqs!r}")
    return [as_sequence(seq) for seq in seqs]


def sequences_of(seq_group: SequenceGroup) -> AbstractSequence[Sequence]:
    """Check a group, and return its sequences. O(sequences). Raises SequenceError."""
    if not hasattr(seq_group, "request_id") or not hasattr(seq_group, "seqs"):
        raise SequenceError(f"a group has a name, request_id, and a list of sequences, seqs; got {seq_group!r}")
    return as_sequences(seq_group.seqs)


def _num_encoder_tokens(seq_group: SequenceGroup) -> int:
    """Count the tokens of a group's encoder; 0 without one. O(1). Raises SequenceError."""
    encoder = getattr(seq_group, "encoder_seq", None)
    return 0 if encoder is None else len(as_sequence(encoder).token_ids)


def _is_list(values: object) -> bool:
    return isinstance(values, AbstractSequence) and not isinstance(values, str | bytes)


class BlockSpaceManager:
    """Allocates, shares, grows, swaps and frees the blocks of sequences, by sequence id.

    All methods that take sequences raise :class:`~pagedkv.errors.UnknownSequenceError` for sequences
    that were never allocated or are freed already; nothing is changed then. :meth:`is_allocated` checks that before.

    Attributes:
        space: the block space. It may also be used directly.

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
        self._places = RowMap(self.space)
        self._num_prompt_tokens = 0
        self._num_hit_tokens = 0

    # Allocation

    def can_allocate(
        self,
        seq_group: SequenceGroup,
        num_lookahead_slots: int = 0,
        *,
        keys: RequestKeys = NO_KEYS,
        max_chunk: int | None = None,
    ) -> AllocStatus:
        """Return whether a group's prompt, and lookahead slots for each sequence, fit: now, later or never.

        ``max_chunk`` is how many tokens a round computes, if the prompt is prefilled in chunks: windows free blocks
        between chunks. Changes nothing.
        """
        return self.space.can_allocate(
            self._prompt(seq_group),
            keys=keys,
            num_lookahead=num_lookahead_slots,
            num_sequences=len(seq_group.seqs),
            num_encoder_tokens=_num_encoder_tokens(seq_group),
            max_chunk=max_chunk,
        )

    def allocate(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0, *, keys: RequestKeys = NO_KEYS) -> None:
        """Allocate blocks for a group's prompt, and for its encoder's tokens; all sequences of the group share them.

        With lookahead slots, each sequence gets its own: all but one copy the partly filled block.
        :meth:`get_num_cached_tokens` returns afterwards how much of the prompt was cached.

        Raises:
            SequenceError: the group is empty, its sequences differ, or one is allocated already; several
                sequences where a group is a recurrent state (fork them after the prompt's step).
            OutOfBlocksError: too few free blocks. TooManySequencesError: too few rows.
            ConfigurationError, TokenError: an encoder that :meth:`BlockSpace.allocate <pagedkv.BlockSpace.allocate>`
                refuses.
        """
        prompt, num_sequences = self._prompt(seq_group), len(seq_group.seqs)
        num_lookahead_slots = as_count(num_lookahead_slots, "num_lookahead_slots")
        allocation = self.space.allocate(
            prompt,
            keys=keys,
            num_lookahead=num_lookahead_slots,
            num_sequences=num_sequences,
            num_encoder_tokens=_num_encoder_tokens(seq_group),
        )
        if isinstance(allocation, Shortage):
            raise OutOfBlocksError(f"request {seq_group.request_id}: {allocation}")
        children = self.space.fork(allocation.row, num_sequences - 1).tolist() if num_sequences > 1 else []
        if num_lookahead_slots:
            short = self.space.append(children, [], [0] * len(children), num_lookahead=num_lookahead_slots)
            assert short is None, f"allocate counted what {num_sequences} sequences reserve, and yet: {short}"
        for seq, row in zip(seq_group.seqs, (allocation.row, *children), strict=True):
            self._places.enter(seq.seq_id, row, allocation.num_hit_tokens)
        self._num_prompt_tokens += len(prompt)
        self._num_hit_tokens += allocation.num_hit_tokens

    def is_allocated(self, seq: Sequence) -> bool:
        """Return whether a sequence has blocks, on device or host: allocated or forked, and not freed. O(1)."""
        return self._find(seq) is not None

    def _prompt(self, seq_group: SequenceGroup) -> list[int]:
        seqs = sequences_of(seq_group)
        name = seq_group.request_id
        if not seqs:
            raise SequenceError(f"request {name} has no sequences")
        if len({seq.seq_id for seq in seqs}) != len(seqs):
            raise SequenceError(f"request {name} names a sequence twice: {[seq.seq_id for seq in seqs]}")
        if len(seqs) > 1 and any(keeps_state(group) for group in self.space.config.groups):
            raise SequenceError(
                f"request {name} has {len(seqs)} sequences: a recurrent state can be shared only once its prompt is "
                "computed; allocate one and fork it after the step"
            )
        for seq in seqs:
            if self.is_allocated(seq):
                raise SequenceError(f"sequence {seq.seq_id} of request {name} is allocated already")
            if seq.token_ids != seqs[0].token_ids:
                raise SequenceError(f"the sequences of request {name} must share one prompt")
        return list(seqs[0].token_ids)

    # Growth

    def can_append_slots(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> bool:
        """Return exactly whether the unseen tokens of a group's sequences and the lookahead fit. Changes nothing."""
        return self.space.can_append(
            self._group_rows(seq_group), self._unseen_counts(seq_group), num_lookahead=num_lookahead_slots
        )

    def append_slots(self, seq: Sequence, num_lookahead_slots: int = 0) -> list[tuple[int, int]]:
        """Give a sequence slots for the tokens added to it since the last call, and lookahead slots.

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

    def _unseen_counts(self, seq_group: SequenceGroup) -> list[int]:
        return [len(self._unseen(seq)) for seq in sequences_of(seq_group)]

    # Sharing

    def fork(self, parent_seq: Sequence, child_seq: Sequence) -> None:
        """Let a new sequence share every block of another one. Copies no keys or values.

        Raises:
            SequenceError: the child is allocated already, or its tokens do not begin with those that the
                parent's blocks hold.
        """
        if self.is_allocated(child_seq):
            raise SequenceError(f"sequence {child_seq.seq_id} is allocated already: it cannot become a child")
        parent = self._place_of(parent_seq)
        num_known = self.space.num_tokens(parent.row)
        if child_seq.token_ids[:num_known] != parent_seq.token_ids[:num_known]:
            raise SequenceError(
                f"sequence {child_seq.seq_id} cannot become a child of {parent_seq.seq_id}: it does not begin with "
                f"the {num_known} tokens that the parent's blocks hold"
            )
        child = Row(int(self.space.fork(parent.row)[0]))
        self._places.enter(child_seq.seq_id, child, parent.num_cached_tokens)

    def free(self, seq: Sequence, *, missing_ok: bool = False) -> None:
        """Free one sequence, whether its blocks are on the device or the host. Cached blocks can be hit until evicted.

        Args:
            seq: the sequence.
            missing_ok: do nothing, instead of raising, if it has no blocks: for a request aborted before it was
                scheduled, or a sequence freed when it finished and again with its group.
        """
        if as_flag(missing_ok, "missing_ok") and not self.is_allocated(seq):
            return
        self.space.free(self.row_of(seq))
        self._places.leave(seq.seq_id)

    def free_cross(self, seq_group: SequenceGroup) -> None:
        """Check a group. Changes nothing: its encoder's blocks go with the last of its sequences.

        Classic schedulers call this before they free the sequences of a finished group.
        """
        sequences_of(seq_group)

    # Swapping

    def can_swap_out(self, seq_group: SequenceGroup) -> bool:
        """Return whether the host pool can take the group now. Changes nothing."""
        return self.space.can_swap_out(self._group_rows(seq_group)) is AllocStatus.OK

    def swap_out(self, seq_group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group to the host pool; returns device block -> host block of the first group's pool.

        Its device blocks become free only when the round that copies them has ended. To have them at once, call
        :meth:`end_round` in the middle of scheduling.

        Raises:
            OutOfBlocksError: too few host blocks. NoHostPoolError: none at all.
        """
        return self._pairs(seq_group, self.space.swap_out(self._group_rows(seq_group)))

    def can_swap_in(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """Return whether a swapped-out group fits the device: now, later or never. Changes nothing.

        Beside the blocks that come back, this counts blocks for what the sequences write next: their unseen tokens, the
        lookahead slots of each, and the copies on write that these cause. OK leaves the watermark free.
        """
        return self.space.can_swap_in(
            self._group_rows(seq_group), self._unseen_counts(seq_group), num_lookahead=num_lookahead_slots
        )

    def swap_in(self, seq_group: SequenceGroup) -> list[tuple[int, int]]:
        """Move a group back to the device; returns host block -> device block of the first group's pool."""
        return self._pairs(seq_group, self.space.swap_in(self._group_rows(seq_group)))

    def _group_rows(self, seq_group: SequenceGroup) -> Int32Array:
        return np.array([self.row_of(seq) for seq in sequences_of(seq_group)], np.int32)

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

    # Rounds

    def end_round(self, run: Callable[[StepPlan], object] | None = None) -> StepPlan:
        """Close the round: plan its step, let the device run the plan, and acknowledge it. Returns the plan.

        May be called in the middle of scheduling, if blocks of swapped-out sequences are needed at once: the actions
        so far are then one step, and those that follow are the next.

        Args:
            run: executes the whole plan, including the computation of positions, and returns when that is done. If it
                raises, the step is aborted (see :meth:`BlockSpace.abort <pagedkv.BlockSpace.abort>` for the effect on
                sequences) and the exception is passed on. None if there is no device.

        Raises:
            StepError: steps are in flight, so this one cannot end before they do; nothing is changed.
            ConfigurationError: ``run`` cannot be called; nothing is changed.
        """
        if run is not None and not callable(run):
            raise ConfigurationError(f"run must be callable as run(plan), or None, got {run!r}")
        num_in_flight = self.space.statistics().num_steps_in_flight
        if num_in_flight:
            raise StepError(f"{num_in_flight} steps are in flight: acknowledge them before a round ends at once")
        plan = self.space.plan_step()
        if run is not None:
            try:
                run(plan)
            except BaseException:
                self.space.abort(plan.step_id)
                raise
        self.space.acknowledge(plan.step_id)
        return plan

    # Computed blocks

    def mark_blocks_as_computed(self, seq_group: SequenceGroup, token_chunk_size: int = 0) -> None:  # noqa: ARG002 - classic
        """Check that a group's sequences are allocated. Changes nothing.

        Classic schedulers call this right after scheduling, before the model has run. It is not needed here: what a
        round's plan computes counts as computed when the round has ended, and stays in the plan until then. Use
        ``manager.space.mark_computed`` for content from elsewhere.
        """
        self._group_rows(seq_group)

    def access_all_blocks_in_seq(self, seq: Sequence, now: float) -> None:  # noqa: ARG002 - the classic signature
        """Check that a sequence is allocated. Changes nothing.

        Blocks are evicted in the order of their last use by any sequence, and the space records every use itself.
        """
        self.row_of(seq)

    def get_common_computed_block_ids(self, seqs: AbstractSequence[Sequence]) -> list[int]:
        """Leading computed (acknowledged) blocks that all these sequences hold, in the first group."""
        tables = [self.space.computed_block_ids(self.row_of(seq)) for seq in as_sequences(seqs)]
        common: list[int] = []
        for entries in zip(*tables, strict=False):
            if len(set(entries)) != 1:
                break
            common.append(entries[0])
        return common

    def get_num_cached_tokens(self, seq: Sequence, *, keys: RequestKeys = NO_KEYS) -> int:
        """Count the tokens of a sequence that need not be computed, since they are cached. Changes nothing.

        For an allocated sequence: those that hit when its prompt was allocated (for a fork, its parent's prompt);
        ``keys`` is ignored then. For any other: those that would hit now.
        """
        place = self._find(seq)
        return self.space.match(seq.token_ids, keys=keys).num_tokens if place is None else place.num_cached_tokens

    def get_prefix_cache_hit_rate(self) -> float:
        """Fraction of the prompt tokens allocated so far that hit; 0 before the first, -1 without prefix caching.

        A group of several sequences counts as one prompt.
        """
        if not self.space.config.prefix_caching:
            return -1.0
        return self._num_hit_tokens / max(1, self._num_prompt_tokens)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, which always succeeds; sequences keep their own blocks."""
        self.space.reset_prefix_cache()
        return True

    # Queries

    def row_of(self, seq: Sequence) -> Row:
        """Row of a sequence, for the batch operations of ``manager.space``."""
        return self._place_of(seq).row

    def _find(self, seq: Sequence) -> Place | None:
        return self._places.find(as_sequence(seq).seq_id)

    def _place_of(self, seq: Sequence) -> Place:
        place = self._find(seq)
        if place is None:
            raise UnknownSequenceError(f"sequence {seq.seq_id} is unknown: never allocated, or freed already")
        return place

    def get_block_table(self, seq: Sequence, group: int = 0) -> list[int]:
        """Physical blocks of a sequence, reserved ones included; 0 where a window has moved on."""
        return self.space.block_ids(self.row_of(seq), group)

    def get_cross_block_table(self, seq_group: SequenceGroup) -> list[int]:
        """Physical blocks of a group's encoder, in the first group of cross-attention; [] if it has none.

        They are those of any of its sequences that is allocated.

        Raises:
            ConfigurationError: no group of the space is cross-attention.
        """
        crossing = self.space.config.crossing
        if not crossing:
            raise ConfigurationError("there are no cross tables: no group is a CrossAttention")
        places = [place for seq in sequences_of(seq_group) if (place := self._find(seq)) is not None]
        if not places:
            raise UnknownSequenceError(f"no sequence of request {seq_group.request_id} is allocated")
        return self.space.block_ids(places[0].row, crossing[0])

    def block_table(self, seq: Sequence) -> BlockTable:
        """View of one sequence's blocks, with the classic operations of a block table."""
        return BlockTable(self.space, self.row_of(seq))

    def get_num_free_blocks(self, pool: str | None = None) -> int:
        """Device blocks of a pool that can be handed out now; of the first group's pool when None."""
        return self.space.num_free_blocks(pool)

    def get_num_free_gpu_blocks(self) -> int:
        """Device blocks that can be handed out now, in the first group's pool."""
        return self.get_num_free_blocks()

    def get_num_free_cpu_blocks(self) -> int:
        """Host blocks that can be handed out now, in the first group's pool; 0 without a host pool. O(rows)."""
        first = self.space.config.groups[0].pool
        return sum(pool.num_free for pool in self.space.statistics().host_pools if pool.name == first)

    @property
    def num_total_gpu_blocks(self) -> int:
        """All usable device blocks of the first group's pool, without the null block."""
        return self.space.config.blocks_by_pool()[self.space.config.groups[0].pool] - 1

    @property
    def num_total_cpu_blocks(self) -> int:
        """All usable host blocks of the first group's pool; 0 without a host pool."""
        return max(0, self.space.config.host_blocks_by_pool()[self.space.config.groups[0].pool] - 1)
