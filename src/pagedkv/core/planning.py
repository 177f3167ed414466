"""Closing a step: which positions it computes, which table entries the device must learn, what aborting undoes."""

from pagedkv.core.blocks import NULL_BLOCK, OPEN_STEP, PENDING_STEP, Int32Array, PoolArrays
from pagedkv.core.compiled import compiled
from pagedkv.core.rows import (
    AT,
    BLOCK_SIZE,
    DIRTY_FROM,
    DIRTY_TO,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    TOUCHED,
    GroupArrays,
)
from pagedkv.core.truncating import rewind_tail

__all__ = ["collect_ranges", "collect_touched", "collect_writes", "count_writes", "renew_pending", "settle_blocks"]


@compiled
def collect_touched(rows: Int32Array, out: Int32Array) -> int:
    """Write the running rows that have something for the plan to ``out``; return how many there are."""
    num_touched = 0
    for row in range(len(rows)):
        if rows[row, TOUCHED]:
            rows[row, TOUCHED] = 0
            if rows[row, STATUS] == RUNNING:
                out[num_touched] = row
                num_touched += 1
    return num_touched


@compiled
def collect_ranges(rows: Int32Array, touched: Int32Array, out: Int32Array) -> int:
    """Plan what is not planned yet: ``out[i]`` becomes (row, start, end); return how many rows compute."""
    num_ranges = 0
    for row in touched:
        if rows[row, NUM_PLANNED] < rows[row, NUM_TOKENS]:
            out[0, num_ranges] = row
            out[1, num_ranges] = rows[row, NUM_PLANNED]
            out[2, num_ranges] = rows[row, NUM_TOKENS]
            rows[row, NUM_PLANNED] = rows[row, NUM_TOKENS]
            num_ranges += 1
    return num_ranges


@compiled
def count_writes(group: GroupArrays, rows: Int32Array, touched: Int32Array) -> int:
    """Count the table entries that changed."""
    at = group.parameters[AT]
    num_entries = 0
    for row in touched:
        num_entries += rows[row, at + DIRTY_TO] - rows[row, at + DIRTY_FROM]
    return num_entries


@compiled
def collect_writes(
    group: GroupArrays, rows: Int32Array, touched: Int32Array, runs: Int32Array, block_ids: Int32Array
) -> int:
    """Write the changed entries: ``runs`` gets rows, starts and counts; return the number of runs."""
    at = group.parameters[AT]
    num_runs = 0
    num_entries = 0
    for row in touched:
        start = rows[row, at + DIRTY_FROM]
        stop = rows[row, at + DIRTY_TO]
        rows[row, at + DIRTY_FROM] = 0
        rows[row, at + DIRTY_TO] = 0
        if stop > start:
            runs[0, num_runs] = row
            runs[1, num_runs] = start
            runs[2, num_runs] = stop - start
            for index in range(start, stop):
                block_ids[num_entries + index - start] = group.table[row, index]
            num_runs += 1
            num_entries += stop - start
    return num_runs


@compiled
def renew_pending(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int) -> None:
    """Make what a rewound row will compute again pending for the open step, and unpublished."""
    at = group.parameters[AT]
    first = rows[row, NUM_PLANNED] // group.parameters[BLOCK_SIZE]
    for index in range(first, rows[row, at + NUM_BLOCKS]):
        block = group.table[row, index]
        if block != NULL_BLOCK:
            pool.records[block, PENDING_STEP] = pool.counts[OPEN_STEP]
    if rows[row, at + NUM_PUBLISHED] > first:
        rows[row, at + NUM_PUBLISHED] = first
        rewind_tail(pool, group, rows, row)
    rows[row, TOUCHED] = 1


@compiled
def settle_blocks(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int) -> None:
    """Note that everything in a row's blocks is computed."""
    for index in range(rows[row, group.parameters[AT] + NUM_BLOCKS]):
        block = group.table[row, index]
        if block != NULL_BLOCK:
            pool.records[block, PENDING_STEP] = 0
