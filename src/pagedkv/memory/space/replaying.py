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

from collections.abc import Callable

import numpy as np

from pagedkv.memory.contract.arrays import Int32Array, Uint32Array
from pagedkv.memory.pool.blocks import LIFE, NULL_BLOCK
from pagedkv.memory.pool.contents import set_digests
from pagedkv.memory.space.hits import PrefixHit
from pagedkv.memory.space.state import Group, SpaceState
from pagedkv.memory.space.steps import InFlightStep
from pagedkv.memory.tables.row_record import freeze, set_column
from pagedkv.memory.tables.rows import (
    AT,
    ENDS_HITS,
    FIRST_BLOCK,
    KIND,
    NUM_DIGESTED,
    NUM_SINK_BLOCKS,
    SPAN,
    SURE,
    TAIL,
    TAIL_LIFE,
)
from pagedkv.memory.tables.rules import first_block_of_hit

__all__ = ["begin_replay", "first_sure", "is_replaying", "num_replayed", "without_inexact"]

DigestsOf = Callable[[Group, int], Uint32Array]


def first_sure(group: Group, end: int) -> int:
    """Return the first logical block that a hit of ``end`` tokens needs."""
    kind, span, ends_hits = (int(group.arrays.parameters[column]) for column in (KIND, SPAN, ENDS_HITS))
    return int(first_block_of_hit(kind, span, end, group.block_size, ends_hits))


def begin_replay(state: SpaceState, row: int, hit: PrefixHit, digests_of: DigestsOf) -> None:
    """Record where each window group of a new row computes from, and which of its blocks are exact.

    Args:
        state: the space.
        row: the row, which has its blocks already.
        hit: its hit.
        digests_of: returns the digests of the prompt's first blocks, uint32 ``[n, 8]``, in a group.
    """
    planned = [group.planned for group in state.replaying_groups]
    set_column(state.rows, row, planned, hit.num_tokens - hit.num_replayed)
    if not hit.num_replayed:
        return
    if not hit.is_exact:
        freeze(state.rows, row)
    for group in state.replaying_groups:
        at, arrays = int(group.arrays.parameters[AT]), group.pool.arrays
        first, stop = len(hit.block_ids[group.index]), hit.num_tokens // group.block_size
        set_digests(arrays, group.arrays.table[row, first:stop], digests_of(group, stop)[first:])
        set_column(state.rows, row, at + NUM_DIGESTED, stop)
        set_column(state.rows, row, [at + TAIL, at + TAIL_LIFE], [NULL_BLOCK, arrays.records[NULL_BLOCK, LIFE]])
        set_column(state.rows, row, int(group.arrays.parameters[SURE]), first_sure(group, hit.num_tokens))


def is_replaying(state: SpaceState, row: int) -> bool:
    """Return whether a row holds inexact blocks of a replay, since the replay's step is not acknowledged."""
    return any(
        state.rows[row, int(group.arrays.parameters[AT]) + FIRST_BLOCK]
        < state.rows[row, int(group.arrays.parameters[SURE])]
        for group in state.replaying_groups
    )


def without_inexact(state: SpaceState, group: Group, row: int, entries: Int32Array) -> Int32Array:
    """Replace inexact blocks of a replay by the null block, among the leading entries of a row's table."""
    first_sure = int(state.rows[row, int(group.arrays.parameters[SURE])])
    is_left = np.arange(len(entries)) < first_sure
    is_left[: int(group.arrays.parameters[NUM_SINK_BLOCKS])] = False
    return np.where(is_left, NULL_BLOCK, entries).astype(np.int32)


def num_replayed(state: SpaceState, step: InFlightStep) -> Int32Array | None:
    """Count the tokens that a step computes again for each of its rows, in windows alone: int32 ``[rows]``, or None."""
    if not state.replaying_groups:
        return None
    before = [step.starts - step.starts_in(group.index) for group in state.replaying_groups]
    replayed: Int32Array = np.max([np.zeros_like(step.starts), *before], axis=0)
    return replayed
