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

The hit ends where full attention ends; window groups have their sinks, which are never computed again.

All window groups begin at one position, since every token goes through all layers; blocks that one of them still has
are computed again like the rest.
"""

import math
from typing import NamedTuple

import numpy as np

from pagedkv.blocks.digests import set_digests
from pagedkv.blocks.record import LIFE, NAME, NULL_BLOCK, OPEN_STEP, PENDING_STEP
from pagedkv.contract.arrays import BoolArray, Int32Array, Uint32Array
from pagedkv.contract.spec import replay_of
from pagedkv.space.hits import Chain, Ending, Known, Lookup, PrefixHit, Prompt, digests_of_prefix, find_block
from pagedkv.space.rows import (
    AT,
    ENDS_HITS,
    FIRST_BLOCK,
    FROZEN,
    KIND,
    LOST,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_SINK_BLOCKS,
    RUNNING,
    SPAN,
    STATUS,
    SURE,
    SWAPPED,
    TAIL,
    TAIL_LIFE,
    VACANT,
    first_block_of_hit,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import InFlightStep


class _Extent(NamedTuple):
    """The extent of a replay for a hit of some length.

    Args:
        start: first position that it computes, at a block boundary of all window groups.
        is_exact: whether every layer has all that the blocks of the last window need.
    """

    start: int
    is_exact: bool


def longest_with_replay(known: Known, num_hits: int) -> Ending | None:
    """Find the longest hit that ends with a replay.

    None if that is not allowed, or is no longer than the ``num_hits`` tokens that hit without replay.
    """
    state = known.state
    end = known.aligned(min(_num_settled(chain) for chain in known.chains.values()))
    if end <= num_hits:
        return None
    start, is_exact = _extent(state, end)
    if start <= num_hits or end - start > known.prompt.max_replay_tokens:
        return None
    block_ids = known.chain_blocks(end)
    for group in state.replaying_groups:
        before = _blocks_before(known.lookups[group.index], start)
        if before is None:
            return None
        block_ids[group.index] = before
    return Ending(end, block_ids, num_replayed=end - start, is_exact=is_exact)


def first_sure(group: Group, end: int) -> int:
    """Return the first logical block that a hit of ``end`` tokens needs."""
    kind, span, ends_hits = (int(group.arrays.parameters[column]) for column in (KIND, SPAN, ENDS_HITS))
    return int(first_block_of_hit(kind, span, end, group.block_size, ends_hits))


def _num_settled(chain: Chain) -> int:
    """Count the tokens of a chain before those that the open step computes, which a new row could not take over."""
    arrays = chain.group.pool.arrays
    is_open = arrays.records[chain.blocks, PENDING_STEP] == arrays.counts[OPEN_STEP]
    return (int(is_open.argmax()) if is_open.any() else len(chain.blocks)) * chain.group.block_size


def _extent(state: SpaceState, end: int) -> _Extent:
    """Return where the replay of a hit begins: as far back as configured, or where it is exact, if that suffices."""
    groups = state.replaying_groups
    replays = [replay for group in groups if (replay := replay_of(group.spec))]
    sure = min(first_sure(group, end) * group.block_size for group in groups)
    reach = max(int(group.arrays.parameters[SPAN]) for group in groups) - 1
    num_replay_tokens, num_layers = max(it.num_tokens for it in replays), max(it.num_layers for it in replays)
    start = min(
        sure - 1, end - num_replay_tokens
    )  # one block more than is kept: while it is there, the replay's step is not over
    if num_replay_tokens >= num_layers * reach:
        start = min(start, sure - (num_layers - 1) * reach)
    alignment = math.lcm(*(group.block_size for group in groups))
    start = start // alignment * alignment
    return _Extent(start, sure - start >= (num_layers - 1) * reach)


def _blocks_before(lookup: Lookup, start: int) -> Int32Array | None:
    """Return a window group's sinks before a replay; None if it lacks any, or the replay begins inside them."""
    group, arguments = lookup
    num_blocks, num_sinks = start // group.block_size, int(group.arrays.parameters[NUM_SINK_BLOCKS])
    if num_blocks < num_sinks:
        return None
    sinks = [int(find_block(*arguments, index)) for index in range(num_sinks)]
    arrays = group.pool.arrays
    is_open = (arrays.records[sinks, PENDING_STEP] == arrays.counts[OPEN_STEP]).any() if sinks else False
    if NULL_BLOCK in sinks or is_open:
        return None
    return np.array(sinks + [NULL_BLOCK] * (num_blocks - num_sinks), np.int32)


def begin_replay(state: SpaceState, row: int, prompt: Prompt, hit: PrefixHit) -> None:
    """Record where each window group of a new row computes from, and which of its blocks are exact."""
    for group in state.replaying_groups:
        state.rows[row, group.planned] = hit.num_tokens - hit.num_replayed
    if not hit.num_replayed:
        return
    if not hit.is_exact:
        state.rows[row, FROZEN] = 1
    for group in state.replaying_groups:
        at, arrays = int(group.arrays.parameters[AT]), group.pool.arrays
        first, stop = len(hit.block_ids[group.index]), hit.num_tokens // group.block_size
        digests = _digests_of_hit(state, group, prompt, hit, stop)
        set_digests(arrays, group.arrays.table[row, first:stop], digests)
        state.rows[row, at + NUM_DIGESTED] = stop
        state.rows[row, at + TAIL] = NULL_BLOCK
        state.rows[row, at + TAIL_LIFE] = arrays.records[NULL_BLOCK, LIFE]
        state.rows[row, group.arrays.parameters[SURE]] = first_sure(group, hit.num_tokens)


def begin_together(state: SpaceState) -> None:
    """Let rows that have inherited a start in some group begin there in every group, as tokens go through all layers.

    Only a replay begins earlier in the windows than in full attention. O(rows) where windows can be replayed.
    """
    if not state.replaying_groups:
        return
    rows = np.flatnonzero(state.rows[:, STATUS] == RUNNING).astype(np.int32)
    columns = np.array([NUM_PLANNED, *(group.planned for group in state.replaying_groups)], np.int32)
    starts = state.rows[np.ix_(rows, columns)].min(axis=1)
    state.rows[np.ix_(rows, columns[1:])] = starts[:, np.newaxis]
    is_one_start = ~_are_replaying(state, rows)
    state.rows[rows[is_one_start], NUM_PLANNED] = starts[is_one_start]


def _digests_of_hit(state: SpaceState, group: Group, prompt: Prompt, hit: PrefixHit, stop: int) -> Uint32Array:
    """Return the digests of a prompt's first blocks, which hit in full attention, for a group of any block size."""
    whole = next((other for other in state.lanes[group.lane] if other.keeps_whole_prefix), None)
    if whole is None:
        return digests_of_prefix(state, prompt, group, stop)
    return whole.pool.arrays.digests[hit.block_ids[whole.index][:stop]]


def why_replay_stays(state: SpaceState, batch: Int32Array) -> str | None:
    """Return the sentence that refuses to swap out rows with inexact blocks, which must not be named; else None."""
    for row in batch[_are_replaying(state, batch)].tolist():
        return f"row {row} computes a window again: plan the step and acknowledge it before the row is swapped out"
    return None


def _are_replaying(state: SpaceState, batch: Int32Array) -> BoolArray:
    """Return which rows hold inexact blocks of a replay, since its step is not acknowledged: bool ``[rows]``."""
    replaying = np.zeros(len(batch), np.bool_)
    for group in state.replaying_groups:
        at, sure = group.arrays.parameters[[AT, SURE]]
        replaying |= state.rows[batch, at + FIRST_BLOCK] < state.rows[batch, sure]
    return replaying


def without_inexact(state: SpaceState, group: Group, row: int, entries: Int32Array) -> Int32Array:
    """Replace inexact blocks of a replay by the null block, among the leading entries of a row's table."""
    first_sure = int(state.rows[row, int(group.arrays.parameters[SURE])])
    is_left = np.arange(len(entries)) < first_sure
    is_left[: int(group.arrays.parameters[NUM_SINK_BLOCKS])] = False
    return np.where(is_left, NULL_BLOCK, entries).astype(np.int32)


def check_replays(state: SpaceState) -> None:
    """Blocks that a replay left inexact are not in the prefix index, and only rows on the device hold them."""
    rows = state.rows
    _check_starts(state)
    for group in state.replaying_groups:
        at, sure, num_sinks = (int(group.arrays.parameters[column]) for column in (AT, SURE, NUM_SINK_BLOCKS))
        for row in np.flatnonzero(rows[:, STATUS] != VACANT).tolist():
            first, stop = rows[row, [at + FIRST_BLOCK, sure]].tolist()
            blocks = group.arrays.table[row, max(first, num_sinks) : stop]
            where = f"group {group.index}, row {row}"
            assert stop <= rows[row, at + NUM_BLOCKS], f"{where}: sure beyond its blocks"
            assert not len(blocks) or rows[row, STATUS] in {RUNNING, LOST}, f"{where}: swapped out, and inexact"
            assert not group.pool.arrays.records[blocks, NAME].any(), f"{where}: what is inexact can be found"


def _check_starts(state: SpaceState) -> None:
    """Rows begin at one position in all layers, except that a replay begins earlier in all windows."""
    alive = np.flatnonzero(np.isin(state.rows[:, STATUS], (RUNNING, SWAPPED))).astype(np.int32)
    whole, is_replaying = state.rows[alive, NUM_PLANNED], _are_replaying(state, alive)
    for group in state.replaying_groups:
        start, first = (state.rows[alive, each.planned] for each in (group, state.replaying_groups[0]))
        wrong = np.flatnonzero((start != first) | (start > whole) | ((start < whole) & ~is_replaying))
        assert len(wrong) == 0, (
            f"row {alive[wrong[0]]} begins at {whole[wrong[0]]} in full attention, and at {start[wrong[0]]} in group "
            f"{group.index}"
        )


def num_replayed(state: SpaceState, step: InFlightStep) -> Int32Array:
    """Count the tokens that a step computes again for each of its rows, in windows alone: int32 ``[rows]``."""
    before = [step.starts - step.starts_in(group.index) for group in state.replaying_groups]
    replayed: Int32Array = np.max([np.zeros_like(step.starts), *before], axis=0)
    return replayed
