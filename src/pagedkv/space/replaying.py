"""Replay: windows that the cache has lost, computed again where full attention still has the prompt.

A hit may then end where a window group has nothing. Its blocks for the last tokens before that end are taken fresh, and
the step computes these tokens once more, in window groups alone. Here with one group of windows, blocks of 4, a window
of 5 and three layers, each of which lacks a window of the one before at first::

    full     [ 0][ 1][ 2][ 3][ 4][ 5]  hit
    window     0   0   0 [fresh   ][sure ]
                         ^ replay   ^ exact in all layers     ^ the hit's end, from where all groups compute
                         begins

What is not sure is never named, and goes when the step is over, as whatever leaves a window. Until then the row can
neither be swapped out, nor go back to where it would read that. Where nothing is sure the row is frozen: it publishes
nothing.

All window groups begin at one position, since every token goes through all layers; what one of them still has is
computed again like the rest.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pagedkv.arrays import Int32Array, Uint32Array
from pagedkv.pool.blocks import LIFE, NULL_BLOCK, OPEN_STEP, PENDING_STEP
from pagedkv.pool.contents import set_digests
from pagedkv.space.hits import PrefixHit, Prompt
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import InFlightStep, read_only
from pagedkv.spec import replay_of
from pagedkv.tables.row_record import freeze, set_column
from pagedkv.tables.rows import (
    AT,
    ENDS_HITS,
    FIRST_BLOCK,
    HIT_ALIGNMENT,
    KIND,
    NUM_DIGESTED,
    NUM_SINK_BLOCKS,
    SPAN,
    SURE,
    TAIL,
    TAIL_LIFE,
)
from pagedkv.tables.rules import first_block_of_hit

__all__ = ["begin_replay", "is_replaying", "num_replayed", "with_replay", "without_inexact"]

FindBlock = Callable[[Group, int], int]
DigestsOf = Callable[[Group, int], Uint32Array]


class _Extent(NamedTuple):
    """A replay for a hit of some length.

    Args:
        start: first position that it computes, where blocks of all window groups begin.
        is_exact: whether all layers have all that the blocks of the last window need.
    """

    start: int
    is_exact: bool


def with_replay(
    state: SpaceState, prompt: Prompt, hit: PrefixHit, chains: Mapping[int, Int32Array], find_block: FindBlock
) -> PrefixHit:
    """Make a longer hit that ends with a replay; the one given where that saves nothing, or is not allowed.

    Args:
        state: the space.
        prompt: the prompt.
        hit: what hits without.
        chains: the blocks that hit in each group that keeps whole prefixes, by its index.
        find_block: finds a logical block of the prompt in a group; the null block where it has none.
    """
    if not state.replaying_groups:
        return hit
    alignment = int(state.cached_groups[0].arrays.parameters[HIT_ALIGNMENT])
    end = min(_num_settled(state.groups[index], chain) for index, chain in chains.items()) // alignment * alignment
    if end <= hit.num_tokens:
        return hit
    start, is_exact = _extent(state, end)
    if start <= hit.num_tokens or end - start > prompt.max_replay_tokens:
        return hit
    blocks = []
    for group in state.groups:
        held = chains.get(group.index, np.zeros(0, np.int32))[: end // group.block_size]
        sinks = _blocks_before(group, start, find_block) if group.replays else held
        if sinks is None:
            return hit
        blocks.append(read_only(sinks))
    free = zip(state.groups, blocks, strict=True)
    num_free = tuple(state.loops.count_free(group.pool.arrays.records, held) for group, held in free)
    longer = PrefixHit(state, prompt, end, tuple(blocks), num_free)
    longer.num_replayed, longer.is_exact, longer.junction = end - start, is_exact, hit.junction
    return longer


def _num_settled(group: Group, chain: Int32Array) -> int:
    """Count the tokens of a chain that the open step does not compute: nobody could take a part of it over."""
    arrays = group.pool.arrays
    is_open = arrays.records[chain, PENDING_STEP] == arrays.counts[OPEN_STEP]
    return (int(is_open.argmax()) if is_open.any() else len(chain)) * group.block_size


def _extent(state: SpaceState, end: int) -> _Extent:
    """Tell where the replay of a hit begins: as far back as asked for, and where that suffices so that it is exact."""
    groups = state.replaying_groups
    replays = [replay for group in groups if (replay := replay_of(group.spec))]
    sure = min(_first_sure(group, end) * group.block_size for group in groups)
    reach = max(int(group.arrays.parameters[SPAN]) for group in groups) - 1
    asked, num_layers = max(it.num_tokens for it in replays), max(it.num_layers for it in replays)
    start = min(sure - 1, end - asked)  # a block more than is kept, by which one tells that its step is not over
    if asked >= num_layers * reach:
        start = min(start, sure - (num_layers - 1) * reach)
    alignment = math.lcm(*(group.block_size for group in groups))
    start = start // alignment * alignment
    return _Extent(start, sure - start >= (num_layers - 1) * reach)


def _first_sure(group: Group, end: int) -> int:
    """First logical block that a hit of so many tokens needs."""
    kind, span, ends_hits = (int(group.arrays.parameters[column]) for column in (KIND, SPAN, ENDS_HITS))
    return int(first_block_of_hit(kind, span, end, group.block_size, ends_hits))


def _blocks_before(group: Group, start: int, find_block: FindBlock) -> Int32Array | None:
    """Give what a window group has before a replay: its sinks; None if it lacks any, or the replay begins in them."""
    num_blocks, num_sinks = start // group.block_size, int(group.arrays.parameters[NUM_SINK_BLOCKS])
    sinks = [find_block(group, index) for index in range(num_sinks)]
    arrays = group.pool.arrays
    is_open = (arrays.records[sinks, PENDING_STEP] == arrays.counts[OPEN_STEP]).any() if sinks else False
    if num_blocks < num_sinks or NULL_BLOCK in sinks or is_open:
        return None
    return np.array(sinks + [NULL_BLOCK] * (num_blocks - num_sinks), np.int32)


def begin_replay(state: SpaceState, row: int, hit: PrefixHit, digests_of: DigestsOf) -> None:
    """Note of a row that has just been seated where each window group computes from, and what is sure of it.

    Args:
        state: the space.
        row: the row.
        hit: what it hits.
        digests_of: gives the digests of a prompt's first blocks, uint32 ``[n, 8]``, in a group.
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
        set_column(state.rows, row, int(group.arrays.parameters[SURE]), _first_sure(group, hit.num_tokens))


def is_replaying(state: SpaceState, row: int) -> bool:
    """Tell whether a row holds anything that a replay left inexact: its step is not planned, or not over."""
    return any(
        state.rows[row, int(group.arrays.parameters[AT]) + FIRST_BLOCK]
        < state.rows[row, int(group.arrays.parameters[SURE])]
        for group in state.replaying_groups
    )


def without_inexact(state: SpaceState, group: Group, row: int, entries: Int32Array) -> Int32Array:
    """Put the null block for what a replay left inexact among the leading entries of a row's table."""
    first_sure = int(state.rows[row, int(group.arrays.parameters[SURE])])
    is_left = np.arange(len(entries)) < first_sure
    is_left[: int(group.arrays.parameters[NUM_SINK_BLOCKS])] = False
    return np.where(is_left, NULL_BLOCK, entries).astype(np.int32)


def num_replayed(state: SpaceState, step: InFlightStep) -> Int32Array | None:
    """Count what a step computes again of each of its rows, in window groups alone: int32 ``[rows]``; None: nothing."""
    if not state.replaying_groups:
        return None
    before = [step.starts - step.starts_in(group.index) for group in state.replaying_groups]
    replayed: Int32Array = np.max([np.zeros_like(step.starts), *before], axis=0)
    return replayed
