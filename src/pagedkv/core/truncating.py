"""Rolling sequences back: rejected drafts, reserved slots that were not used.

What may be rolled back is a question (:func:`obstacle`), asked of every group before any changes.
"""

from typing import Final

from pagedkv.core.blocks import DIGEST_WORDS, LIFE, NAME, NULL_BLOCK, REF_COUNT, Int32Array, PoolArrays, Uint32Array
from pagedkv.core.compiled import compiled
from pagedkv.core.digests import ROOT_WORDS
from pagedkv.core.pool import drop_name, release
from pagedkv.core.rows import (
    AT,
    BLOCK_SIZE,
    DIRTY_FROM,
    DIRTY_TO,
    FIRST_BLOCK,
    KIND,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_TOKENS,
    RECURRENT,
    SPAN,
    TAIL,
    TAIL_LIFE,
    GroupArrays,
)
from pagedkv.core.rules import first_needed_token
from pagedkv.core.tables import blocks_for

__all__ = ["CONTENT_GONE", "SHARED", "STATE_ADVANCED", "obstacle", "rewind_chain", "shrink"]

SHARED: Final = 1
CONTENT_GONE: Final = 2
STATE_ADVANCED: Final = 3


@compiled
def obstacle(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, length: int) -> int:
    """Tell why a row cannot be rolled back to ``length`` tokens, or 0."""
    record = rows[row]
    if length == record[NUM_TOKENS]:
        return 0
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    for index in range(length // block_size, blocks_for(record[NUM_TOKENS], block_size)):
        block = group.table[row, index]
        if block != NULL_BLOCK and pool.records[block, REF_COUNT] > 1:
            return SHARED
    query = min(length, record[NUM_PLANNED])
    first_token = first_needed_token(group.parameters[KIND], group.parameters[SPAN], query)
    for index in range(first_token // block_size, record[at + FIRST_BLOCK]):
        if group.table[row, index] == NULL_BLOCK:  # else it is a sink's
            return CONTENT_GONE
    if group.parameters[KIND] == RECURRENT and length < record[NUM_PLANNED] and length % block_size != 0:
        return STATE_ADVANCED
    return 0


@compiled
def shrink(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, length: int) -> None:
    """Give back the blocks beyond ``length`` tokens; a named block that will be overwritten loses its name."""
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    record = rows[row]
    table = group.table[row]
    kept = blocks_for(length, block_size)
    for index in range(record[at + NUM_BLOCKS] - 1, kept - 1, -1):
        if table[index] != NULL_BLOCK:
            release(pool, table[index])
            table[index] = NULL_BLOCK
    record[at + NUM_BLOCKS] = min(record[at + NUM_BLOCKS], kept)
    record[at + FIRST_BLOCK] = min(record[at + FIRST_BLOCK], kept)
    record[at + DIRTY_TO] = min(record[at + DIRTY_TO], kept)
    record[at + DIRTY_FROM] = min(record[at + DIRTY_FROM], record[at + DIRTY_TO])
    if length == record[NUM_TOKENS]:
        return
    if length % block_size != 0:
        partial = table[length // block_size]
        if pool.records[partial, NAME]:
            drop_name(pool, partial)
        pool.records[partial, LIFE] += 1
    num_full = length // block_size
    record[at + NUM_DIGESTED] = min(record[at + NUM_DIGESTED], num_full)
    if record[at + NUM_PUBLISHED] > num_full:
        record[at + NUM_PUBLISHED] = num_full
        rewind_tail(pool, group, rows, row)


@compiled
def rewind_tail(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int) -> None:
    """Set the parent of the next block to be published: the last published block itself.

    Where another block carries its name, what is published next cannot be found by links: a carrier looked up
    by digest alone, which a caller may have forged, must not become a parent.
    """
    at = group.parameters[AT]
    record = rows[row]
    last = record[at + NUM_PUBLISHED] - 1
    tail = group.table[row, last] if last >= 0 else NULL_BLOCK
    record[at + TAIL] = tail
    record[at + TAIL_LIFE] = pool.records[tail, LIFE]


@compiled
def rewind_chain(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, chains: Uint32Array) -> bool:
    """Set the digest of the last digested block again; False if this group does not have that block."""
    last = rows[row, group.parameters[AT] + NUM_DIGESTED] - 1
    if last < 0:
        for word in range(DIGEST_WORDS):
            chains[row, word] = ROOT_WORDS[word]
        return True
    block = group.table[row, last]
    if block == NULL_BLOCK:
        return False
    for word in range(DIGEST_WORDS):
        chains[row, word] = pool.digests[block, word]
    return True
