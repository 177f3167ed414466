"""Preparation of a batch of rows: checking that its rows are fit for an operation, and setting the tenant to charge."""

from pagedkv.blocks.blocks import PoolArrays
from pagedkv.blocks.moments import counts_takes, note_current_tenant
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.row_record import mark_row
from pagedkv.tables.rows import MARK, OCCUPIED, STATUS, TENANT, VACANT

__all__ = ["charge_to_tenant_of_row", "first_unfit_row"]


@inlined
def charge_to_tenant_of_row(pool: PoolArrays, rows: Int32Array, row: int) -> None:
    """Charge all later allocations to a row's tenant, where there are tenants."""
    if counts_takes(pool):
        note_current_tenant(pool, rows[row, TENANT])


@compiled
def first_unfit_row(rows: Int32Array, batch: Int32Array, status: int, mark: int) -> int:
    """Find the first place in a batch with a row that is out of range, vacant, repeated, or of another status; or -1.

    ``mark`` is a number that no batch has used before.
    """
    for place in range(len(batch)):
        if batch[place] < 0 or batch[place] >= len(rows):
            return place
        row = unsigned(batch[place])
        if rows[row, MARK] == mark:
            return place
        if rows[row, STATUS] == VACANT or (status != OCCUPIED and rows[row, STATUS] != status):
            return place
        mark_row(rows, row, mark)
    return -1
