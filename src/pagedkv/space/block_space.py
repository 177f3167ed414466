"""BlockSpace: every operation on sequences, for whole batches of rows at a time.

The scheduler's inner door. A *row* is a live sequence's place in the tables; operations take arrays of
rows, decide everything before they change anything, and return a :class:`~pagedkv.plan.Shortage` when
blocks are short. What a step needs done in memory comes out of :meth:`BlockSpace.plan_step`::

    allocate / append / truncate / fork / free / swap_out / swap_in    any number of times, in any order
    plan = plan_step()                                                 closes the open step
    acknowledge(plan.step_id)  or  abort(plan.step_id)                 when the device has run it, or failed

Tokens enter when they are scheduled: a chunked prefill is an ``allocate`` of the first chunk and an
``append`` of each further one. Several steps may be in flight. This class checks and documents; the
modules beside it carry out: ``admission``, ``growth``, ``sharing``, ``swaps``, ``stepping``, ``releasing``.
"""

from typing import cast

import numpy as np
import numpy.typing as npt

from pagedkv.core.blocks import PENDING_STEP, REF_COUNT, Int32Array
from pagedkv.core.pool import BlockPool
from pagedkv.core.rows import (
    AT,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_TOKENS,
    OCCUPIED,
    RUNNING,
    SERIAL,
    STATUS,
    SWAPPED,
    VACANT,
)
from pagedkv.core.tokens import as_token_array
from pagedkv.errors import ConfigurationError, NoHostPoolError, StepError
from pagedkv.events import CacheEvents
from pagedkv.keys import NO_KEYS, RequestKeys
from pagedkv.numbers import as_count
from pagedkv.plan import AbortedSteps, Allocation, BlockMoves, PrefixHit, Shortage, StepPlan
from pagedkv.space import admission, growth, releasing, sharing, stepping, swaps
from pagedkv.space.audit import check_space
from pagedkv.space.batches import Rows, as_batch, as_row, as_step_id, require_status
from pagedkv.space.prompts import match_prompt, prepare_prompt
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.statistics import SpaceStatistics, take_statistics
from pagedkv.space.steps import StepLedger, read_only
from pagedkv.spec import AllocStatus, SpaceConfig, StepId, TokenIds

__all__ = ["BlockSpace"]


class BlockSpace:
    """The KV-cache bookkeeping of one engine, by rows.

    Raises (all methods that take rows): :class:`~pagedkv.errors.SequenceError` for rows that are unknown,
    freed, swapped out, lost or named twice; nothing is changed then.
    """

    def __init__(self, config: SpaceConfig) -> None:
        """Build empty pools and tables. O(blocks)."""
        self.config = config
        self._state = SpaceState(config)
        self._ledger = StepLedger()

    # Admission

    def match(
        self, token_ids: TokenIds, *, keys: RequestKeys = NO_KEYS, digests: npt.ArrayLike | None = None
    ) -> PrefixHit:
        """Tell how many leading tokens are cached. Changes nothing. O(blocks of the prompt)."""
        prompt = prepare_prompt(self._state, token_ids, keys, digests, 0)
        return PrefixHit(len(match_prompt(self._state, prompt)[0]) * self._state.groups[0].block_size)

    def can_allocate(
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        num_lookahead: int = 0,
        num_sequences: int = 1,
    ) -> AllocStatus:
        """Tell whether a prompt fits: now, later, or not even an empty pool. Changes nothing.

        ``num_sequences`` sequences are to share it by forks. Counts vacant rows, free blocks, what hits would
        save, and the watermark. A prompt beyond ``max_tokens`` raises :class:`~pagedkv.errors.TokenError`, as
        in :meth:`allocate`.
        """
        reserve = as_count(num_lookahead, "num_lookahead")
        prompt = prepare_prompt(self._state, token_ids, keys, digests, reserve)
        num_rows = as_count(num_sequences, "num_sequences", least=1)
        return admission.admission_status(self._state, prompt, reserve, num_rows)

    def allocate(
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        num_lookahead: int = 0,
    ) -> Allocation | Shortage:
        """Give a new sequence a row and blocks for its tokens, sharing what is cached.

        Args:
            token_ids: the tokens that the open step computes, and any prefix that may hit.
            keys: extra keys: LoRA, tenant salt, media.
            digests: uint8 ``[full blocks, 32]`` computed elsewhere (full attention only); a wrong one can lose
                hits, but never grants one.
            num_lookahead: slots reserved beyond the tokens.

        Raises:
            TokenError, ConfigurationError: see :func:`~pagedkv.space.prompts.prepare_prompt`.
            TooManySequencesError: every row is taken.

        Cost: O(blocks); about 0.1 us a new block, and 0.08 us where its digest is computed.
        """
        reserve = as_count(num_lookahead, "num_lookahead")
        prompt = prepare_prompt(self._state, token_ids, keys, digests, reserve)
        return admission.allocate(self._state, self._ledger, prompt, reserve)

    def require_vacant_rows(self, num_sequences: int) -> None:
        """Raise TooManySequencesError unless so many more sequences can have a row. Changes nothing."""
        sharing.require_vacant_rows(self._state, as_count(num_sequences, "num_sequences"))

    # Growth

    def can_append(self, rows: Rows, counts: npt.ArrayLike | None = None, *, num_lookahead: int = 0) -> bool:
        """Tell exactly whether :meth:`append` would find enough blocks. Changes nothing."""
        growing = growth.as_growth(self._state, as_batch(rows), counts, num_lookahead, 0)
        growth.require_growth(self._state, growing)
        return growth.growth_shortage(self._state, growing) is None

    def append(
        self,
        rows: Rows,
        token_ids: TokenIds,
        counts: npt.ArrayLike | None = None,
        *,
        num_lookahead: int = 0,
        num_draft: int = 0,
    ) -> Shortage | None:
        """Append tokens to a batch of rows: the decode step of 1,024 sequences is one call.

        Args:
            rows: the rows, each at most once.
            token_ids: the new tokens of all rows, concatenated in the order of ``rows``.
            counts: int32 ``[len(rows)]``, tokens of each row; one each when None.
            num_lookahead: slots to be reserved beyond the tokens of every row.
            num_draft: trailing tokens of every row that are guesses: not published before they are
                accepted, by :meth:`truncate` or by the next append of tokens.

        Returns None, or the shortage with nothing changed. Copies on write go into the plan.

        Raises:
            TokenError: ids outside int32, counts that do not add up, a row beyond ``max_tokens``.

        Cost: O(rows + tokens), about 5 ns a row.
        """
        copies = self.append_with_copies(rows, token_ids, counts, num_lookahead=num_lookahead, num_draft=num_draft)
        return copies if isinstance(copies, Shortage) else None

    def append_with_copies(
        self,
        rows: Rows,
        token_ids: TokenIds,
        counts: npt.ArrayLike | None = None,
        *,
        num_lookahead: int = 0,
        num_draft: int = 0,
    ) -> list[tuple[int, int]] | Shortage:
        """Append like :meth:`append`, and return the copies on write in the first group's pool."""
        growing = growth.as_growth(self._state, as_batch(rows), counts, num_lookahead, num_draft)
        return growth.append(self._state, self._ledger, growing, as_token_array(token_ids))

    def truncate(self, rows: Rows, lengths: npt.ArrayLike) -> None:
        """Roll rows back to earlier lengths, give reserved slots back, and accept and publish what remains.

        Raises:
            SharedPrefixError: another sequence holds blocks beyond that length.
            TruncationError: a length outside ``[1, num_tokens]``; a window's or a state's content that is gone.

        Nothing is changed when it raises. O(rows x blocks given back).
        """
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        wanted = growth.as_counts(lengths, len(batch), "lengths")
        growth.truncate(self._state, self._ledger, batch, wanted)

    # Sharing

    def fork(self, row: int, num_children: int = 1) -> Int32Array:
        """Make sequences that share every block of a row; return their rows. Copies no keys or values.

        Raises:
            TooManySequencesError: there are fewer vacant rows.
            SequenceError: a recurrent state whose tokens no plan computes yet.

        Cost: O(blocks x children), about 1 ns each.
        """
        parent = as_row(row)
        require_status(self._state, as_batch(parent), RUNNING)
        return sharing.fork(self._state, self._ledger, parent, as_count(num_children, "num_children", least=1))

    def free(self, rows: Rows) -> None:
        """Give up sequences, running, swapped out or lost. O(blocks), about 5 ns each.

        Cached blocks stay findable until they are evicted: of one sequence the tail first.
        """
        batch = as_batch(rows)
        mark = require_status(self._state, batch, OCCUPIED)
        releasing.free(self._state, batch, mark)

    # Swapping

    def can_swap_out(self, rows: Rows) -> AllocStatus:
        """Tell whether the host pools can take these rows. Changes nothing.

        NEVER without a host pool; LATER too while the open plan copies or swaps into their blocks.
        """
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        return swaps.swap_out_status(self._state, self._ledger, batch)

    def swap_out(self, rows: Rows) -> tuple[BlockMoves, ...] | Shortage:
        """Move rows to the host pools: device block -> host block, a shared block once.

        The moves are in the open step's plan as well; device blocks go back when it is acknowledged.

        Raises:
            NoHostPoolError: a group's pool has no host pool.
            SequenceError: the open plan writes their blocks (``can_swap_out`` says LATER).
        """
        batch = as_batch(rows)
        mark = require_status(self._state, batch, RUNNING)
        return swaps.swap_out(self._state, self._ledger, batch, mark)

    def can_swap_in(self, rows: Rows, *, num_lookahead: int = 0) -> AllocStatus:
        """Tell whether the device pools can take swapped-out rows back, watermark included. Changes nothing.

        ``num_lookahead`` slots a row are asked for beyond their tokens, for the steps that follow.
        """
        self._require_host_pools()
        batch = as_batch(rows)
        require_status(self._state, batch, SWAPPED)
        return swaps.swap_in_status(self._state, batch, as_count(num_lookahead, "num_lookahead"))

    def swap_in(self, rows: Rows) -> tuple[BlockMoves, ...] | Shortage:
        """Move swapped-out rows back: host block -> device block. The open step may compute them at once."""
        self._require_host_pools()
        batch = as_batch(rows)
        require_status(self._state, batch, SWAPPED)
        return swaps.swap_in(self._state, self._ledger, batch)

    def _require_host_pools(self) -> None:
        if not self._state.host_pools:
            raise NoHostPoolError("no host pool is configured: set num_host_blocks")

    # Steps

    def plan_step(self) -> StepPlan:
        """Close the open step and say all that it needs done in memory. O(rows + changed table entries)."""
        return stepping.plan_step(self._state, self._ledger)

    def acknowledge(self, step_id: StepId) -> None:
        """The oldest step in flight has run: its tokens count as computed, what waited for it is freed.

        Raises:
            StepError: another step is the oldest in flight.
        """
        stepping.acknowledge(self._state, self._ledger, as_step_id(step_id))

    def abort(self, step_id: StepId) -> AbortedSteps:
        """A step in flight failed: it and all later ones count as never run; what they published is withdrawn.

        Rows that share tokens which another row computes in these steps, or in the open one, are lost: only the
        last such step of a row is known.

        Raises:
            StepError: the step is not in flight.
        """
        return stepping.abort(self._state, self._ledger, as_step_id(step_id))

    def mark_computed(self, rows: Rows) -> None:
        """State that all tokens of these rows are computed, outside any plan; windows slide accordingly.

        Rows that share blocks which the open step, or one in flight, computes for one of them are to be named together.

        Raises:
            StepError: a group is a recurrent state and steps are in flight, which may still advance it; or a row that
                is not named computes shared blocks.
        """
        if self._state.is_recurrent and self._ledger.in_flight:
            raise StepError("a recurrent state cannot be declared computed while steps are in flight: acknowledge them")
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        stepping.mark_computed(self._state, self._ledger, batch)

    # The prefix cache as a whole

    def reset_prefix_cache(self) -> None:
        """Make everything cached unfindable; sequences keep their own blocks, and publish nothing any more."""
        releasing.reset_prefix_cache(self._state, self._ledger)

    def set_weights_epoch(self, weights_epoch: str) -> None:
        """Start a new epoch of the model's weights: reset the cache; new blocks carry the epoch in their identity."""
        if not isinstance(weights_epoch, str):
            raise ConfigurationError(f"weights_epoch must be text, got {weights_epoch!r}")
        self.reset_prefix_cache()
        self._state.weights_epoch = weights_epoch

    # Seeing

    def block_size(self, group: int = 0) -> int:
        """Tokens a block of one group."""
        return self._group(group).block_size

    def num_tokens(self, row: int) -> int:
        """Tokens of a sequence. O(1)."""
        return int(self._state.rows[self._occupied(row), NUM_TOKENS])

    def generation(self, row: int) -> int:
        """Tell which sequence a row serves: the number grows with every sequence that gets the row. O(1)."""
        return int(self._state.rows[self._occupied(row), SERIAL])

    def generation_or_none(self, row: int) -> int | None:
        """Tell which sequence a row serves, or None if it serves none. O(1)."""
        record = self._state.rows[as_row(row)]
        return int(record[SERIAL]) if record[STATUS] != VACANT else None

    def _occupied(self, row: int) -> int:
        known = as_row(row)
        require_status(self._state, as_batch(known), OCCUPIED)
        return known

    def block_ids(self, row: int, group: int = 0) -> list[int]:
        """Physical blocks of a sequence in one group, reserved ones included; 0 where a window has moved on."""
        return cast("list[int]", self._entries(self._occupied(row), group).tolist())

    def block_table(self, group: int = 0) -> Int32Array:
        """View the block table of one group: read-only int32 ``[max_sequences, at least width]``, by row. O(1).

        Entries beyond a row's blocks mean nothing; see :meth:`num_blocks`.
        """
        return read_only(self._group(group).arrays.table[:])

    def num_blocks(self, rows: Rows, group: int = 0) -> Int32Array:
        """Entries in use of some rows' tables, reserved ones and null blocks included: int32 ``[rows]``."""
        batch = as_batch(rows)
        require_status(self._state, batch, OCCUPIED)
        num_blocks: Int32Array = self._state.rows[batch, self._group(group).arrays.parameters[AT] + NUM_BLOCKS]
        return num_blocks

    def lengths(self, rows: Rows) -> Int32Array:
        """Tokens of some rows: int32 ``[rows]``."""
        batch = as_batch(rows)
        require_status(self._state, batch, OCCUPIED)
        lengths: Int32Array = self._state.rows[batch, NUM_TOKENS]
        return lengths

    def ref_counts(self, pool: str | None = None) -> Int32Array:
        """View the table entries that refer to each block of a pool: read-only int32 ``[num_blocks]``. O(1)."""
        owner = self._pool(pool)
        return read_only(owner.arrays.records[: owner.num_blocks, REF_COUNT])

    def _pool(self, name: str | None) -> BlockPool:
        if name is None:
            return self._state.groups[0].pool
        if not isinstance(name, str) or name not in self._state.pools:
            raise ConfigurationError(f"there is no pool {name!r}: the pools are {list(self._state.pools)}")
        return self._state.pools[name]

    def _group(self, index: int) -> Group:
        if as_count(index, "group", least=-1) not in range(len(self._state.groups)):
            raise ConfigurationError(f"there is no group {index}: the groups are 0 to {len(self._state.groups) - 1}")
        return self._state.groups[index]

    def _entries(self, row: int, group: int) -> Int32Array:
        arrays = self._group(group).arrays
        return arrays.table[row, : int(self._state.rows[row, arrays.parameters[AT] + NUM_BLOCKS])]

    def computed_block_ids(self, row: int, group: int = 0) -> list[int]:
        """Leading full blocks of a sequence whose tokens are all computed (acknowledged).

        Right after a swap-in the open plan still brings their content, ahead of its forward pass.
        """
        known = as_row(row)
        require_status(self._state, as_batch(known), RUNNING)
        owner = self._group(group)
        entries = self._entries(known, group)[: int(self._state.rows[known, NUM_PLANNED]) // owner.block_size]
        pending = owner.pool.arrays.records[entries, PENDING_STEP] > self._state.settled_step
        return cast("list[int]", entries[: int(np.argmax(pending)) if pending.any() else len(entries)].tolist())

    def num_free_blocks(self, pool: str | None = None) -> int:
        """Blocks that can be handed out now; of the first group's pool when none is named."""
        return self._pool(pool).num_free

    def num_cached_blocks(self, pool: str | None = None) -> int:
        """Free blocks whose content can still be found; of the first group's pool when none is named. O(1)."""
        return self._pool(pool).num_cached

    def num_deferred_blocks(self, pool: str | None = None) -> int:
        """Unreferenced blocks that wait for a step; of the first group's pool when none is named. O(1)."""
        return self._pool(pool).num_deferred

    def num_live_blocks(self, pool: str | None = None) -> int:
        """Blocks that tables refer to; of the first group's pool when none is named. O(1)."""
        owner = self._pool(pool)
        return owner.num_usable - owner.num_free - owner.num_deferred

    def statistics(self) -> SpaceStatistics:
        """Take a snapshot of all counts. O(rows)."""
        return take_statistics(self._state, len(self._ledger.in_flight))

    @property
    def has_events(self) -> bool:
        """Whether events wait to be drained. O(pools)."""
        return any(pool.has_events for pool in self._state.pools.values())

    def drain_events(self) -> tuple[CacheEvents, ...]:
        """Take the events since the last call, one batch a pool (empty unless ``config.events``)."""
        return tuple(pool.drain_events() for pool in self._state.pools.values())

    def check(self) -> None:
        """Prove every invariant, or raise AssertionError. O(blocks + table entries)."""
        check_space(self._state)
