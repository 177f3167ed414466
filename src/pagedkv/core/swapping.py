"""Moving sequences between a device pool and its host pool: bookkeeping of the moves.

Works in either direction. A block that several of the moved rows share is moved once and shared again on
the other side. Source and destination are held for the open step, whose plan carries the move out.
"""

from pagedkv.core.blocks import (
    DIGEST_WORDS,
    EXTRA,
    HOLD_STEP,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    REF_COUNT,
    Int32Array,
    PoolArrays,
)
from pagedkv.core.compiled import compiled
from pagedkv.core.pool import acquire, release
from pagedkv.core.rows import (
    AT,
    BLOCK_SIZE,
    DIRTY_FROM,
    DIRTY_TO,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_TOKENS,
    TAIL,
    TAIL_LIFE,
    GroupArrays,
)
from pagedkv.core.tables import blocks_for, note_change

__all__ = ["arrive", "count_distinct", "move_rows"]


@compiled
def count_distinct(group: GroupArrays, rows: Int32Array, batch: Int32Array, seen: Int32Array) -> int:
    """Count the different blocks with content that a batch of rows holds.

    ``seen`` is int32 ``[num_blocks]``, zeros; on return nonzero where a block was counted.
    """
    num_distinct = 0
    for row in batch:
        for index in range(blocks_for(rows[row, NUM_TOKENS], group.parameters[BLOCK_SIZE])):
            block = group.table[row, index]
            if block != NULL_BLOCK and seen[block] == 0:
                seen[block] = 1
                num_distinct += 1
    return num_distinct


@compiled
def move_rows(
    source: PoolArrays,
    destination: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    moved_to: Int32Array,
    moves: Int32Array,
) -> int:
    """Move the blocks of a batch of rows; the caller has checked that the destination has room.

    Args:
        moved_to: int32 ``[source blocks]``, zeros: scratch.
        moves: int32 ``[n, 2]``, ``(source, destination)`` of each move.

    Returns the number of moves.
    """
    num_moves = 0
    at = group.parameters[AT]
    for row in batch:
        num_blocks = blocks_for(rows[row, NUM_TOKENS], group.parameters[BLOCK_SIZE])
        for index in range(num_blocks):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            if moved_to[block] == NULL_BLOCK:
                moved_to[block] = move_block(source, destination, block)
                moves[num_moves, 0] = block
                moves[num_moves, 1] = moved_to[block]
                num_moves += 1
            else:
                destination.records[moved_to[block], REF_COUNT] += 1
        for index in range(rows[row, at + NUM_BLOCKS] - 1, -1, -1):
            block = group.table[row, index]
            if block != NULL_BLOCK:
                group.table[row, index] = moved_to[block] if index < num_blocks else NULL_BLOCK
                release(source, block)
        rows[row, at + NUM_BLOCKS] = num_blocks
        rows[row, at + DIRTY_FROM] = 0  # the device has no table of this row until it arrives again
        rows[row, at + DIRTY_TO] = 0
    return num_moves


@compiled
def move_block(source: PoolArrays, destination: PoolArrays, block: int) -> int:
    """Give a block's content a place on the other side, and hold both until the open step is over."""
    place = acquire(destination)
    for column in (EXTRA, PENDING_STEP):
        destination.records[place, column] = source.records[block, column]
    for index in range(source.tokens.shape[1]):
        destination.tokens[place, index] = source.tokens[block, index]
    if len(source.digests):
        for word in range(DIGEST_WORDS):
            destination.digests[place, word] = source.digests[block, word]
    source.records[block, HOLD_STEP] = source.counts[OPEN_STEP]
    destination.records[place, HOLD_STEP] = source.counts[OPEN_STEP]
    return place


@compiled
def arrive(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array) -> None:
    """Make swapped-in rows part of the open step: what was not computed is pending, all is published anew."""
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    for row in batch:
        record = rows[row]
        for index in range(record[NUM_PLANNED] // block_size, record[at + NUM_BLOCKS]):
            if group.table[row, index] != NULL_BLOCK and record[NUM_PLANNED] < record[NUM_TOKENS]:
                pool.records[group.table[row, index], PENDING_STEP] = pool.counts[OPEN_STEP]
        record[at + NUM_PUBLISHED] = 0
        record[at + TAIL] = NULL_BLOCK
        record[at + TAIL_LIFE] = 0
        note_change(rows, row, at, 0, record[at + NUM_BLOCKS])
