"""Leases across groups: what prompts hit, or ended sequences leave, is kept until a time of the space's clock.

:mod:`pagedkv.blocks.leasing` says how leases change the order of eviction. They never change whether a block can
be taken, so admission ignores leases.

Leases for the blocks of rows and of hits, in one group; :mod:`pagedkv.blocks.leasing` defines leases.

A leased block of a window group is kept for the reason ``AT_END``, so it is not shed as long as the lease lasts.
"""

import numpy as np

from pagedkv.blocks.leasing import lease
from pagedkv.blocks.life_cycle import make_cached
from pagedkv.blocks.record import AT_END, HIGH_PRIORITY, KEPT, LIFE, NAME, NULL_BLOCK, PoolArrays, is_spare
from pagedkv.blocks.victims import end_overdue
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.feature import SpaceFeature
from pagedkv.space.matching import PrefixHit
from pagedkv.space.releasing import Leaving
from pagedkv.space.rows import AT, NUM_BLOCKS, RUNNING, SHEDS, STATUS, TAIL, TAIL_LIFE, GroupArrays
from pagedkv.space.state import SpaceState
from pagedkv.space.windows import carrier_of

__all__ = ["LeaseFeature", "lease_blocks", "lease_hit", "lease_row"]


def lease_hit(state: SpaceState, hit: PrefixHit, until_s: float) -> None:
    """Lease the blocks that a prompt hits, including those inside which the hit ends."""
    with state.changing:
        for tail in hit.tails:
            group = state.groups[tail.group]
            lease_blocks(group.pool.arrays, group.arrays, np.array([tail.block], np.int32), until_s)
        for group in state.cached_groups:
            lease_blocks(group.pool.arrays, group.arrays, hit.block_ids[group.index], until_s)


class LeaseFeature(SpaceFeature):
    """The part of the operations that leases what ended sequences leave, and ends leases in time."""

    def __init__(self, state: SpaceState) -> None:
        """Use the state of a space. O(1)."""
        self._state = state

    def freeing(self, batch: Int32Array, leaving: Leaving) -> None:
        """Lease what running rows are about to release, if that is wanted."""
        until_s = HIGH_PRIORITY if leaving.goes_last else leaving.keep_until_s
        if until_s is None or not self._state.config.prefix_caching:
            return
        for row in batch[self._state.rows[batch, STATUS] == RUNNING].tolist():
            for group in self._state.cached_groups:
                lease_row(*group.view, row, until_s)

    def advanced(self, now_s: float) -> None:
        """Make blocks whose leases have ended ordinary cached blocks. O(log leased blocks) for each of them."""
        for pool in self._state.pools.values():
            end_overdue(pool.arrays, now_s)


@compiled
def lease_block(pool: PoolArrays, group: GroupArrays, block: int, until: float) -> None:
    """Lease one block, if it has a name."""
    if block == NULL_BLOCK or not pool.records[block, NAME]:
        return
    if is_spare(pool, block):
        make_cached(pool, block)
    if group.parameters[SHEDS]:
        pool.records[block, KEPT] |= AT_END
    lease(pool, block, until)


@compiled
def lease_blocks(pool: PoolArrays, group: GroupArrays, blocks: Int32Array, until: float) -> None:
    """Lease the blocks of a hit, null blocks excepted, the tail before the head: in the order of a release."""
    for block in blocks[::-1]:
        lease_block(pool, group, block, until)


@compiled
def lease_row(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, until: float) -> None:
    """Lease the named content of a row, in whichever block has the name, and the last state that it has left.

    The tail comes before the head, as in a release: another block may have the name, and be free.
    """
    at = group.parameters[AT]
    tail = rows[row, at + TAIL]
    if pool.records[tail, LIFE] == rows[row, at + TAIL_LIFE]:
        lease_block(pool, group, tail, until)
    for index in range(rows[row, at + NUM_BLOCKS] - 1, -1, -1):
        if group.table[row, index] != NULL_BLOCK:
            lease_block(pool, group, carrier_of(pool, group, rows, row, index), until)
