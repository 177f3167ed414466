"""Leases across groups: what prompts hit, or ended sequences leave, is kept until a time of the space's clock.

:mod:`pagedkv.blocks.leasing` says how leases change the order of eviction. They never change whether a block can
be taken, so admission ignores leases.
"""

import numpy as np

from pagedkv.blocks.blocks import HIGH_PRIORITY
from pagedkv.blocks.lease_victims import end_overdue
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.feature import SpaceFeature
from pagedkv.space.hits import PrefixHit
from pagedkv.space.releasing import Leaving
from pagedkv.space.state import SpaceState
from pagedkv.tables.leasing import lease_blocks, lease_row
from pagedkv.tables.rows import RUNNING, STATUS

__all__ = ["LeaseFeature", "lease_hit"]


def lease_hit(state: SpaceState, hit: PrefixHit, until_s: float) -> None:
    """Lease the blocks that a prompt hits, including those inside which the hit ends."""
    state.is_changing = True
    for tail in hit.tails:
        group = state.groups[tail.group]
        lease_blocks(group.pool.arrays, group.arrays, np.array([tail.block], np.int32), until_s)
    for group in state.cached_groups:
        lease_blocks(group.pool.arrays, group.arrays, hit.block_ids[group.index], until_s)
    state.is_changing = False


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
