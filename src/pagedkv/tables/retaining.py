"""What windows leave in the cache: the blocks that a later prompt can hit, and no others.

A prompt hits a window group where the window before the hit's end is cached; of what a sequence leaves behind as it
moves on, that is hardly ever asked for. So a block is kept, once nobody holds it, for a reason that was noted in its
record (``KEPT``) when a sequence moved past it or ended:

``AT_END``
    It lies in the window before a prompt's end or a sequence's end. A later prompt that goes on from there takes the
    reason away: its own ends stand for it.
``AT_JUNCTION``
    It lies in the window before a place where a prompt has left a known chain that goes on otherwise.

Everything else is *shed* with its last reference: it loses its name, and is handed out before any cached block::

    blocks of a window group    0    1    2    3    4    5    6    7    8    9
                              shed shed shed [junction ] shed shed shed [  end  ]
                                             ^ a prompt left the chain here    ^ the sequence ended here

The rule is that of promise 22 of docs/design.md. It needs to see where prompts branch, so it is in force where a group
that keeps whole prefixes has prefix caching as well.
"""

from typing import Final

from pagedkv.arrays import Int32Array
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.pool.block_pool import drop_name, release
from pagedkv.pool.blocks import KEPT, NAME, NULL_BLOCK, REF_COUNT, PoolArrays
from pagedkv.pool.prefix_index import find, forget
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    ENDS_HITS,
    FIRST_BLOCK,
    FROZEN,
    HIT_ALIGNMENT,
    KIND,
    NAME_IN_POOL,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_SINK_BLOCKS,
    SPAN,
    GroupArrays,
)
from pagedkv.tables.rules import first_block_of_hit

__all__ = [
    "JUNCTION",
    "NUM_ENDS",
    "PROMPT_END",
    "REASONS",
    "give_up",
    "keep_ends",
    "keep_passed",
    "move_end_on",
    "note_junction",
    "shed_unkept",
]

# Columns of ``ends``, int32 ``[max_sequences, NUM_ENDS]``: positions of a row at which hits can end; 0: none.
PROMPT_END: Final = 0
JUNCTION: Final = 1
NUM_ENDS: Final = 2

# Bits of KEPT. Above them, in the last block before a sequence's end: how many blocks lie before its prompt's end.
AT_END: Final = 1
AT_JUNCTION: Final = 2
REASONS: Final = 3
EARLIER_END: Final = 4


@inlined
def serves(group: GroupArrays, index: int, length: int) -> bool:
    """Tell whether a hit of ``length`` tokens takes logical block ``index``."""
    block_size = group.parameters[BLOCK_SIZE]
    first = first_block_of_hit(
        group.parameters[KIND], group.parameters[SPAN], length, block_size, group.parameters[ENDS_HITS]
    )
    return index < length // block_size and (index >= first or index < group.parameters[NUM_SINK_BLOCKS])


@inlined
def keep_passed(pool: PoolArrays, group: GroupArrays, rows: Int32Array, ends: Int32Array, row: int, index: int) -> None:
    """Note for which of a row's ends logical block ``index``, which the row is about to give up, is to be kept."""
    why = 0
    if serves(group, index, ends[row, PROMPT_END]):
        why = AT_END
    if serves(group, index, ends[row, JUNCTION]):
        why |= AT_JUNCTION
    if why:
        keep(pool, group, rows, row, index, why)


@compiled
def keep(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int, why: int) -> None:
    """Note why a row's block is to be kept."""
    block = carrier_of(pool, group, rows, row, index)
    if block != NULL_BLOCK:
        pool.records[block, KEPT] |= why


@compiled
def carrier_of(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int) -> int:
    """Find the block that carries the content of a row's block: that block, another one while they wait, or none."""
    block = group.table[row, index]
    if pool.records[block, NAME]:
        return int(block)
    if index >= rows[row, group.parameters[AT] + NUM_DIGESTED]:
        return NULL_BLOCK
    return find(pool, group.parameters[NAME_IN_POOL], pool.digests[block])


@inlined
def give_up(pool: PoolArrays, block: int, last_step: int) -> None:
    """Give one reference to a window's block back; with the last one, what is kept for no reason loses its name."""
    record = pool.records[block]
    if record[REF_COUNT] == 1 and record[NAME] and not record[KEPT] & REASONS:
        forget(pool, block)
    release(pool, block, last_step)


@compiled
def keep_ends(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, ends: Int32Array) -> None:
    """Note what is to be kept of rows that are about to be given up: sequences end where they are computed to."""
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    alignment = group.parameters[HIT_ALIGNMENT]
    for row in batch:
        record = rows[row]
        if record[FROZEN]:
            continue
        end = min(record[at + NUM_PUBLISHED] * block_size, record[NUM_PLANNED]) // alignment * alignment
        first = record[at + FIRST_BLOCK]
        for index in range(record[at + NUM_BLOCKS]):
            if group.table[row, index] == NULL_BLOCK or group.parameters[NUM_SINK_BLOCKS] <= index < first:
                continue
            keep_passed(pool, group, rows, ends, row, index)
            if serves(group, index, end):
                keep(pool, group, rows, row, index, AT_END)
        last = end // block_size - 1
        if end > ends[row, PROMPT_END] and group.table[row, last] != NULL_BLOCK:
            tip = carrier_of(pool, group, rows, row, last)
            if tip != NULL_BLOCK:
                pool.records[tip, KEPT] &= REASONS
                pool.records[tip, KEPT] |= ends[row, PROMPT_END] // block_size * EARLIER_END


@compiled
def shed_unkept(pool: PoolArrays, group: GroupArrays, blocks: Int32Array) -> None:
    """Give the content of those blocks up that carry a name of this group, that nobody holds, and nothing keeps."""
    for block in blocks:
        record = pool.records[block]
        is_named = record[NAME] == group.parameters[NAME_IN_POOL]
        if is_named and record[REF_COUNT] == 0 and not record[KEPT] & REASONS:
            drop_name(pool, block)


@compiled
def note_junction(pool: PoolArrays, hits: Int32Array) -> None:
    """Note that prompts branch where a hit ends. ``hits``: its blocks, null where none is needed."""
    for block in hits:
        if block != NULL_BLOCK:
            pool.records[block, KEPT] |= AT_JUNCTION


@compiled
def move_end_on(
    pool: PoolArrays, group: GroupArrays, chain_pool: PoolArrays, chain: Int32Array, hits: Int32Array
) -> None:
    """Note that a prompt goes on where a hit ends: if a sequence ended there, its end and its prompt's end move on.

    Args:
        chain_pool: the pool of a group of equal block size that keeps whole prefixes, for its digests.
        chain: its blocks of the hit, int32 ``[hit blocks]``; empty if there is no such group: the end of the prompt
            is left to be evicted then.
        hits: the blocks of this group, null where none is needed.
    """
    records = pool.records
    earlier = records[hits[-1], KEPT] // EARLIER_END if hits[-1] != NULL_BLOCK else 0
    for block in hits:
        if block != NULL_BLOCK:
            records[block, KEPT] &= AT_JUNCTION
    for index in range(min(earlier, len(chain))):
        if hits[index] == NULL_BLOCK and serves(group, index, earlier * group.parameters[BLOCK_SIZE]):
            block = find(pool, group.parameters[NAME_IN_POOL], chain_pool.digests[chain[index]])
            if block != NULL_BLOCK:
                shed(pool, block)


@inlined
def shed(pool: PoolArrays, block: int) -> None:
    """Keep a named block for no end any longer, and give its content up if nothing else keeps it."""
    pool.records[block, KEPT] &= AT_JUNCTION
    if pool.records[block, KEPT] == 0 and pool.records[block, REF_COUNT] == 0:
        drop_name(pool, block)
