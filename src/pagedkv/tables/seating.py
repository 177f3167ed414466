"""Filling a new row: the blocks of its prefix hit, then new ones for the rest."""

from pagedkv.arrays import Int32Array
from pagedkv.compilation.compiled import compiled
from pagedkv.pool.block_pool import acquire_all
from pagedkv.pool.blocks import LIFE, NULL_BLOCK, PoolArrays
from pagedkv.tables.growing import slots_to_reserve, write_tokens
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    FIRST_BLOCK,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PUBLISHED,
    NUM_TOKENS,
    TAIL,
    TAIL_LIFE,
    GroupArrays,
    blocks_for,
    note_change,
)

__all__ = ["seat"]


@compiled
def seat(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    hits: Int32Array,
    tokens: Int32Array,
    num_lookahead: int,
) -> None:
    """Fill a new row: the blocks of its prefix hit (referenced already), then new ones for the rest.

    Every group sets the row's number of tokens, to the same.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    reserve = slots_to_reserve(group, num_lookahead)
    num_hits = len(hits)
    num_hit_tokens = num_hits * block_size
    for index in range(num_hits):
        group.table[row, index] = hits[index]
    wanted = blocks_for(len(tokens) + reserve, block_size)
    acquire_all(pool, group.table[row, num_hits:wanted])
    write_tokens(pool, group, row, num_hits, 0, tokens, num_hit_tokens, len(tokens) - num_hit_tokens)
    rows[row, at + NUM_BLOCKS] = wanted
    first = num_hits
    while first > 0 and hits[first - 1] != NULL_BLOCK:
        first -= 1
    rows[row, at + FIRST_BLOCK] = first
    rows[row, at + NUM_DIGESTED] = num_hits
    rows[row, at + NUM_PUBLISHED] = num_hits
    if num_hits > 0:
        rows[row, at + TAIL] = hits[num_hits - 1]
        rows[row, at + TAIL_LIFE] = pool.records[hits[num_hits - 1], LIFE]
    rows[row, NUM_TOKENS] = len(tokens)
    rows[row, NUM_ACCEPTED] = len(tokens)
    note_change(rows, row, at, 0, wanted)
