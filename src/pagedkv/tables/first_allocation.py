"""The tables of a new row: the blocks of its prefix hit, then new ones for the rest."""

from pagedkv.blocks.blocks import LIFE, NULL_BLOCK, PoolArrays
from pagedkv.blocks.life_cycle import acquire_all
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.growing import slots_to_reserve, write_tokens
from pagedkv.tables.row_record import (
    begin_table,
    note_change,
    put_entry,
    set_tail,
    set_tokens,
)
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    GroupArrays,
    blocks_for,
)

__all__ = ["allocate_row"]


@compiled
def allocate_row(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    hits: Int32Array,
    tokens: Int32Array,
    num_lookahead: int,
) -> None:
    """Fill a new row: the blocks of its prefix hit (already referenced), then new ones for the rest.

    Every group sets the row's number of tokens, to equal values.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    reserve = slots_to_reserve(group, num_lookahead)
    num_hits = len(hits)
    num_hit_tokens = num_hits * block_size
    for index in range(num_hits):
        put_entry(group.table, row, index, hits[index])
    wanted = blocks_for(len(tokens) + reserve, block_size)
    acquire_all(pool, group.table[row, num_hits:wanted])
    write_tokens(pool, group, row, num_hits, 0, tokens, num_hit_tokens, len(tokens) - num_hit_tokens)
    first = num_hits
    while first > 0 and hits[first - 1] != NULL_BLOCK:
        first -= 1
    begin_table(rows, row, at, wanted, first, num_hits)
    if num_hits > 0:
        set_tail(rows, row, at, hits[num_hits - 1], pool.records[hits[num_hits - 1], LIFE])
    set_tokens(rows, row, len(tokens), len(tokens))
    note_change(rows, row, at, 0, wanted)
