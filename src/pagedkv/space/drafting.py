"""Draft states across groups: how many tokens may be open, the blocks of their states, and which become current.

A token is *open* while it is not accepted: a draft, an unknown token, or a filled one whose step is not acknowledged.
A recurrent state without draft states cannot be rolled back, so that some operations are refused.

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

In a second table's columns (:mod:`~pagedkv.space.rows`), ``NUM_BLOCKS`` counts the slots that have a block, not
necessarily the first ones, and ``DIRTY_FROM`` and ``DIRTY_TO`` are as in other tables. A block in a slot has no name,
and only the row writes it; if a ticket refers to it, or to the block it is exchanged with, the slot is released. A slot
without an open position may keep its block, for another slot.
"""

import numpy as np

from pagedkv.blocks.digests import copy_content
from pagedkv.blocks.epochs import copy_epochs
from pagedkv.blocks.life_cycle import acquire, release
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import (
    IN_USE,
    NAME,
    NULL_BLOCK,
    PENDING_STEP,
    QUEUE,
    REF_COUNT,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import SequenceError, StepError, TokenError
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    CACHING,
    LAST_STEP,
    LOST,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DRAFT_STATES,
    NUM_PLANNED,
    NUM_TOKENS,
    PLANNED,
    RUNNING,
    STATUS,
    VACANT,
    GroupArrays,
    charge_to_tenant_of_row,
    clear_changes,
    note_change,
)
from pagedkv.space.state import DraftTable, SpaceState


def require_drafts(state: SpaceState, num_draft: int) -> None:
    """Raise TokenError for more drafts than a recurrent state can roll back."""
    if num_draft > state.num_draft_states:
        raise TokenError(
            f"num_draft = {num_draft}, but a recurrent state cannot be rolled back by more than "
            f"{state.num_draft_states} tokens: give every such group more num_draft_states"
        )


def require_unknown(state: SpaceState, batch: Int32Array, counts: Int32Array) -> None:
    """Raise TokenError for more unknown tokens than a recurrent state can roll back."""
    if state.num_draft_states:
        _require_slots(state, batch, counts)
    else:
        _require_no_rollback(state, batch, counts)


def _require_slots(state: SpaceState, batch: Int32Array, counts: Int32Array) -> None:
    """Raise TokenError if unknown tokens would give rows more open tokens than a group has draft states."""
    place = most_open(state.rows, batch, counts)
    row = int(batch[place]) if len(batch) else 0
    num_open = int(state.rows[row, NUM_TOKENS] - state.rows[row, NUM_ACCEPTED])
    if len(batch) and counts[place] and num_open + counts[place] > state.num_draft_states:
        raise TokenError(
            f"row {row} cannot take {counts[place]} unknown tokens: {num_open} are not accepted yet, and there is "
            f"a state for {state.num_draft_states} at one time; fill some in, acknowledge their step, or give "
            "recurrent groups more num_draft_states"
        )


def _require_no_rollback(state: SpaceState, batch: Int32Array, counts: Int32Array) -> None:
    """Raise TokenError unless each row takes one unknown token, with all before it planned."""
    planned, num_tokens = (state.rows[batch, column] for column in (NUM_PLANNED, NUM_TOKENS))
    unfit = (counts > 1) | ((counts > 0) & (planned < num_tokens))
    if unfit.any():
        place = int(unfit.argmax())
        raise TokenError(
            f"row {batch[place]} cannot take {counts[place]} unknown tokens behind {num_tokens[place]}, of which "
            f"{planned[place]} are planned: a group is a recurrent state, which cannot be rolled back; append "
            "one a step, once what is before it is planned, or give it num_draft_states"
        )


def require_forkable(state: SpaceState, parent: int) -> None:
    """Raise SequenceError if a row to be forked has open tokens: their draft states cannot be shared."""
    accepted, num_tokens = (int(state.rows[parent, column]) for column in (NUM_ACCEPTED, NUM_TOKENS))
    if accepted < num_tokens:
        raise SequenceError(
            f"row {parent} cannot be forked: {num_tokens - accepted} of its {num_tokens} tokens are not accepted "
            f"yet, and their states are its own; fork it at {accepted}, or accept them first"
        )


def require_declarable(state: SpaceState, batch: Int32Array) -> None:
    """Raise StepError if rows to be declared computed have drafts, or planned tokens that may still be refused."""
    columns = NUM_ACCEPTED, NUM_TOKENS, NUM_PLANNED
    accepted, num_tokens, planned = (state.rows[batch, column] for column in columns)
    unfit = (planned > accepted) | ((accepted < num_tokens) & (state.num_known[batch] == 0))
    if unfit.any():
        place = int(unfit.argmax())
        raise StepError(
            f"row {batch[place]} cannot be declared computed: {num_tokens[place] - accepted[place]} of its "
            f"{num_tokens[place]} tokens are not accepted yet; accept them, or roll it back, first"
        )


def why_drafts_stay(state: SpaceState, batch: Int32Array) -> str | None:
    """Return the sentence that refuses to swap out rows with open tokens, whose states cannot leave; else None."""
    if not (state.rows[batch, NUM_ACCEPTED] < state.rows[batch, NUM_TOKENS]).any():
        return None
    return (
        f"rows {batch.tolist()} have tokens that are not accepted, and a state for each: accept them, or roll the "
        "rows back, and acknowledge their steps first"
    )


# What is taken and given back


def num_slots_lacking(
    state: SpaceState, drafts: DraftTable, batch: Int32Array, counts: Int32Array, num_draft: int, *, is_unknown: bool
) -> int:
    """Count the blocks that the draft states of growing rows still need in one table."""
    pool, group, rows = drafts.group.view
    return state.loops[count_slots](pool, group, drafts.arrays, rows, batch, counts, num_draft, is_unknown)


def grow_slots(state: SpaceState, batch: Int32Array, counts: Int32Array, num_draft: int, *, is_unknown: bool) -> None:
    """Make the draft states that growing rows accept current; give each unaccepted token a block."""
    rows = state.rows
    grown = batch[counts > 0]
    if not is_unknown:
        accept_states(state, grown, rows[grown, NUM_ACCEPTED], rows[grown, NUM_TOKENS])
    for drafts in state.draft_tables:
        state.loops[take_slots](drafts.pool.arrays, drafts.arrays, rows, batch, counts, num_draft, is_unknown)


def accept_states(state: SpaceState, batch: Int32Array, before: Int32Array, accepted: Int32Array) -> None:
    """Make the draft states of newly accepted tokens current: ``before`` were accepted, ``accepted`` are now."""
    for drafts in state.draft_tables:
        pool, group, rows = drafts.group.view
        state.loops[make_current](pool, group, drafts.arrays, rows, batch, before, accepted)


def free_slots(state: SpaceState, batch: Int32Array, *, is_leaving: bool) -> None:
    """Free the blocks of draft states without an open token; of rows that leave the device, all."""
    for drafts in state.draft_tables:
        state.loops[give_slots_back](drafts.pool.arrays, drafts.arrays, state.rows, batch, is_leaving)


# Auditing


def check_drafts(state: SpaceState) -> None:
    """Every open token of a running row has a slot with a block of its own; rows off the device have no slots."""
    rows = state.rows
    for drafts in state.draft_tables:
        at, num_slots = (int(drafts.arrays.parameters[column]) for column in (AT, NUM_DRAFT_STATES))
        records, table = drafts.pool.arrays.records, drafts.arrays.table
        assert not table[:, num_slots:].any(), f"table {drafts.index}: a slot that no position has"
        assert (rows[:, at + NUM_BLOCKS] == (table != NULL_BLOCK).sum(axis=1)).all(), (
            f"table {drafts.index}: slots with a block are miscounted"
        )
        blocks = table[table != NULL_BLOCK]
        assert not records[blocks, NAME].any(), f"table {drafts.index}: a draft state can be found"
        assert len(set(blocks.tolist())) == len(blocks), f"table {drafts.index}: a draft state has two slots"
        for row in np.flatnonzero(rows[:, STATUS] != VACANT).tolist():
            where = f"table {drafts.index}, row {row}"
            status, accepted, num_tokens = rows[row, [STATUS, NUM_ACCEPTED, NUM_TOKENS]].tolist()
            assert 0 <= num_tokens - accepted <= num_slots or status == LOST, f"{where}: more open tokens than slots"
            assert status in {RUNNING, LOST} or not table[row].any(), f"{where}: draft states, and not on the device"
            is_lacking = any(table[row, place % num_slots] == NULL_BLOCK for place in range(accepted, num_tokens))
            assert not is_lacking or status != RUNNING, f"{where}: an open token has no slot"


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


@takes(Like.POOL, Like.GROUP, Like.GROUP, Like.ROWS, Like.IDS, Like.IDS, Like.NUMBER, Like.FLAG)
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


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.IDS, Like.IDS, Like.NUMBER, Like.FLAG)
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
                pool.records[block, QUEUE] = IN_USE  # a step writes all of it before it is read
            drafts.table[row, slot] = block
            rows[row, at + NUM_BLOCKS] += 1
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
            drafts.table[row, slot] = NULL_BLOCK
            rows[row, at + NUM_BLOCKS] += -1
            return int(block)
    return NULL_BLOCK


@inlined
def empty_slot(pool: PoolArrays, drafts: GroupArrays, rows: Int32Array, row: int, slot: int) -> None:
    """Release the block of a slot."""
    release(pool, drafts.table[row, slot], rows[row, LAST_STEP])
    drafts.table[row, slot] = NULL_BLOCK
    rows[row, drafts.parameters[AT] + NUM_BLOCKS] += -1


@takes(Like.POOL, Like.GROUP, Like.GROUP, Like.ROWS, Like.IDS, Like.IDS, Like.IDS)
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
            group.table[row, index] = state
            note_change(rows, row, group.parameters[AT], index, index + 1)
            drafts.table[row, slot] = current
            pool.records[current, QUEUE] = IN_USE
            if is_own(pool, current):
                note_change(rows, row, at, slot, slot + 1)
            else:
                empty_slot(pool, drafts, rows, row, slot)


@inlined
def note_as(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int, current: int, state: int
) -> None:
    """Copy the record of a block to the one that replaces it."""
    pool.records[state, PENDING_STEP] = pool.records[current, PENDING_STEP]
    if len(pool.epochs):
        copy_epochs(pool, current, pool, state)
    num_tokens = 0
    if group.parameters[CACHING]:
        block_size = group.parameters[BLOCK_SIZE]
        num_tokens = min(block_size, rows[row, NUM_TOKENS] - index * block_size)
    copy_content(pool, current, pool, state, num_tokens)


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.IDS, Like.FLAG)
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
