"""Swapping: the records of moves of sequences between a device pool and its host pool, in either direction.

A block that several of the moved rows share is moved once, and shared again on the other side. Content that is already
on the other side (its *twin*: a full block of the same chain, named there) is shared instead of moved. Source and
destination of a move are held for the open step, in which the move is carried out.

First, :func:`survey` counts what a move needs. Then :func:`claim_twins` takes references to the twins of all groups,
before :func:`move_rows` allocates blocks, which might evict a twin.
"""

from typing import Final

from pagedkv.blocks.block_record import add_references, become_copy, set_pending
from pagedkv.blocks.blocks import (
    EXTRA,
    FREE,
    LIFE,
    NAME,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    SETTLED_STEP,
    PoolArrays,
)
from pagedkv.blocks.contents import copy_content, copy_digest
from pagedkv.blocks.life_cycle import acquire, release, reuse
from pagedkv.blocks.moments import are_alike, note_copy
from pagedkv.blocks.prefix_index import find, is_child_of
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.batches import charge_to_tenant_of_row
from pagedkv.tables.publishing import publish_block
from pagedkv.tables.row_record import clear_changes, note_change, publish_to, put_entry, set_num_blocks, set_tail
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    CACHING,
    FROZEN,
    FULL,
    KIND,
    LAST_STEP,
    NAME_IN_POOL,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_TOKENS,
    PLANNED,
    GroupArrays,
    blocks_for,
)

__all__ = ["NEW_PLACE", "arrive", "claim_twins", "move_rows", "name_moved", "survey"]

NEW_PLACE: Final = -(2**31)  # in ``moved_to``: surveyed, and no twin. Other negative numbers: an unreferenced twin


@compiled
def survey(
    source: PoolArrays,
    destination: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    moved_to: Int32Array,
    claimed: Int32Array,
) -> tuple[int, int]:
    """Count the free blocks of the destination that moving a batch of rows takes. Changes no state.

    Args:
        moved_to: int32 ``[source blocks]``, zeros at first; becomes minus the twin of each block, or ``NEW_PLACE``.
        claimed: int32 ``[destination blocks]``, zeros at first; marks twins that were counted.

    Returns the number of free blocks, including free twins, and the number of different blocks moved or shared.
    """
    num_taken = 0
    num_distinct = 0
    for row in batch:
        num_blocks = blocks_for(rows[row, NUM_TOKENS], group.parameters[BLOCK_SIZE])
        parent = NULL_BLOCK
        for index in range(num_blocks):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            if moved_to[block] == 0:
                twin = find_twin(source, destination, group, rows, row, index, parent)
                moved_to[block] = NEW_PLACE if twin == NULL_BLOCK else -twin
                num_distinct += 1
                if twin == NULL_BLOCK:
                    num_taken += 1
                elif not claimed[twin]:
                    claimed[twin] = 1
                    num_taken += destination.records[twin, QUEUE] == FREE
            parent = NULL_BLOCK if moved_to[block] == NEW_PLACE else -moved_to[block]
    return num_taken, num_distinct


@compiled
def find_twin(
    source: PoolArrays,
    destination: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    index: int,
    parent: int,
) -> int:
    """Find the settled content of a row's full block on the other side; the null block if there is none.

    ``parent`` is the twin of the block before it, needed in a group that keeps whole prefixes.
    """
    block = group.table[row, index]
    is_whole = index < num_findable(group, rows, row)
    if not is_whole or source.records[block, PENDING_STEP] > source.counts[SETTLED_STEP]:
        return NULL_BLOCK
    if group.parameters[KIND] == FULL and index > 0 and parent == NULL_BLOCK:
        return NULL_BLOCK
    name = group.parameters[NAME_IN_POOL]
    twin = find(destination, name, source.digests[block])
    if twin == NULL_BLOCK or destination.records[twin, PENDING_STEP] > destination.counts[SETTLED_STEP]:
        return NULL_BLOCK
    if group.parameters[KIND] == FULL and not is_child_of(destination, name, twin, parent):
        return NULL_BLOCK
    difference = destination.records[twin, EXTRA] ^ source.records[block, EXTRA]
    for slot in range(group.parameters[BLOCK_SIZE]):
        difference |= destination.tokens[twin, slot] ^ source.tokens[block, slot]
    if not are_alike(source, block, destination, twin):
        return NULL_BLOCK
    return twin if difference == 0 else NULL_BLOCK


@compiled
def num_findable(group: GroupArrays, rows: Int32Array, row: int) -> int:
    """Count a row's leading full blocks that have digests and are computed or planned."""
    if rows[row, FROZEN]:
        return 0
    num_computed = rows[row, NUM_PLANNED] // group.parameters[BLOCK_SIZE]
    return int(min(num_computed, rows[row, group.parameters[AT] + NUM_DIGESTED]))


@compiled
def claim_twins(destination: PoolArrays, moved_to: Int32Array) -> None:
    """Take a reference to every twin that a survey has found."""
    for block in range(len(moved_to)):
        if NEW_PLACE < moved_to[block] < 0:
            reuse(destination, -moved_to[block])


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
    """Move the blocks of a batch of rows, after a survey of them and after their twins were claimed.

    Args:
        moved_to: int32 ``[source blocks]``, as :func:`survey` left it; becomes the new block of each block.
        moves: int32 ``[n, 2]``, ``(source, destination)`` of each move.

    Returns the number of moves.
    """
    num_moves = 0
    at = group.parameters[AT]
    for row in batch:
        num_blocks = blocks_for(rows[row, NUM_TOKENS], group.parameters[BLOCK_SIZE])
        charge_to_tenant_of_row(destination, rows, row)
        for index in range(num_blocks):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            if moved_to[block] == NEW_PLACE:
                moved_to[block] = move_block(source, destination, block)
                moves[num_moves, 0] = block
                moves[num_moves, 1] = moved_to[block]
                num_moves += 1
            elif moved_to[block] < 0:
                moved_to[block] = -moved_to[block]  # its first reference was taken when it was claimed
            else:
                add_references(destination.records, moved_to[block], 1)
        for index in range(rows[row, at + NUM_BLOCKS] - 1, -1, -1):
            block = group.table[row, index]
            if block != NULL_BLOCK:
                put_entry(group.table, row, index, moved_to[block] if index < num_blocks else NULL_BLOCK)
                release(source, block, rows[row, LAST_STEP])
        set_num_blocks(rows, row, at, num_blocks)
        clear_changes(rows, row, at)  # the device has no table of this row until it arrives again
    return num_moves


@compiled
def move_block(source: PoolArrays, destination: PoolArrays, block: int) -> int:
    """Allocate a block on the other side for a block's content, and hold both until the open step is over."""
    place = acquire(destination)
    become_copy(source.records, block, destination.records, place, source.counts[OPEN_STEP])
    copy_content(source, block, destination, place, source.tokens.shape[1])
    if len(source.digests):
        copy_digest(source, block, destination, place)
    note_copy(source, block, destination, place)
    return place


@compiled
def name_moved(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array) -> None:
    """Name the settled full blocks that rows brought to a host pool, so that they can be twins later."""
    for row in batch:
        parent = NULL_BLOCK
        parent_life = pool.records[NULL_BLOCK, LIFE]
        for index in range(num_findable(group, rows, row)):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                parent = NULL_BLOCK  # what comes after a gap has no parent here
                parent_life = pool.records[NULL_BLOCK, LIFE]
                continue
            if pool.records[block, PENDING_STEP] > pool.counts[SETTLED_STEP]:
                break
            carrier = block
            if not pool.records[block, NAME]:
                carrier = publish_block(pool, group, block, parent, parent_life)
            if carrier != block or not pool.records[block, NAME]:
                break  # the blocks after it could not be found by links
            parent = block
            parent_life = pool.records[block, LIFE]


@compiled
def arrive(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array) -> None:
    """Add swapped-in rows to the open step: uncomputed blocks become pending, and all are published anew."""
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    for row in batch:
        record = rows[row]
        planned = record[group.parameters[PLANNED]]
        for index in range(planned // block_size, record[at + NUM_BLOCKS]):
            if group.table[row, index] != NULL_BLOCK and planned < record[NUM_TOKENS]:
                set_pending(pool.records, group.table[row, index], pool.counts[OPEN_STEP])
        if group.parameters[CACHING]:
            publish_to(rows, row, at, 0)
            set_tail(rows, row, at, NULL_BLOCK, 0)
        note_change(rows, row, at, 0, record[at + NUM_BLOCKS])
