"""The inputs of attention kernels, read from the tables: the slot of every position of a step, and lists of pages."""

from pagedkv.blocks.blocks import NULL_BLOCK
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    DIRTY_FROM,
    DIRTY_TO,
    FIRST_BLOCK,
    NUM_BLOCKS,
    NUM_SINK_BLOCKS,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    GroupArrays,
    blocks_for,
)

__all__ = ["count_pages", "write_pages", "write_slots"]


@compiled
def write_slots(
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    starts: Int32Array,
    ends: Int32Array,
    serials: Int32Array,
    current: Int32Array,
    slots: Int64Array,
) -> int:
    """Write the slots of positions ``[starts[i], ends[i])`` of each ``batch[i]``, one after the other.

    Returns -1, or the first place with a row that has changed since the last plan: it serves another sequence
    (``current[i]``) than ``serials[i]``, or its entries of these positions have changed.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    slot = 0
    for place in range(len(batch)):
        row = batch[place]
        first = starts[place] // block_size
        stop = blocks_for(ends[place], block_size)
        if rows[row, STATUS] != RUNNING or current[place] != serials[place] or rows[row, at + NUM_BLOCKS] < stop:
            return place
        if max(first, rows[row, at + DIRTY_FROM]) < min(stop, rows[row, at + DIRTY_TO]):
            return place
        position = starts[place]
        for index in range(first, stop):
            block = int(group.table[row, index])  # 64 bits: a slot may be beyond 32
            if block == NULL_BLOCK:
                return place
            end = min(ends[place], (index + 1) * block_size)
            shift = (block - index) * block_size
            for offset in range(end - position):
                slots[slot + offset] = position + offset + shift
            slot += end - position
            position = end
    return -1


@compiled
def count_pages(
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    indptr: Int32Array,
    last_page_len: Int32Array,
    starts: Int32Array,
) -> None:
    """Count the pages with content of each row of a batch, which are those after the last gap in its table.

    ``indptr`` is int32 ``[rows + 1]``; the others are int32 ``[rows]``.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    indptr[0] = 0
    for place in range(len(batch)):
        row = batch[place]
        num_tokens = rows[row, NUM_TOKENS]
        first = min(rows[row, at + FIRST_BLOCK], blocks_for(num_tokens, block_size))
        if first <= group.parameters[NUM_SINK_BLOCKS]:
            first = 0  # the entries below are sinks, which are all kept
        num_pages = blocks_for(num_tokens, block_size) - first
        indptr[place + 1] = indptr[place] + num_pages
        last_page_len[place] = (num_tokens - 1) % block_size + 1 if num_pages > 0 else 0
        starts[place] = min(first * block_size, num_tokens)


@compiled
def write_pages(
    group: GroupArrays, batch: Int32Array, starts: Int32Array, indptr: Int32Array, indices: Int32Array
) -> None:
    """Write the block ids of the pages that :func:`count_pages` counted."""
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(batch)):
        first = blocks_for(starts[place], block_size)
        for page in range(indptr[place + 1] - indptr[place]):
            indices[indptr[place] + page] = group.table[batch[place], first + page]
