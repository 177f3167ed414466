"""Windows across groups: they slide when a step has run, and what they leave stays cached where later prompts can hit.

Of the blocks that leave a window, those that a later prompt can hit stay cached, and no others: groups *shed* these.

A prompt hits a window group if the window before the hit's end is cached. Most of the blocks that a sequence leaves
behind are hardly ever needed for that. So an unreferenced block is kept for a reason, which is added to its record
(``KEPT``) when a sequence moves past it or ends:

``AT_END``
    It is in the window before a sequence's end, or before its prompt's end while the sequence lives. A later prompt
    that continues from there removes the reason, since its own end replaces this one.
``AT_JUNCTION``
    It is in the window before a place where a prompt has left a known chain that continues differently; or it follows
    that place, if hits may end inside a block.
``AT_RESEND``
    It is in the window before the last boundary but one of a prompt of whole blocks that ended there. When that prompt
    is sent again, it hits up to this boundary, since its last token is always computed. A later prompt that continues
    from its end removes the reason.
``AT_INTERVAL``
    It is in the window before a multiple of ``SpaceConfig.retention_interval``, which the row has passed. So a prompt
    that leaves a known chain hits there though none has left it before.

States are kept like windows: the checkpoint before an end, before a junction, and at an interval. Those in between that
a long prompt has passed are shed, since a pool has few blocks of states, and each is as large as the keys of hundreds
of tokens.

All other blocks are *shed* with their last reference: they become spare, which means that they are evicted first
(:mod:`pagedkv.blocks.life_cycle`)::

    blocks of a window group    0    1    2    3    4    5    6    7    8    9
                              spare spare [ junction ] spare spare spare [  end   ]
                                                     ^ a prompt left the chain    ^ the sequence ended

The rule is that of promise 22 of docs/design.md. It requires knowing where prompts branch, so it is in force only where
a group that keeps whole prefixes has prefix caching as well.
"""

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.free_queue import is_leased, is_spare
from pagedkv.blocks.life_cycle import make_cached, make_spare, release
from pagedkv.blocks.prefix_index import find
from pagedkv.blocks.record import (
    AT_END,
    AT_INTERVAL,
    AT_JUNCTION,
    AT_RESEND,
    KEPT,
    NAME,
    NULL_BLOCK,
    REF_COUNT,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.hits import PrefixHit
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    ENDS_HITS,
    FIRST_BLOCK,
    FROZEN,
    HIT_ALIGNMENT,
    HITS_INSIDE,
    JUNCTION,
    KIND,
    LAST_BOUNDARY,
    LAST_STEP,
    MOST_AHEAD,
    NAME_IN_POOL,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_SINK_BLOCKS,
    NUM_TOKENS,
    PLANNED,
    PROMPT_END,
    PROMPT_LENGTH,
    RECURRENT,
    RETENTION,
    RUNNING,
    SHEDS,
    SPAN,
    STATUS,
    GroupArrays,
    blocks_for,
    first_block_of_hit,
    first_needed_token,
    serves,
    shed_at_release,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import InFlightStep


def slide_after(state: SpaceState, step: InFlightStep) -> None:
    """Release the blocks that the rows of a step that has run, and rows that waited for it, no longer need."""
    rows = step.rows
    is_alive = (state.serials[rows] == step.serials) & (state.rows[rows, STATUS] == RUNNING)
    batch, computed = rows[is_alive], step.ends[is_alive]
    waited = _rows_that_waited(state, step)
    for group in state.sliding_groups:
        _slide(state, group, batch, computed)
        _slide(state, group, waited, state.rows[waited, group.planned])


def _rows_that_waited(state: SpaceState, step: InFlightStep) -> Int32Array:
    """Find rows for which other rows computed in a settled step, and that are in no later one: forks, and hits."""
    number = step.plan.step_id - state.num_steps_before
    has_waited = (state.relies_on == number) & (state.rows[:, LAST_STEP] <= number)
    return np.flatnonzero(has_waited & (state.rows[:, STATUS] == RUNNING)).astype(np.int32)


def slide_to_end(state: SpaceState, batch: Int32Array) -> None:
    """Release the blocks that rows whose tokens are all computed no longer need."""
    for group in state.sliding_groups:
        _slide(state, group, batch, state.rows[batch, NUM_TOKENS])


def _slide(state: SpaceState, group: Group, batch: Int32Array, computed: Int32Array) -> None:
    """Release blocks of a group, with ``computed[i]`` tokens of ``batch[i]`` computed."""
    chain = _chain_beside(state, group)
    slide(*group.view, batch, computed, state.ends[group.index], chain.pool.arrays, chain.arrays)


def _chain_beside(state: SpaceState, group: Group) -> Group:
    """Find a group with the same digests that keeps whole prefixes; the group itself if there is none."""
    beside = state.lanes[group.lane] if group in state.shedding_groups else ()
    return next((other for other in beside if other.keeps_whole_prefix), group)


def keep_prompt(state: SpaceState, row: int, num_tokens: int, hit: PrefixHit) -> None:
    """Keep the blocks before a new prompt's end, and before the place where it leaves a known chain."""
    for group in state.shedding_groups:
        alignment = int(group.arrays.parameters[HIT_ALIGNMENT])
        ends, pool, hits = state.ends[group.index], group.pool.arrays, hit.block_ids[group.index]
        ends[row, PROMPT_END] = max(0, num_tokens - 1 - state.beyond_hits) // alignment * alignment
        ends[row, PROMPT_LENGTH] = num_tokens
        ends[row, JUNCTION] = hit.junction
        if hit.junction == hit.num_whole_tokens:
            note_junction(pool, hits)
        else:
            chain = _chain_beside(state, group)
            chain_hits = hits[:0] if chain is group else hit.block_ids[chain.index]
            move_end_on(pool, group.arrays, hits, chain.pool.arrays, chain_hits)


def keep_what_leaves(state: SpaceState, batch: Int32Array) -> None:
    """Mark the blocks to be kept before rows release all their blocks on the device."""
    for group in state.shedding_groups:
        chain = _chain_beside(state, group)
        keep_ends(*group.view, batch, state.ends[group.index], chain.pool.arrays, chain.arrays)


def shed_dropped(state: SpaceState, pool: BlockPool, blocks: Int32Array) -> None:
    """Shed those of the blocks that are unreferenced now, and that no later prompt can hit.

    For references to blocks of a device pool that were dropped in another way than by releasing rows there.
    """
    for group in state.shedding_groups:
        if group.pool is pool:
            shed_unkept(pool.arrays, group.arrays, blocks)


@inlined
def is_left_inside(group: GroupArrays, index: int, junction: int) -> bool:
    """Whether prompts have left the chain inside logical block ``index``, and its leading tokens may be hit."""
    return bool(group.parameters[HITS_INSIDE] and junction > 0 and index == junction // group.parameters[BLOCK_SIZE])


@inlined
def is_at_interval(group: GroupArrays, index: int) -> bool:
    """Whether a hit at a multiple of the retention interval needs a logical block.

    A row that ends before that multiple keeps the block for its end.
    """
    interval = group.parameters[RETENTION]
    if interval == 0:
        return False
    return serves(group, index, blocks_for((index + 1) * group.parameters[BLOCK_SIZE], interval) * interval)


@compiled
def keep(pool: PoolArrays, group: GroupArrays, rows: Int32Array, ends: Int32Array, row: int, index: int) -> None:
    """Add the reasons to keep logical block ``index``, which the row is about to release, for the row's ends."""
    is_at_end = serves(group, index, ends[row, PROMPT_END]) or serves(group, index, ends[row, LAST_BOUNDARY])
    why = AT_END if is_at_end else 0
    if is_at_interval(group, index):
        why |= AT_INTERVAL
    if serves(group, index, ends[row, JUNCTION]) or is_left_inside(group, index, ends[row, JUNCTION]):
        why |= AT_JUNCTION
    if why:
        keep_for(pool, group, rows, row, index, why)


@compiled
def keep_for(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int, why: int) -> None:
    """Add reasons to keep a row's block to the block with the name of its content."""
    block = carrier_of(pool, group, rows, row, index)
    if block != NULL_BLOCK:
        if is_spare(pool, block):
            make_cached(pool, block)
        pool.records[block, KEPT] |= why


@compiled
def carrier_of(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int) -> int:
    """Find the block that has the name of a row's block's content: itself, another until they merge, or none."""
    block = group.table[row, index]
    if pool.records[block, NAME]:
        return int(block)
    if index >= rows[row, group.parameters[AT] + NUM_DIGESTED]:
        return NULL_BLOCK
    return find(pool, group.parameters[NAME_IN_POOL], pool.digests[block])


@compiled
def move_boundary(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    ends: Int32Array,
    row: int,
    num_tokens: int,
    chain_pool: PoolArrays,
    chains: GroupArrays,
) -> None:
    """Advance a row's last hit boundary to its computed tokens; blocks kept for the old one lose that reason.

    Args:
        chain_pool, chains: a group of equal block size that keeps whole prefixes, or this group again if there is none;
            then no reasons are removed, and the blocks stay until they are evicted.
    """
    sealed = max(0, min(num_tokens, rows[row, NUM_ACCEPTED] - group.parameters[MOST_AHEAD]))  # no hit ends later
    boundary = sealed // group.parameters[HIT_ALIGNMENT] * group.parameters[HIT_ALIGNMENT]
    before = ends[row, LAST_BOUNDARY]
    ends[row, LAST_BOUNDARY] = boundary
    if boundary > before and before != ends[row, PROMPT_END]:
        drop_end_reasons(pool, group, rows, row, before, boundary, 0, chain_pool, chains)


@compiled
def drop_end_reasons(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    end: int,
    later: int,
    why: int,
    chain_pool: PoolArrays,
    chains: GroupArrays,
) -> None:
    """Remove ``AT_END`` from the blocks that a row left before ``end``, except for ``later``; add ``why`` if not 0."""
    parameters = group.parameters
    block_size = parameters[BLOCK_SIZE]
    first = first_block_of_hit(parameters[KIND], parameters[SPAN], end, block_size, parameters[ENDS_HITS])
    stop = min(rows[row, parameters[AT] + FIRST_BLOCK], end // block_size)
    for index in range(max(first, parameters[NUM_SINK_BLOCKS]), stop):
        if not serves(group, index, later) and chains.table[row, index] != NULL_BLOCK:
            digest = chain_pool.digests[chains.table[row, index]]
            replace_reason(pool, find(pool, parameters[NAME_IN_POOL], digest), AT_END, why)


@compiled
def keep_ends(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    ends: Int32Array,
    chain_pool: PoolArrays,
    chains: GroupArrays,
) -> None:
    """Add the reasons to keep blocks of rows that are about to be released; their sequences end at computed tokens."""
    at = group.parameters[AT]
    for row in batch:
        record = rows[row]
        if record[FROZEN]:
            continue
        num_tokens = min(record[at + NUM_PUBLISHED] * group.parameters[BLOCK_SIZE], record[NUM_PLANNED])
        move_boundary(pool, group, rows, ends, row, num_tokens, chain_pool, chains)
        for index in range(record[at + NUM_BLOCKS]):
            if group.table[row, index] != NULL_BLOCK:
                keep(pool, group, rows, ends, row, index)
        if ends[row, LAST_BOUNDARY] > ends[row, PROMPT_END]:
            boundary = ends[row, LAST_BOUNDARY]
            is_prompt = boundary == ends[row, PROMPT_LENGTH] and group.parameters[KIND] != RECURRENT
            why = AT_RESEND if is_prompt else 0
            drop_end_reasons(pool, group, rows, row, ends[row, PROMPT_END], boundary, why, chain_pool, chains)


@inlined
def replace_reason(pool: PoolArrays, block: int, former: int, why: int) -> None:
    """Replace a reason to keep a block, if it has that one; no effect on a null, spare or leased block."""
    if block != NULL_BLOCK and not is_spare(pool, block) and not is_leased(pool, block):
        if pool.records[block, KEPT] & former:
            pool.records[block, KEPT] = (pool.records[block, KEPT] ^ former) | why
        shed(pool, block)


@inlined
def shed(pool: PoolArrays, block: int) -> None:
    """Make a named block spare if it is unreferenced and has no reason to be kept."""
    if pool.records[block, REF_COUNT] == 0 and not pool.records[block, KEPT]:
        make_spare(pool, block)


@compiled
def shed_unkept(pool: PoolArrays, group: GroupArrays, blocks: Int32Array) -> None:
    """Make those blocks spare that are named in this group, unreferenced, and without a reason to be kept."""
    for block in blocks:
        if pool.records[block, NAME] == group.parameters[NAME_IN_POOL]:
            shed(pool, block)


@compiled
def note_junction(pool: PoolArrays, hits: Int32Array) -> None:
    """Record that prompts branch where a hit ends. ``hits``: its blocks, null where none is needed."""
    for block in hits:
        if block != NULL_BLOCK:
            pool.records[block, KEPT] |= AT_JUNCTION


@compiled
def move_end_on(
    pool: PoolArrays, group: GroupArrays, hits: Int32Array, chain_pool: PoolArrays, chain_hits: Int32Array
) -> None:
    """Record that a prompt continues where a hit ends: if a sequence ended there, its end moves on.

    If that was a prompt of whole blocks, the reason for sending it again is removed as well. An interval is noted again
    when the new row releases the blocks.

    Args:
        hits: the blocks of the hit, null where none is needed.
        chain_pool, chain_hits: its blocks in a group of equal block size that keeps whole prefixes; empty if there is
            no such group.
    """
    for block in hits:
        if block != NULL_BLOCK and not is_leased(pool, block):
            pool.records[block, KEPT] &= AT_JUNCTION
    parameters = group.parameters
    kind, span, block_size = parameters[KIND], parameters[SPAN], parameters[BLOCK_SIZE]
    end = len(hits) * block_size
    resent = max(0, end - parameters[HIT_ALIGNMENT])
    first = first_block_of_hit(kind, span, resent, block_size, parameters[ENDS_HITS])
    stop = first_block_of_hit(kind, span, end, block_size, parameters[ENDS_HITS])
    for index in range(max(first, parameters[NUM_SINK_BLOCKS]), min(stop, len(chain_hits))):
        digest = chain_pool.digests[chain_hits[index]]
        replace_reason(pool, find(pool, parameters[NAME_IN_POOL], digest), AT_RESEND, 0)


@compiled
def slide(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    computed: Int32Array,
    ends: Int32Array,
    chain_pool: PoolArrays,
    chains: GroupArrays,
) -> None:
    """Release the blocks that the rows of a batch no longer need.

    ``computed[i]`` tokens of ``batch[i]`` are acknowledged. Blocks that a step in flight still reads stay, since such a
    step begins at or after that position. Drafts do not count, as they may be rolled back, nor does what the row is to
    compute again in the open step, which reads a window before it.

    Args:
        ends: int32 ``[max_sequences, NUM_ENDS]``, the ends of all rows (:mod:`~pagedkv.space.windows`).
        chain_pool, chains: as for :func:`~pagedkv.space.windows.move_boundary`.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(batch)):
        row = batch[place]
        query = min(computed[place], rows[row, NUM_ACCEPTED], rows[row, group.parameters[PLANNED]])
        first_token = first_needed_token(group.parameters[KIND], group.parameters[SPAN], query)
        stop = min(first_token // block_size, rows[row, at + NUM_BLOCKS])
        first = rows[row, at + FIRST_BLOCK]
        if stop <= first:
            continue
        if group.parameters[SHEDS]:
            move_boundary(pool, group, rows, ends, row, query, chain_pool, chains)
        for index in range(stop - 1, max(first, group.parameters[NUM_SINK_BLOCKS]) - 1, -1):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            if group.parameters[SHEDS]:
                keep(pool, group, rows, ends, row, index)
                shed_at_release(pool, block)
            release(pool, block, rows[row, LAST_STEP])
            group.table[row, index] = NULL_BLOCK
        rows[row, at + FIRST_BLOCK] = stop
