"""Continuing from a tail: a new row whose hit ends inside a block goes on from a copy of that block.

The block is a state that was kept inside an interval (:mod:`pagedkv.tables.checkpoints`), or one that hits in
part (:mod:`pagedkv.tables.partial_hits`). If it is unreferenced and its pool has no room for a copy beside it,
the row takes the block itself.
"""

import numpy as np

from pagedkv.blocks.blocks import FREE, QUEUE
from pagedkv.blocks.keep_reasons import AT_END, AT_JUNCTION, add_reasons_of
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.feature import SpaceFeature
from pagedkv.space.hits import PrefixHit
from pagedkv.space.pending import note_reliance
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.space.tails import Tail
from pagedkv.tables.checkpoints import resume, surrender
from pagedkv.tables.rows import SHEDS

__all__ = ["TailFeature"]


class TailFeature(SpaceFeature):
    """The part of an admission that continues from tails."""

    def __init__(self, state: SpaceState) -> None:
        """Use the state of a space. O(1)."""
        self._state = state
        self._taken_over: tuple[Tail, ...] = ()  # by the row that is being admitted

    def fits(self, hit: PrefixHit, needed: dict[str, int], tenant: int) -> None:
        """Choose the unreferenced tails in pools that have no room for a copy beside them."""
        state, num_free = self._state, hit.num_free_tails
        is_tight = {
            name: count + num_free.get(name, 0) > state.room.spare(state.pools[name], tenant)
            for name, count in (needed if hit.tails else {}).items()
        }
        self._taken_over = tuple(
            tail
            for tail in hit.tails
            if (pool := state.groups[tail.group].pool)
            and is_tight[pool.name]
            and pool.arrays.records[tail.block, QUEUE] == FREE
        )

    def hit_taken(self, ledger: StepLedger, batch: Int32Array, hit: PrefixHit) -> None:
        """Reference each tail of the hit, until the row has its blocks."""
        state = self._state
        for tail in hit.tails:
            group, blocks = state.groups[tail.group], np.array([tail.block], np.int32)
            for feature in state.features:
                feature.reviving(group.pool, blocks)
            state.loops.reuse_all(group.pool.arrays, blocks)
            if group.arrays.parameters[SHEDS]:  # a prompt ended with that state, or inside that block
                why = AT_END if group in state.state_groups else AT_JUNCTION
                add_reasons_of(group.pool.arrays.records, tail.block, why)
            note_reliance(state, ledger, group, batch, blocks)

    def allocating(self, group: Group) -> None:
        """Let the next new row in a tail's group take the tail's block itself, if it is taken over."""
        for tail in self._taken_over:
            if tail.group == group.index:
                surrender(group.pool.arrays, tail.block)

    def allocated(self, ledger: StepLedger, row: int, hit: PrefixHit) -> None:
        """Let the row continue from the tails: the plan copies those not taken over."""
        self._taken_over = ()
        for tail in hit.tails:
            group = self._state.groups[tail.group]
            own = int(group.arrays.table[row, tail.logical_index])
            if resume(*group.view, row, tail.logical_index, tail.block):
                ledger.add_copies(group.pool.name, np.array([[tail.block, own]], np.int32))
