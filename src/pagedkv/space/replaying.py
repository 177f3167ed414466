"""Replay: windows that the cache has lost are computed again where full attention still has the prompt.

A hit may then end where a window group has no blocks. The window group takes new blocks for the last tokens before that
end, and the step computes these tokens once more, in window groups alone. An example with one window group, blocks of
4, a window of 5 and three layers, each of which at first lacks a window of the layer before::

    full     [ 0][ 1][ 2][ 3][ 4][ 5]  hit
    window     0   0   0 [fresh   ][sure ]
                         ^ replay   ^ exact in all layers     ^ the hit's end, from where all groups compute
                         begins

Blocks that are not sure are never named, and are freed when the step is acknowledged, like all that leave a window.
Until then the row can neither be swapped out nor rolled back to where it would read them. If no block is sure, the row
is frozen: it publishes nothing.

All window groups begin at one position, since every token goes through all layers; blocks that one of them still has
are computed again like the rest.
"""

import numpy as np

from pagedkv.blocks.digests import set_digests
from pagedkv.blocks.record import LIFE, NAME, NULL_BLOCK
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.space.feature import SpaceFeature
from pagedkv.space.matching import Ending, Known, PrefixHit, Prompt, digests_of_prefix, first_sure, longest_with_replay
from pagedkv.space.rows import (
    AT,
    FIRST_BLOCK,
    LOST,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_SINK_BLOCKS,
    RUNNING,
    STATUS,
    SURE,
    TAIL,
    TAIL_LIFE,
    VACANT,
    freeze,
    set_column,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import InFlightStep

__all__ = ["ReplayFeature", "num_replayed"]


class ReplayFeature(SpaceFeature):
    """The part of the operations that computes lost windows again, where the configuration allows it."""

    def __init__(self, state: SpaceState) -> None:
        """Use the state of a space. O(1)."""
        self._state = state

    def lengthened(self, known: Known, ending: Ending) -> Ending:
        """Let a hit end where windows have lost what it needs, if that is allowed and longer."""
        if not known.prompt.max_replay_tokens:
            return ending
        return longest_with_replay(known, ending.num_tokens) or ending

    def chains_begun(self, row: int, prompt: Prompt, hit: PrefixHit) -> None:
        """Record where each window group of a new row computes from, and which of its blocks are exact."""
        state = self._state
        planned = [group.planned for group in state.replaying_groups]
        set_column(state.rows, row, planned, hit.num_tokens - hit.num_replayed)
        if not hit.num_replayed:
            return
        if not hit.is_exact:
            freeze(state.rows, row)
        for group in state.replaying_groups:
            at, arrays = int(group.arrays.parameters[AT]), group.pool.arrays
            first, stop = len(hit.block_ids[group.index]), hit.num_tokens // group.block_size
            digests = self._digests_of_hit(group, prompt, hit, stop)
            set_digests(arrays, group.arrays.table[row, first:stop], digests)
            set_column(state.rows, row, at + NUM_DIGESTED, stop)
            set_column(state.rows, row, [at + TAIL, at + TAIL_LIFE], [NULL_BLOCK, arrays.records[NULL_BLOCK, LIFE]])
            set_column(state.rows, row, int(group.arrays.parameters[SURE]), first_sure(group, hit.num_tokens))

    def _digests_of_hit(self, group: Group, prompt: Prompt, hit: PrefixHit, stop: int) -> Uint32Array:
        """Return the digests of a prompt's first blocks, which hit in full attention, for a group of any block size."""
        whole = next((other for other in self._state.lanes[group.lane] if other.keeps_whole_prefix), None)
        if whole is None:
            return digests_of_prefix(self._state, prompt, group.block_size, stop)
        return whole.pool.arrays.digests[hit.block_ids[whole.index][:stop]]

    def forked(self, parent: int, children: Int32Array) -> None:
        """Copy to the children from which block on the parent's are exact."""
        rows = self._state.rows
        for group in self._state.replaying_groups:
            sure = group.arrays.parameters[SURE]
            set_column(rows, children, sure, rows[parent, sure])

    def what_keeps(self, batch: Int32Array) -> str | None:
        """Refuse rows that hold inexact blocks of a replay, which must not be named."""
        replaying = next((row for row in batch.tolist() if self._is_replaying(row)), None)
        if replaying is None:
            return None
        return (
            f"row {replaying} computes a window again: plan the step and acknowledge it before the row is swapped out"
        )

    def _is_replaying(self, row: int) -> bool:
        """Return whether a row holds inexact blocks of a replay, since the replay's step is not acknowledged."""
        return any(
            self._state.rows[row, int(group.arrays.parameters[AT]) + FIRST_BLOCK]
            < self._state.rows[row, int(group.arrays.parameters[SURE])]
            for group in self._state.replaying_groups
        )

    def without_inexact(self, group: Group, row: int, entries: Int32Array) -> Int32Array:
        """Replace inexact blocks of a replay by the null block, among the leading entries of a row's table."""
        if not group.replays:
            return entries
        first_sure = int(self._state.rows[row, int(group.arrays.parameters[SURE])])
        is_left = np.arange(len(entries)) < first_sure
        is_left[: int(group.arrays.parameters[NUM_SINK_BLOCKS])] = False
        return np.where(is_left, NULL_BLOCK, entries).astype(np.int32)

    # Auditing

    def check(self) -> None:
        """Blocks that a replay left inexact are not in the prefix index, and only rows on the device hold them."""
        for group in self._state.replaying_groups:
            self._check_group(group)

    def _check_group(self, group: Group) -> None:
        rows = self._state.rows
        at, sure, num_sinks = (int(group.arrays.parameters[column]) for column in (AT, SURE, NUM_SINK_BLOCKS))
        for row in np.flatnonzero(rows[:, STATUS] != VACANT).tolist():
            first, stop = rows[row, [at + FIRST_BLOCK, sure]].tolist()
            blocks = group.arrays.table[row, max(first, num_sinks) : stop]
            where = f"group {group.index}, row {row}"
            assert stop <= rows[row, at + NUM_BLOCKS], f"{where}: sure beyond its blocks"
            assert not len(blocks) or rows[row, STATUS] in {RUNNING, LOST}, f"{where}: swapped out, and inexact"
            assert not group.pool.arrays.records[blocks, NAME].any(), f"{where}: what is inexact can be found"


def num_replayed(state: SpaceState, step: InFlightStep) -> Int32Array | None:
    """Count the tokens that a step computes again for each of its rows, in windows alone: int32 ``[rows]``, or None."""
    if not state.replaying_groups:
        return None
    before = [step.starts - step.starts_in(group.index) for group in state.replaying_groups]
    replayed: Int32Array = np.max([np.zeros_like(step.starts), *before], axis=0)
    return replayed
