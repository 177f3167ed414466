"""Pending blocks: of the rows that share a block, which one computes its tokens in the open step.

Tokens without a planned step may be in shared blocks, after a fork before the prompt ran, or after a prefix hit on a
prompt of the same step. Every such block is *pending* for the open step, and one running row that refers to it must
compute it: its range in the next plan covers the block. When that row leaves (freed, swapped out, or given a copy on
write), other rows that refer to the block take over. This is decided block by block from the last to the first, since
a row that refers to a block need not refer to the one before::

    row a, leaving:  [A0 pending][A1 pending][A2 pending]    computes from A0 on
    row b, a fork:   [A0 pending][A1 pending][A2 pending]    takes over A0 and A1
    row c, a hit:    [S0 cached ][S1 cached ][A2 pending]    takes over A2: it starts where it shares

The heir can compute from there, since a hit on pending blocks refers to all blocks that computing them reads. A block
without an heir, since only lost rows still refer to it, is not computed; its name is dropped.
"""

from typing import Final

from pagedkv.blocks.blocks import NAME, NULL_BLOCK, OPEN_STEP, PENDING_STEP, REF_COUNT, SETTLED_STEP, PoolArrays
from pagedkv.blocks.causes import CALLED_OFF
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.tables.growing import writes_shared_block
from pagedkv.tables.row_record import plan_to, touch
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    MARK,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_TOKENS,
    PLANNED,
    RUNNING,
    STATUS,
    GroupArrays,
    blocks_for,
)

__all__ = [
    "collect_pending_writers",
    "dependency_start",
    "hand_over_blocks",
    "last_pending_step",
    "leave_blocks",
    "lower_start",
]

NOBODY: Final = -1
COMPUTED: Final = -2


@compiled
def lower_start(group: GroupArrays, rows: Int32Array, row: int, position: int) -> None:
    """Lower the start of a row's next range to ``position`` in one group, if it is greater.

    Groups with prefix caching have one common start. A group outside has its own; a row that computes there also
    computes at least its last token in the other groups, since only rows that do are in a plan.
    """
    column = group.parameters[PLANNED]
    if rows[row, column] > position:
        plan_to(rows, row, column, position)
        plan_to(rows, row, NUM_PLANNED, min(rows[row, NUM_PLANNED], rows[row, NUM_TOKENS] - 1))
        touch(rows, row)


@compiled
def hand_over_blocks(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, relies_on: Int32Array, row: int, leaving_mark: int
) -> None:
    """Find heirs in one group for the pending blocks that ``row`` was to compute and others share.

    Rows marked ``leaving_mark`` leave as well.

    Args:
        relies_on: int32 ``[rows]``, the last step in which another row computes what each row shares.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    start = rows[row, group.parameters[PLANNED]]
    heir = NOBODY
    for index in range(blocks_for(rows[row, NUM_TOKENS], block_size) - 1, start // block_size - 1, -1):
        block = group.table[row, index]
        is_pending = pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]
        if block == NULL_BLOCK or not is_pending or pool.records[block, REF_COUNT] == 1:
            continue
        if heir < 0 or index >= rows[heir, at + NUM_BLOCKS] or group.table[heir, index] != block:
            position = max(start, index * block_size)
            heir = find_heir(group, rows, relies_on, pool.counts[OPEN_STEP], block, index, position, leaving_mark)
        if heir >= 0:
            lower_start(group, rows, heir, max(start, index * block_size))
        elif heir == NOBODY and pool.records[block, NAME]:
            drop_name(pool, block, CALLED_OFF)


@compiled
def find_heir(
    group: GroupArrays,
    rows: Int32Array,
    relies_on: Int32Array,
    open_step: int,
    block: int,
    index: int,
    position: int,
    leaving_mark: int,
) -> int:
    """Find the running row, not marked as leaving, that refers to a block and has the earliest start.

    ``NOBODY`` if there is none. A row that relies on no other in the open step has the content before its start, or a
    step in flight computes it for the row: its window may have moved on, so it is no heir. ``COMPUTED`` if all are so.
    """
    at = group.parameters[AT]
    planned = group.parameters[PLANNED]
    heir = NOBODY
    for row in range(len(rows)):
        if (
            rows[row, STATUS] == RUNNING
            and rows[row, MARK] != leaving_mark
            and index < rows[row, at + NUM_BLOCKS]
            and group.table[row, index] == block
        ):
            if relies_on[row] < open_step and rows[row, planned] > position:
                heir = COMPUTED if heir == NOBODY else heir
            elif heir < 0 or rows[row, planned] < rows[heir, planned]:
                heir = row
    return heir


@compiled
def dependency_start(group: GroupArrays, rows: Int32Array, row: int) -> int:
    """Return the first position of ``row`` that another row is to compute in the open step.

    It is the row's number of tokens if there is none.
    """
    at = group.parameters[AT]
    planned = group.parameters[PLANNED]
    block_size = group.parameters[BLOCK_SIZE]
    start = rows[row, NUM_TOKENS]
    num_blocks = blocks_for(rows[row, NUM_TOKENS], block_size)
    for other in range(len(rows)):
        if other == row or rows[other, STATUS] != RUNNING or rows[other, planned] >= rows[other, NUM_TOKENS]:
            continue
        stop = min(num_blocks, rows[other, at + NUM_BLOCKS])
        for index in range(rows[other, planned] // block_size, stop):
            block = group.table[row, index]
            if block != NULL_BLOCK and block == group.table[other, index]:
                start = min(start, max(rows[other, planned], index * block_size))
                break
    return int(start)


@compiled
def collect_pending_writers(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, out: Int32Array
) -> int:
    """Write the places in a batch of rows that will copy, at their next write, a block that the open step computes."""
    num_writers = 0
    for place in range(len(batch)):
        row = batch[place]
        num_tokens = rows[row, NUM_TOKENS]
        if writes_shared_block(pool.records, group, row, num_tokens):
            block = group.table[row, num_tokens // group.parameters[BLOCK_SIZE]]
            if pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
                out[num_writers] = place
                num_writers += 1
    return num_writers


@compiled
def leave_blocks(
    group: GroupArrays,
    rows: Int32Array,
    indexes: Int32Array,
    numbers: Int32Array,
    leaves: Int32Array,
    starts: Int32Array,
) -> None:
    """Let each leaving row compute a pending block in its copy, and one staying row in the original.

    Two passes over the running rows, however many blocks are left.

    Args:
        indexes: int32 ``[any]``, the logical blocks that are left, ascending.
        numbers: int32 ``[blocks]``, a number from 1 on for each block that is left, else 0.
        leaves: int32 ``[max_sequences]``, the number of the block that a row leaves, or 0.
        starts: int32 ``[numbers + 1, 3]``, scratch: by number the earliest start of all its holders, that of those
            which stay, and the first row that stays.
    """
    starts[:] = -1
    for row in range(len(rows)):
        if rows[row, STATUS] == RUNNING:
            _note_starts(group, rows, row, indexes, numbers, leaves[row], starts)
    for row in range(len(rows)):
        if leaves[row] != 0:
            lower_start(group, rows, row, starts[leaves[row], 0])
    for number in range(1, len(starts)):
        if starts[number, 1] > starts[number, 0]:
            lower_start(group, rows, starts[number, 2], starts[number, 0])


@compiled
def _note_starts(
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    indexes: Int32Array,
    numbers: Int32Array,
    leaving: int,
    starts: Int32Array,
) -> None:
    """Note in ``starts``, for each numbered block that a row holds, where the row would begin to compute it."""
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(indexes)):
        index = indexes[place]
        if index >= rows[row, group.parameters[AT] + NUM_BLOCKS] or index * block_size >= rows[row, NUM_TOKENS]:
            break
        number = numbers[group.table[row, index]]
        if number == 0:
            continue
        start = max(rows[row, group.parameters[PLANNED]], index * block_size)
        if starts[number, 0] < 0 or start < starts[number, 0]:
            starts[number, 0] = start
        if number != leaving and starts[number, 1] < 0:
            starts[number, 2] = row
        if number != leaving and (starts[number, 1] < 0 or start < starts[number, 1]):
            starts[number, 1] = start


@compiled
def last_pending_step(records: Int32Array, counts: Int64Array, block_ids: Int32Array) -> int:
    """Return the last step that writes any of these blocks, or 0 if all are computed."""
    last = 0
    for block in block_ids:
        if block != NULL_BLOCK:
            last = max(last, records[block, PENDING_STEP])
    return int(last) if last > counts[SETTLED_STEP] else 0
