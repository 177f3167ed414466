"""Windows across groups: they slide when a step has run, and what they leave stays cached where later prompts can hit.

:mod:`pagedkv.tables.sliding` releases blocks below a window, :mod:`pagedkv.tables.retaining` draws which
of them stay cached in groups that *shed* the others: those at ends of prompts and sequences, and at junctions.
"""

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.feature import SpaceFeature
from pagedkv.space.hits import PrefixHit
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import InFlightStep
from pagedkv.tables.retaining import (
    JUNCTION,
    NUM_ENDS,
    PROMPT_END,
    PROMPT_LENGTH,
    keep_ends,
    move_end_on,
    note_junction,
    shed_unkept,
)
from pagedkv.tables.rows import HIT_ALIGNMENT, LAST_STEP, NUM_TOKENS, RUNNING, SHEDS, STATUS
from pagedkv.tables.sliding import slide

__all__ = ["WindowFeature"]


class WindowFeature(SpaceFeature):
    """The part of the operations that moves windows, chunks and states on, for groups that do not keep whole prefixes.

    Attributes:
        ends: for each of these groups int32 ``[max_sequences, NUM_ENDS]``, the positions before which blocks stay
            cached, if the group sheds blocks; else empty.
    """

    def __init__(self, state: SpaceState) -> None:
        """Begin without any sequence. O(rows)."""
        self._state = state
        self._sliding = tuple(group for group in state.groups if not group.keeps_whole_prefix)
        num_rows = state.config.max_sequences
        self.ends = {
            group.index: np.zeros((num_rows if group.arrays.parameters[SHEDS] else 0, NUM_ENDS), np.int32)
            for group in self._sliding
        }

    # Sliding

    def computed(self, step: InFlightStep) -> None:
        """Release the blocks that the step's rows, and rows that waited for it, no longer need."""
        state, rows = self._state, step.rows
        is_alive = (state.serials[rows] == step.serials) & (state.rows[rows, STATUS] == RUNNING)
        batch, computed = rows[is_alive], step.ends[is_alive]
        waited = self._rows_that_waited(step)
        for group in self._sliding:
            self._slide(group, batch, computed)
            self._slide(group, waited, state.rows[waited, group.planned])

    def _rows_that_waited(self, step: InFlightStep) -> Int32Array:
        """Find rows for which other rows computed in a settled step, and that are in no later one: forks, and hits."""
        state = self._state
        number = step.plan.step_id - state.num_steps_before
        has_waited = (state.relies_on == number) & (state.rows[:, LAST_STEP] <= number)
        return np.flatnonzero(has_waited & (state.rows[:, STATUS] == RUNNING)).astype(np.int32)

    def moved_on(self, batch: Int32Array) -> None:
        """Release the blocks that rows whose tokens are all computed no longer need."""
        for group in self._sliding:
            self._slide(group, batch, self._state.rows[batch, NUM_TOKENS])

    def _slide(self, group: Group, batch: Int32Array, computed: Int32Array) -> None:
        """Release blocks of a group, with ``computed[i]`` tokens of ``batch[i]`` computed."""
        chain = self._chain_beside(group)
        slide(*group.view, batch, computed, self.ends[group.index], chain.pool.arrays, chain.arrays)

    def _chain_beside(self, group: Group) -> Group:
        """Find a group with the same digests that keeps whole prefixes; the group itself if there is none."""
        beside = self._state.lanes[group.lane] if group in self._state.shedding_groups else ()
        return next((other for other in beside if other.keeps_whole_prefix), group)

    # What stays cached

    def prompt_known(self, row: int, num_tokens: int, hit: PrefixHit) -> None:
        """Keep the blocks before the prompt's end, and before the place where it leaves a known chain."""
        for group in self._state.shedding_groups:
            alignment = int(group.arrays.parameters[HIT_ALIGNMENT])
            ends, pool, hits = self.ends[group.index], group.pool.arrays, hit.block_ids[group.index]
            ends[row, PROMPT_END] = (num_tokens - 1) // alignment * alignment
            ends[row, PROMPT_LENGTH] = num_tokens
            ends[row, JUNCTION] = hit.junction
            if hit.junction == hit.num_whole_tokens:
                note_junction(pool, hits)
            else:
                chain = self._chain_beside(group)
                chain_hits = hits[:0] if chain is group else hit.block_ids[chain.index]
                move_end_on(pool, group.arrays, hits, chain.pool.arrays, chain_hits)

    def state_kept(self, row: int, position: int) -> None:
        """Keep the blocks before a position up to which a prompt's states are kept."""
        for group in self._state.shedding_groups:
            self.ends[group.index][row, PROMPT_END] = position

    def forked(self, parent: int, children: Int32Array) -> None:
        """Copy the parent's places to its children."""
        for group in self._state.shedding_groups:
            self.ends[group.index][children] = self.ends[group.index][parent]

    def leaving(self, batch: Int32Array) -> None:
        """Mark the blocks to be kept before the rows release them."""
        for group in self._state.shedding_groups:
            chain = self._chain_beside(group)
            keep_ends(*group.view, batch, self.ends[group.index], chain.pool.arrays, chain.arrays)

    def dropped(self, pool: BlockPool, blocks: Int32Array) -> None:
        """Shed those of the blocks that are unreferenced now, and that no later prompt can hit."""
        for group in self._state.shedding_groups:
            if group.pool is pool:
                shed_unkept(pool.arrays, group.arrays, blocks)

    def cleared(self, batch: Int32Array) -> None:
        """Clear the places of the rows."""
        for group in self._state.shedding_groups:
            self.ends[group.index][batch] = 0
