"""Read access to a block space: rows, tables, pools, events, statistics and the audit.

Owns the state and the step ledger of one space; :class:`~pagedkv.space.block_space.BlockSpace` changes them.
Methods here change nothing, except that draining events empties the event buffer.
"""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

from dataclasses import replace
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.record import PENDING_STEP, REF_COUNT
from pagedkv.contract.answers import BlockContents, CacheEvents, Miss, Receipt, StoredBlocks
from pagedkv.contract.arguments import Rows, as_batch, as_count, as_row
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.contract.plan import PageLists, StepPlan
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import refuse_ahead
from pagedkv.errors import ConfigurationError
from pagedkv.space import (
    planning,
    stored_blocks,
)
from pagedkv.space.audit import check_space
from pagedkv.space.explaining import explain_misses, new_book
from pagedkv.space.hits import PrefixHit
from pagedkv.space.replaying import without_inexact
from pagedkv.space.rows import (
    AT,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DRAFT_STATES,
    NUM_TOKENS,
    OCCUPIED,
    RUNNING,
    STATUS,
    VACANT,
)
from pagedkv.space.state import Group, SpaceState, require_status
from pagedkv.space.statistics import SpaceStatistics, take_statistics
from pagedkv.space.steps import StepLedger, read_only
from pagedkv.space.stored_blocks import StoredBlock
from pagedkv.space.tenants import TenantRoom

NOT_LISTED: Final = "cached blocks cannot be listed for others, who compute names of whole blocks"


class SpaceView:
    """The read-only methods of a block space that do not prepare an operation."""

    def __init__(self, config: SpaceConfig) -> None:
        """Build empty pools and tables. O(blocks)."""
        self._own_state = SpaceState(config)
        if config.tenants is not None:
            self._own_state.room = TenantRoom(self._own_state)
        if config.explain:
            self._own_state.explanations = new_book(self._own_state)
        self._ledger = StepLedger(len(self._own_state.groups))

    @property
    def config(self) -> SpaceConfig:
        """The configuration: that of the beginning, with the tenants that there are now.

        O(1), but O(tenants) once after tenants came, went or got other limits.
        """
        return self._own_state.room.config

    @property
    def _state(self) -> SpaceState:
        """The state, also in the middle of an operation."""
        return self._own_state

    def __repr__(self) -> str:
        statistics = self.statistics()
        pools = "; ".join(
            f"{pool.name} {pool.num_in_use:,} of {pool.num_blocks:,} blocks used, {pool.num_free:,} free, "
            f"{pool.num_cached:,} of them cached"
            for pool in statistics.pools
        )
        return (
            f"BlockSpace({pools}; {statistics.num_running:,} running, {statistics.num_swapped:,} swapped out, "
            f"{statistics.num_steps_in_flight:,} steps in flight)"
        )

    def block_size(self, group: int = 0) -> int:
        """Tokens a block of one group."""
        return self._group(group).block_size

    def num_tokens(self, row: int) -> int:
        """Tokens of a sequence. O(1)."""
        return int(self._state.rows[self._occupied(row), NUM_TOKENS])

    def generation(self, row: int) -> int:
        """Return which sequence a row serves: the number grows with every sequence that gets the row. O(1)."""
        return int(self._state.serials[self._occupied(row)])

    def generation_or_none(self, row: int) -> int | None:
        """Return which sequence a row serves, as :meth:`generation` does, or None for a vacant row. O(1)."""
        known = as_row(row)
        if known >= len(self._state.rows) or self._state.rows[known, STATUS] == VACANT:
            return None
        return int(self._state.serials[known])

    def _occupied(self, row: int) -> int:
        known = as_row(row)
        require_status(self._state, as_batch(known), OCCUPIED)
        return known

    def block_ids(self, row: int, group: int = 0) -> list[int]:
        """Physical blocks of a sequence in one group, reserved ones included; 0 where a window has moved on."""
        return cast("list[int]", self._entries(self._occupied(row), group).tolist())

    def draft_block_ids(self, row: int, group: int = 0) -> list[int]:
        """Physical blocks of a sequence's draft states in one group, by slot: 0 for idle slots; none without a table.

        The state of position p is in slot ``p % num_draft_states``
        (:class:`~pagedkv.contract.plan.DraftStates`).
        """
        known, owner = self._occupied(row), self._group(group)
        drafts = next((drafts for drafts in self._state.draft_tables if drafts.group is owner), None)
        if drafts is None:
            return []
        num_slots = int(drafts.arrays.parameters[NUM_DRAFT_STATES])
        return cast("list[int]", drafts.arrays.table[known, :num_slots].tolist())

    def block_table(self, group: int = 0) -> Int32Array:
        """View the block table of one group: read-only int32 ``[max_sequences, at least width]``, by row. O(1).

        Entries beyond a row's blocks are undefined; see :meth:`num_blocks`.
        """
        return read_only(self._group(group).arrays.table[:])

    def num_blocks(self, rows: Rows, group: int = 0) -> Int32Array:
        """Entries in use of some rows' tables, reserved ones and null blocks included: int32 ``[rows]``."""
        batch = as_batch(rows)
        require_status(self._state, batch, OCCUPIED)
        num_blocks: Int32Array = self._state.rows[batch, self._group(group).arrays.parameters[AT] + NUM_BLOCKS]
        return num_blocks

    def lengths(self, rows: Rows) -> Int32Array:
        """Tokens of some rows, planned or not: int32 ``[rows]``; the sequence lengths that kernels take."""
        batch = as_batch(rows)
        require_status(self._state, batch, OCCUPIED)
        lengths: Int32Array = self._state.rows[batch, NUM_TOKENS]
        return lengths

    def encoder_lengths(self, rows: Rows) -> Int32Array:
        """Encoder's tokens of some rows: int32 ``[rows]``, the key lengths that kernels of cross-attention take.

        Raises:
            ConfigurationError: no group is cross-attention.
        """
        batch = as_batch(rows)
        require_status(self._state, batch, OCCUPIED)
        if not self._state.cross_groups:
            raise ConfigurationError("rows have no encoder: no group is a CrossAttention")
        lengths: Int32Array = self._state.rows[batch, self._state.cross_groups[0].positions]
        return lengths

    def slot_mapping(self, plan: StepPlan, group: int = 0) -> Int64Array:
        """Return where the step writes keys and values: the slot of every position it computes, in the plan's order.

        Slot ``block_id * block_size + offset``: int64 ``[plan.compute_in(group).num_tokens]``. Changes nothing.

        Args:
            plan: the last plan of this space; call before its rows change.
            group: index of the group.

        Raises:
            StepError: another plan was made since, or this one is acknowledged or aborted.
            SequenceError: a row of the plan was freed, rolled back, copied on write or declared computed since.
            ConfigurationError: the group is a recurrent state, or there is no such group.

        Cost: O(rows + tokens), about 2 ns a token.
        """
        return planning.slot_mapping(self._state, self._ledger, plan, self._group(group))

    def page_lists(self, rows: Rows, group: int = 0) -> PageLists:
        """List the pages that hold tokens of running rows, as FlashInfer takes them. Changes nothing.

        Blocks reserved beyond the tokens are left out. Where a window or a chunk has moved on, only the pages from
        ``starts`` on are listed; sink blocks before the gap are not (see :meth:`block_ids`).

        Raises:
            ConfigurationError: the group is a recurrent state, or there is no such group.

        Cost: O(rows + pages), about 2 ns a page.
        """
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        return planning.page_lists(self._state, batch, self._group(group))

    @property
    def now_s(self) -> float:
        """The time that the clock shows, in the seconds of :meth:`BlockSpace.advance <pagedkv.BlockSpace.advance>`."""
        return self._state.now_s

    @property
    def weights_epoch(self) -> str | int:
        """The current epoch of the weights. O(1)."""
        return self._state.weights.epoch

    def ref_counts(self, pool: str | None = None) -> Int32Array:
        """View each block's reference count (table entries and tickets): read-only int32 ``[num_blocks]``. O(1)."""
        owner = self._pool(pool)
        return read_only(owner.arrays.records[: owner.num_blocks, REF_COUNT])

    def _pool(self, name: str | None) -> BlockPool:
        if name is None:
            return self._state.groups[0].pool
        if not isinstance(name, str) or name not in self._state.pools:
            raise ConfigurationError(f"there is no pool {name!r}: the pools are {list(self._state.pools)}")
        return self._state.pools[name]

    def _refuse_ahead(self, what: str) -> None:
        if self._state.ahead_groups:
            refuse_ahead(self._state.config.groups, what)

    def _group(self, index: int) -> Group:
        groups = self._state.all_groups
        if as_count(index, "group", least=-1) not in range(len(groups)):
            raise ConfigurationError(f"there is no group {index}: the groups are 0 to {len(groups) - 1}")
        return groups[index]

    def _entries(self, row: int, group: int) -> Int32Array:
        arrays = self._group(group).arrays
        return arrays.table[row, : int(self._state.rows[row, arrays.parameters[AT] + NUM_BLOCKS])]

    def computed_block_ids(self, row: int, group: int = 0) -> list[int]:
        """Leading full blocks of a sequence whose tokens are all computed (acknowledged).

        Replayed blocks that are not exact by themselves are given as the null block (:class:`~pagedkv.Replay`).
        Right after a swap-in, the content arrives only with the open plan, before its forward pass. States of tokens
        that are not accepted are not listed here, in groups that keep draft states (:meth:`draft_block_ids`).
        """
        known = as_row(row)
        require_status(self._state, as_batch(known), RUNNING)
        owner = self._group(group)
        num_computed = int(self._state.rows[known, owner.planned])
        if owner.arrays.parameters[NUM_DRAFT_STATES]:
            num_computed = min(num_computed, int(self._state.rows[known, NUM_ACCEPTED]))
        entries = self._entries(known, group)[: num_computed // owner.block_size]
        if owner.replays:
            entries = without_inexact(self._state, owner, known, entries)
        pending = owner.pool.arrays.records[entries, PENDING_STEP] > self._state.settled_step
        return cast("list[int]", entries[: int(np.argmax(pending)) if pending.any() else len(entries)].tolist())

    def num_free_blocks(self, pool: str | None = None) -> int:
        """Free blocks of a pool; of the first group's pool when None."""
        return self._pool(pool).num_free

    def num_cached_blocks(self, pool: str | None = None) -> int:
        """Free blocks whose content is cached; of the first group's pool when None. O(1)."""
        return self._pool(pool).num_cached

    def num_deferred_blocks(self, pool: str | None = None) -> int:
        """Unreferenced blocks that a step in flight may still use; of the first group's pool when None. O(1)."""
        return self._pool(pool).num_deferred

    def num_live_blocks(self, pool: str | None = None) -> int:
        """Blocks that tables or tickets refer to; of the first group's pool when None. O(1)."""
        owner = self._pool(pool)
        return owner.num_present - owner.num_free - owner.num_deferred

    def num_absent_blocks(self, pool: str | None = None) -> int:
        """Blocks whose memory was given back (:meth:`BlockSpace.shrink <pagedkv.BlockSpace.shrink>`). O(1)."""
        return self._pool(pool).num_absent

    def statistics(self) -> SpaceStatistics:
        """Take a snapshot of all counts. O(rows + blocks held)."""
        return take_statistics(self._state, len(self._ledger.in_flight))

    def receipt(self, row: int) -> Receipt:
        """Return what a sequence has taken so far: computed, hit, shared, held. Changes nothing. O(1).

        The sequence may be running, swapped out or lost; :meth:`BlockSpace.free <pagedkv.BlockSpace.free>` returns the
        final receipt.

        Raises:
            ConfigurationError: the space keeps no receipts.
        """
        book = self._state.receipts
        if book is None:
            raise ConfigurationError("no receipts are kept: set receipts=True in the configuration")
        return book.receipt(self._occupied(row))

    @property
    def has_events(self) -> bool:
        """Whether events wait to be drained. O(pools)."""
        return any(pool.has_events for pool in self._state.pools.values())

    def drain_events(self) -> tuple[CacheEvents, ...]:
        """Take the events since the last call, one batch a pool (empty unless ``config.events``)."""
        state = self._state
        with state.draining:
            return tuple(pool.drain_events() for pool in state.pools.values())

    def stored_blocks(self, pool: str | None = None) -> StoredBlocks:
        """List every cached block of a pool, the first group's pool when None. Changes nothing. O(blocks).

        After a GAP event, a consumer of events drains them, forgets the pool, takes this list for what it holds, and
        goes on with the events.

        Raises:
            ConfigurationError: there is no such pool, or the names of a group cover tokens ahead.
        """
        self._refuse_ahead(NOT_LISTED)
        return stored_blocks.list_stored(self._state, self._pool(pool))

    def next_victims(self, num_blocks: int, pool: str | None = None) -> StoredBlocks:
        """List the cached blocks among those that the next allocations take, the next one first. Changes nothing.

        This is the order of the free blocks. Leased blocks are left out, and an allocation departs from it where a
        tenant is at its cap, where floors keep blocks of others, and with the policies "hazard" and "priority".

        Args:
            num_blocks: how many allocations.
            pool: name of a device pool; the first group's when None.

        Raises:
            ConfigurationError: there is no such pool, or the names of a group cover tokens ahead.

        Cost: O(num_blocks).
        """
        self._refuse_ahead(NOT_LISTED)
        return stored_blocks.next_victims(self._state, self._pool(pool), as_count(num_blocks, "num_blocks"))

    def stored_block(self, digest: bytes | npt.NDArray[np.uint8], group: int = 0) -> StoredBlock | None:
        """Return tokens, extra keys and parent of the block with this digest, or None. Changes nothing.

        Cost: O(block size + blocks that open and planned steps move).

        Raises:
            BlockError: ``digest`` is neither 32 bytes nor uint8 ``[32]``.
            ConfigurationError: there is no such group, or the names of one cover tokens ahead.
        """
        self._refuse_ahead(NOT_LISTED)
        found = stored_blocks.look_up(self._state, self._group(group), digest)
        if found is not None and found.block_id in self._ledger.moved_blocks(found.pool)[0]:
            return replace(found, is_computed=False)
        return found

    def contents_of(self, blocks: CacheEvents | StoredBlocks) -> BlockContents:
        """Return tokens and extra keys of the blocks that events stored, or of a list. Changes nothing.

        Only the content of cached blocks is known. A block that was evicted since has none: its removal is among the
        same events, or will be among the next ones.

        Raises:
            ConfigurationError: the space has no such pool, or ``blocks`` is neither.

        Cost: O(blocks x block size); 60 us for 4 blocks.
        """
        if not isinstance(blocks, CacheEvents | StoredBlocks):
            raise ConfigurationError(f"blocks must be CacheEvents or StoredBlocks, got {type(blocks).__name__}")
        return stored_blocks.contents_of(self._state, self._pool(blocks.pool), blocks)

    def check(self) -> None:
        """Prove every invariant, or raise AssertionError. O(blocks + table entries)."""
        check_space(self._state, self._ledger)


class ObservedSpace(SpaceView):
    """The read access to a space, also allowed in the middle of its operations."""

    def __init__(self, space: SpaceView) -> None:
        """View the same space."""
        self._own_state, self._ledger = space._own_state, space._ledger  # noqa: SLF001

    def misses(self, hit: PrefixHit) -> tuple[Miss, ...]:
        """Return why the tokens of a prompt do not hit, in runs of equal cause. O(tokens).

        Only the latest continuation of the hit is compared (:meth:`BlockSpace.explanation
        <pagedkv.BlockSpace.explanation>`).

        Args:
            hit: what the prompt hits now.
        """
        return explain_misses(self._state, hit)
