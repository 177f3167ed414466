"""Leases for the blocks of rows and of hits, in one group; :mod:`pagedkv.blocks.leasing` defines leases.

A leased block of a window group is kept for the reason ``AT_END``, so it is not shed as long as the lease lasts.
"""

from pagedkv.blocks.blocks import LIFE, NAME, NULL_BLOCK, PoolArrays
from pagedkv.blocks.keep_reasons import AT_END, add_reasons
from pagedkv.blocks.leasing import lease
from pagedkv.blocks.spare_blocks import is_spare, make_cached
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.retaining import carrier_of
from pagedkv.tables.rows import AT, NUM_BLOCKS, SHEDS, TAIL, TAIL_LIFE, GroupArrays

__all__ = ["lease_blocks", "lease_row"]


@compiled
def lease_block(pool: PoolArrays, group: GroupArrays, block: int, until: float) -> None:
    """Lease one block, if it has a name."""
    if block == NULL_BLOCK or not pool.records[block, NAME]:
        return
    if is_spare(pool, block):
        make_cached(pool, block)
    if group.parameters[SHEDS]:
        add_reasons(pool.records, block, AT_END)
    lease(pool, block, until)


@compiled
def lease_blocks(pool: PoolArrays, group: GroupArrays, blocks: Int32Array, until: float) -> None:
    """Lease the blocks of a hit, null blocks excepted, the tail before the head: in the order of a release."""
    for block in blocks[::-1]:
        lease_block(pool, group, block, until)


@compiled
def lease_row(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, until: float) -> None:
    """Lease the named content of a row, in whichever block has the name, and the last state that it has left.

    The tail comes before the head, as in a release: another block may have the name, and be free.
    """
    at = group.parameters[AT]
    tail = rows[row, at + TAIL]
    if pool.records[tail, LIFE] == rows[row, at + TAIL_LIFE]:
        lease_block(pool, group, tail, until)
    for index in range(rows[row, at + NUM_BLOCKS] - 1, -1, -1):
        if group.table[row, index] != NULL_BLOCK:
            lease_block(pool, group, carrier_of(pool, group, rows, row, index), until)
