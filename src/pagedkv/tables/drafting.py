"""Draft states: a recurrent state for each position that is not accepted yet, and how an accepted one becomes current.

A recurrent group's table has one block for the current state, which steps advance in place. A state that may be refused
must not be advanced in place. So the state of each position from ``NUM_ACCEPTED`` on is in a block of its own, in the
row's slot ``position % num_draft_states`` of a second table. There are never more open positions than slots, so that
each has its own slot, and keeps it when the tokens after refused ones move down::

    position         ... 21 | 22   23   24  |                 accepted: 22 tokens; three are not
    table       [ state 21 ]                                  of the interval
    slots 0..3               [ 22 % 4 = 2 ][ 23 % 4 = 3 ][ 24 % 4 = 0 ]

    two of three are accepted: the blocks of state 21 and of slot 3 are exchanged
    table       [ state 23 ]
    slots 0..3               [ free: 2 ][ free: 3 ][ 0 ]

If an interval ends in between, the block of its checkpoint is exchanged as well. States are not copied, neither here
nor on the device. The record of an interval's block (tokens, extra keys, epochs, the step that writes it) is copied to
the block that replaces it.

In a second table's columns (:mod:`~pagedkv.tables.rows`), ``NUM_BLOCKS`` counts the slots that have a block, not
necessarily the first ones, and ``DIRTY_FROM`` and ``DIRTY_TO`` are as in other tables. A block in a slot has no name,
and only the row writes it; if a ticket refers to it, or to the block it is exchanged with, the slot is released. A slot
without an open position may keep its block, for another slot.
"""

from pagedkv.blocks.block_record import note_content, set_pending
from pagedkv.blocks.blocks import NAME, NULL_BLOCK, PENDING_STEP, REF_COUNT, PoolArrays
from pagedkv.blocks.contents import copy_content
from pagedkv.blocks.life_cycle import acquire, release
from pagedkv.blocks.moments import note_copy
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.batches import charge_to_tenant_of_row
from pagedkv.tables.row_record import add_blocks, clear_changes, note_change, put_entry
from pagedkv.tables.rows import (
    AT,
    BLOCK_SIZE,
    CACHING,
    LAST_STEP,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DRAFT_STATES,
    NUM_TOKENS,
    PLANNED,
    GroupArrays,
)

__all__ = ["count_slots", "give_slots_back", "make_current", "most_open", "take_slots"]


@inlined
def is_own(pool: PoolArrays, block: int) -> bool:
    """Whether a block belongs to the row alone, so that it may be written again."""
    return bool(pool.records[block, REF_COUNT] == 1 and not pool.records[block, NAME])


@inlined
def last_in_interval(group: GroupArrays, index: int, stop: int) -> int:
    """Return the last position below ``stop`` in logical block ``index``."""
    return int(min((index + 1) * group.parameters[BLOCK_SIZE], stop)) - 1


@compiled
def block_of_slot(
    pool: PoolArrays, group: GroupArrays, drafts: GroupArrays, rows: Int32Array, row: int, accepted: int, slot: int
) -> int:
    """Return the block of a slot once ``accepted`` tokens of a row are accepted; null if it has none of its own."""
    block = drafts.table[row, slot]
    first, stop = rows[row, NUM_ACCEPTED], min(accepted, rows[row, group.parameters[PLANNED]])
    if stop > first:
        block_size = group.parameters[BLOCK_SIZE]
        for index in range(first // block_size, (stop - 1) // block_size + 1):
            if last_in_interval(group, index, stop) % group.parameters[NUM_DRAFT_STATES] == slot:
                block = group.table[row, index]
    return int(block) if is_own(pool, block) else NULL_BLOCK


@compiled
def count_slots(
    pool: PoolArrays,
    group: GroupArrays,
    drafts: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    growth: Int32Array,
    num_draft: int,
    is_unknown: bool,  # noqa: FBT001 - compiled loops take no keywords
) -> int:
    """Count the blocks that the slots of growing rows need and do not have. Changes nothing.

    Args:
        drafts: the group's second table.
        growth: int32 ``[rows]``, new tokens of each row: unknown ones, or known ones of which the last ``num_draft``
            are drafts. Known ones accept all tokens before the drafts.
    """
    num_slots = group.parameters[NUM_DRAFT_STATES]
    num_lacking = 0
    for place in range(len(batch)):
        if growth[place] == 0:
            continue
        row = batch[place]
        end = rows[row, NUM_TOKENS] + growth[place]
        accepted = rows[row, NUM_ACCEPTED] if is_unknown else rows[row, NUM_TOKENS]
        first = accepted if is_unknown else end - num_draft
        num_empty = num_idle = 0
        for slot in range(num_slots):
            has_block = block_of_slot(pool, group, drafts, rows, row, accepted, slot) != NULL_BLOCK
            if is_needed(slot, first, end, num_slots):
                num_empty += not has_block
            else:
                num_idle += has_block
        num_lacking += max(0, num_empty - num_idle)
    return num_lacking


@compiled
def take_slots(
    pool: PoolArrays,
    drafts: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    growth: Int32Array,
    num_draft: int,
    is_unknown: bool,  # noqa: FBT001 - compiled loops take no keywords
) -> None:
    """Give growing rows the blocks that their slots need, after the states that they accept became current."""
    num_slots, at = drafts.parameters[NUM_DRAFT_STATES], drafts.parameters[AT]
    for place in range(len(batch)):
        if growth[place] == 0:
            continue
        row = batch[place]
        charge_to_tenant_of_row(pool, rows, row)
        end = rows[row, NUM_TOKENS] + growth[place]
        first = rows[row, NUM_ACCEPTED] if is_unknown else end - num_draft
        for position in range(first, end):
            slot = position % num_slots
            block = drafts.table[row, slot]
            if block != NULL_BLOCK and is_own(pool, block):
                continue
            if block != NULL_BLOCK:
                empty_slot(pool, drafts, rows, row, slot)
            block = take_idle(pool, drafts, rows, row, first, end)
            if block == NULL_BLOCK:
                block = acquire(pool)
                note_content(pool.records, block)  # a step writes all of it before it is read
            put_entry(drafts.table, row, slot, block)
            add_blocks(rows, row, at, 1)
            note_change(rows, row, at, slot, slot + 1)


@inlined
def is_needed(slot: int, first: int, end: int, num_slots: int) -> bool:
    """Whether a position in ``[first, end)`` has a slot."""
    return bool((slot - first) % num_slots < end - first)


@compiled
def take_idle(pool: PoolArrays, drafts: GroupArrays, rows: Int32Array, row: int, first: int, end: int) -> int:
    """Take the block of a slot without a position in ``[first, end)``; the null block if there is none."""
    num_slots, at = drafts.parameters[NUM_DRAFT_STATES], drafts.parameters[AT]
    if rows[row, at + NUM_BLOCKS] == 0:
        return NULL_BLOCK
    for slot in range(num_slots):
        block = drafts.table[row, slot]
        if block != NULL_BLOCK and is_own(pool, block) and not is_needed(slot, first, end, num_slots):
            put_entry(drafts.table, row, slot, NULL_BLOCK)
            add_blocks(rows, row, at, -1)
            return int(block)
    return NULL_BLOCK


@inlined
def empty_slot(pool: PoolArrays, drafts: GroupArrays, rows: Int32Array, row: int, slot: int) -> None:
    """Release the block of a slot."""
    release(pool, drafts.table[row, slot], rows[row, LAST_STEP])
    put_entry(drafts.table, row, slot, NULL_BLOCK)
    add_blocks(rows, row, drafts.parameters[AT], -1)


@compiled
def make_current(
    pool: PoolArrays,
    group: GroupArrays,
    drafts: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    before: Int32Array,
    accepted: Int32Array,
) -> None:
    """Exchange the states of accepted positions with those in the table, for the last position of each interval.

    Args:
        before, accepted: int32 ``[rows]``, how many tokens of each row were accepted, and are now. Positions that are
            not planned have no state yet: the next step computes them into the table.
    """
    block_size, num_slots = group.parameters[BLOCK_SIZE], group.parameters[NUM_DRAFT_STATES]
    at = drafts.parameters[AT]
    for place in range(len(batch)):
        row, first = batch[place], before[place]
        stop = min(accepted[place], rows[row, group.parameters[PLANNED]])
        if stop <= first:
            continue
        for index in range(first // block_size, (stop - 1) // block_size + 1):
            slot = last_in_interval(group, index, stop) % num_slots
            current, state = group.table[row, index], drafts.table[row, slot]
            note_as(pool, group, rows, row, index, current, state)
            put_entry(group.table, row, index, state)
            note_change(rows, row, group.parameters[AT], index, index + 1)
            put_entry(drafts.table, row, slot, current)
            note_content(pool.records, current)
            if is_own(pool, current):
                note_change(rows, row, at, slot, slot + 1)
            else:
                empty_slot(pool, drafts, rows, row, slot)


@inlined
def note_as(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int, current: int, state: int
) -> None:
    """Copy the record of a block to the one that replaces it."""
    set_pending(pool.records, state, pool.records[current, PENDING_STEP])
    note_copy(pool, current, pool, state)
    num_tokens = 0
    if group.parameters[CACHING]:
        block_size = group.parameters[BLOCK_SIZE]
        num_tokens = min(block_size, rows[row, NUM_TOKENS] - index * block_size)
    copy_content(pool, current, pool, state, num_tokens)


@compiled
def give_slots_back(
    pool: PoolArrays,
    drafts: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    is_leaving: bool,  # noqa: FBT001 - compiled loops take no keywords
) -> None:
    """Release the slots of a batch of rows that no position needs; for rows that leave, all of them."""
    num_slots, at = drafts.parameters[NUM_DRAFT_STATES], drafts.parameters[AT]
    for row in batch:
        if rows[row, at + NUM_BLOCKS] == 0:
            continue
        first, end = rows[row, NUM_ACCEPTED], rows[row, NUM_TOKENS]
        for slot in range(num_slots - 1, -1, -1):
            stays = is_needed(slot, first, end, num_slots) and not is_leaving
            if drafts.table[row, slot] != NULL_BLOCK and not stays:
                empty_slot(pool, drafts, rows, row, slot)
        if is_leaving:
            clear_changes(rows, row, at)


@compiled
def most_open(rows: Int32Array, batch: Int32Array, growth: Int32Array) -> int:
    """Find the row of a batch that would have the most open tokens if it grew by unknown ones; return its place."""
    most = place_of_most = 0
    for place in range(len(batch)):
        row = batch[place]
        num_open = rows[row, NUM_TOKENS] - rows[row, NUM_ACCEPTED] + growth[place]
        if growth[place] > 0 and num_open > most:
            most, place_of_most = num_open, place
    return place_of_most
