"""Sequences that share blocks: forking, and who computes what several of them wait for.

Tokens that no step has been planned for yet may lie in blocks that several rows hold: after a fork before
the prompt ran, or after a prefix hit on a prompt of the same step. One of these rows computes them; when
it leaves such a block (freed, swapped out, or copied away on write), :func:`find_holder` names an heir.
"""

from pagedkv.core.blocks import NULL_BLOCK, OPEN_STEP, PENDING_STEP, REF_COUNT, SETTLED_STEP, Int32Array, PoolArrays
from pagedkv.core.compiled import compiled
from pagedkv.core.rows import (
    AT,
    BLOCK_SIZE,
    FIRST_BLOCK,
    MARK,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    TAIL,
    TAIL_LIFE,
    GroupArrays,
)
from pagedkv.core.tables import blocks_for, note_change

__all__ = ["dependency_start", "find_holder", "fork_row", "last_pending_step", "last_shared_pending"]


@compiled
def fork_row(pool: PoolArrays, group: GroupArrays, rows: Int32Array, parent: int, children: Int32Array) -> None:
    """Let new rows share every block of ``parent`` that has content. The common columns are the caller's."""
    at = group.parameters[AT]
    num_blocks = blocks_for(rows[parent, NUM_TOKENS], group.parameters[BLOCK_SIZE])
    for index in range(num_blocks):
        block = group.table[parent, index]
        if block != NULL_BLOCK:
            pool.records[block, REF_COUNT] += len(children)
    for child in children:
        for index in range(num_blocks):
            group.table[child, index] = group.table[parent, index]
        for column in (FIRST_BLOCK, NUM_DIGESTED, NUM_PUBLISHED, TAIL, TAIL_LIFE):
            rows[child, at + column] = rows[parent, at + column]
        rows[child, at + NUM_BLOCKS] = num_blocks
        note_change(rows, child, at, 0, num_blocks)


@compiled
def last_shared_pending(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int) -> int:
    """Name the last logical block in which others wait for tokens that ``row`` is to compute, or -1."""
    block_size = group.parameters[BLOCK_SIZE]
    first = rows[row, NUM_PLANNED] // block_size
    for index in range(blocks_for(rows[row, NUM_TOKENS], block_size) - 1, first - 1, -1):
        block = group.table[row, index]
        is_pending = pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]
        if block != NULL_BLOCK and is_pending and pool.records[block, REF_COUNT] > 1:
            return index
    return -1


@compiled
def find_holder(group: GroupArrays, rows: Int32Array, block: int, index: int, excluded_mark: int) -> int:
    """Name a running row that holds ``block`` as logical block ``index``, or -1.

    Rows whose MARK is ``excluded_mark`` (those about to give the block up) are passed over.
    """
    at = group.parameters[AT]
    for row in range(len(rows)):
        if (
            rows[row, STATUS] == RUNNING
            and rows[row, MARK] != excluded_mark
            and index < rows[row, at + NUM_BLOCKS]
            and group.table[row, index] == block
        ):
            return row
    return -1


@compiled
def dependency_start(group: GroupArrays, rows: Int32Array, row: int) -> int:
    """Tell the first position of ``row`` that another row is to compute in the open step.

    The row's number of tokens, when it waits for nobody.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    start = rows[row, NUM_TOKENS]
    num_blocks = blocks_for(rows[row, NUM_TOKENS], block_size)
    for other in range(len(rows)):
        if other == row or rows[other, STATUS] != RUNNING or rows[other, NUM_PLANNED] >= rows[other, NUM_TOKENS]:
            continue
        stop = min(num_blocks, rows[other, at + NUM_BLOCKS])
        for index in range(rows[other, NUM_PLANNED] // block_size, stop):
            block = group.table[row, index]
            if block != NULL_BLOCK and block == group.table[other, index]:
                start = min(start, max(rows[other, NUM_PLANNED], index * block_size))
                break
    return int(start)


@compiled
def last_pending_step(pool: PoolArrays, block_ids: Int32Array) -> int:
    """Tell the last step that writes any of these blocks, or 0 when all are computed."""
    last = 0
    for block in block_ids:
        if block != NULL_BLOCK:
            last = max(last, pool.records[block, PENDING_STEP])
    return int(last) if last > pool.counts[SETTLED_STEP] else 0
