"""The state of a block space: pools, groups, rows and digest chains, built from a configuration.

Owns construction and the few look-ups that every operation needs. Groups of equal block size share a
*lane*: one digest chain a row, computed once for all of them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.core.blocks import HOLD_STEP, OPEN_STEP, PENDING_STEP, SETTLED_STEP, PoolArrays, Uint32Array
from pagedkv.core.eviction import POLICIES
from pagedkv.core.extra_keys import ExtraKeyTable
from pagedkv.core.pool import BlockPool
from pagedkv.core.rows import AT, BLOCK_SIZE, FULL, KIND, NUM_DIGESTED, GroupArrays, new_group_arrays, new_rows
from pagedkv.keys import RequestKeys
from pagedkv.space.loops import SpaceLoops
from pagedkv.spec import GroupSpec, RecurrentState, SpaceConfig, StepId

__all__ = ["Group", "SpaceState"]

STEPS_BEFORE_RENUMBERING: Final = 2**30


@dataclass(frozen=True, slots=True)
class Group:
    """One group of layers: its rule, its table, and the pools it draws from.

    Args:
        index: position in the configuration.
        spec: the retention rule.
        arrays: table and parameters.
        pool: where its blocks live.
        host_pool: where swapped-out blocks go, or None.
        lane: index of the digest chain that it shares with groups of the same block size.
    """

    index: int
    spec: GroupSpec
    arrays: GroupArrays
    pool: BlockPool
    host_pool: BlockPool | None
    lane: int

    @property
    def block_size(self) -> int:
        """Tokens a block (for a recurrent state without prefix caching: all tokens)."""
        return int(self.arrays.parameters[BLOCK_SIZE])

    @property
    def keeps_whole_prefix(self) -> bool:
        """Whether the rule never drops a block (full attention)."""
        return bool(self.arrays.parameters[KIND] == FULL)

    def num_slots_blocks(self, num_tokens: int, num_lookahead: int) -> int:
        """Count the blocks for so many tokens and reserved slots (a recurrent state reserves none)."""
        reserve = 0 if isinstance(self.spec, RecurrentState) else num_lookahead
        return -(-(num_tokens + reserve) // self.block_size)


class SpaceState:
    """All arrays of one block space.

    Attributes:
        pools: device pools by name; host_pools: host pools by the same names.
        pool_counts: the counts of the device pools.
        groups: the groups, in the configuration's order; lanes: the groups of each digest chain.
        digested_columns: for each lane the column of ``rows`` that counts digested blocks.
        rows: int32 ``[max_sequences, columns]`` (see :mod:`pagedkv.core.rows`).
        chains: per lane uint32 ``[max_sequences, 8]``: digest of each row's last digested block.
        vacant_rows: rows to be handed out, last first: the one vacated last is warm in the processor's caches.
        relies_on: int32 ``[max_sequences]``, last step in which another row computes content that a row
            shares; if that step is aborted, the row is lost.
        media_keys: keys of the rows whose prompts have media.
        media_reach: int32 ``[max_sequences]``, where the last medium of a row ends.
        is_recurrent: a group keeps a state, which only one sequence at a time may advance.
        num_steps_before: what blocks' step numbers lack to those that callers know.
        weights_epoch: version of the model's weights, part of every first block's identity.
    """

    def __init__(self, config: SpaceConfig) -> None:
        """Build empty pools and tables. O(blocks)."""
        self.config = config
        self.pools = self._new_pools(config.blocks_by_pool())
        self.host_pools = self._new_pools(config.host_blocks_by_pool())
        self.pool_counts = [pool.arrays.counts for pool in self.pools.values()]
        self.rows = new_rows(config.max_sequences, len(config.groups))
        self.vacant_rows = list(range(config.max_sequences))[::-1]
        self.media_keys: dict[int, RequestKeys] = {}
        self.media_reach = np.zeros(config.max_sequences, np.int32)
        self.weights_epoch = config.weights_epoch
        self.groups = self._new_groups()
        self.extra_keys = ExtraKeyTable(max(group.block_size for group in self.groups))
        self.lanes = self._lanes()
        first = self.groups[0]
        self.loops = SpaceLoops(first.pool.arrays, first.arrays, self.rows, self.extra_keys.arrays)
        self.chains: list[Uint32Array] = [np.zeros((config.max_sequences, 8), np.uint32) for _ in self.lanes]
        self.digested_columns = [int(lane[0].arrays.parameters[AT]) + NUM_DIGESTED for lane in self.lanes]
        self.is_recurrent = any(isinstance(group.spec, RecurrentState) for group in self.groups)
        self.relies_on = np.zeros(config.max_sequences, np.int32)
        self.ones = np.ones(config.max_sequences, np.int32)
        self.copy_scratch = np.empty((config.max_sequences, 2), np.int32)
        self.plan_scratch = np.empty((4, config.max_sequences), np.int32)
        self.num_steps_before = 0
        self.num_batches = 0
        self.keys_before_sweep = 1024

    def _new_pools(self, num_blocks: dict[str, int]) -> dict[str, BlockPool]:
        config = self.config
        pools = {}
        for name, count in num_blocks.items():
            if count == 0:
                continue
            policy = POLICIES[config.eviction]
            block_size = max(group.block_size for group in config.groups if group.pool == name)
            pools[name] = BlockPool(name, count, block_size, caching=config.prefix_caching, policy=policy)
            if config.events:
                pools[name].record_events()
        return pools

    def _new_groups(self) -> tuple[Group, ...]:
        config = self.config
        lane_of_size: dict[int, int] = {}
        groups = []
        for index, spec in enumerate(config.groups):
            arrays = new_group_arrays(index, config)
            lane = lane_of_size.setdefault(int(arrays.parameters[BLOCK_SIZE]), len(lane_of_size))
            groups.append(Group(index, spec, arrays, self.pools[spec.pool], self.host_pools.get(spec.pool), lane))
        return tuple(groups)

    def _lanes(self) -> tuple[tuple[Group, ...], ...]:
        num_lanes = 1 + max(group.lane for group in self.groups)
        return tuple(tuple(group for group in self.groups if group.lane == lane) for lane in range(num_lanes))

    @property
    def all_pools(self) -> list[BlockPool]:
        """Device and host pools."""
        return [*self.pools.values(), *self.host_pools.values()]

    @property
    def open_step_id(self) -> StepId:
        """Number of the open step as callers know it: it never starts again."""
        return StepId(self.num_steps_before + self.open_step)

    @property
    def open_step(self) -> int:
        """Number of the step that is being put together, as blocks note it."""
        return int(self._clock.counts[OPEN_STEP])

    @property
    def settled_step(self) -> int:
        """Number of the last step that is over, as blocks note it."""
        return int(self._clock.counts[SETTLED_STEP])

    @property
    def _clock(self) -> PoolArrays:
        return self.groups[0].pool.arrays

    def advance_open_step(self) -> None:
        """Begin the next step, in every pool."""
        for pool in self.all_pools:
            pool.arrays.counts[OPEN_STEP] += 1
        if self.open_step >= STEPS_BEFORE_RENUMBERING:
            self._renumber_steps()

    def _renumber_steps(self) -> None:
        """Count steps from the last settled one on, since blocks note them in 32 bits. O(blocks), every 2**30 steps."""
        settled = self.settled_step
        for pool in self.all_pools:
            steps = pool.arrays.records[:, (PENDING_STEP, HOLD_STEP)]
            pool.arrays.records[:, (PENDING_STEP, HOLD_STEP)] = np.maximum(steps - settled, 0)
            pool.arrays.counts[[OPEN_STEP, SETTLED_STEP]] -= settled
        self.relies_on[:] = np.maximum(self.relies_on - settled, 0)
        self.num_steps_before += settled

    def next_mark(self) -> int:
        """Make a number that no batch of rows was marked with before."""
        self.num_batches = self.num_batches % (2**31 - 1) + 1
        return self.num_batches

    def reserve_events(self, num_rows: int, num_slots: int) -> None:
        """Make room for every event that an operation on so many rows and slots can cause (when events are on).

        Each block that it touches can lose one name, get one, and take one from an orphan; a row touches at
        most two more than its slots fill.
        """
        if not self.config.events:
            return
        for pool in self.pools.values():
            sizes = [group.block_size for group in self.groups if group.pool is pool]
            pool.reserve_events(sum(3 * (2 * num_rows + num_slots // size) for size in sizes))

    def reserve_events_for_all(self) -> None:
        """Make room for an operation that drops every name and publishes again (when events are on)."""
        for pool in self.pools.values():
            pool.reserve_events(4 * pool.num_blocks)
