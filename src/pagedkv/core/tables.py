"""Block tables: how a sequence's entries come, move and go, for whole batches of rows at a time.

Owns the tables and the columns of :mod:`~pagedkv.core.rows` that count their entries. Decides nothing
about scarcity: callers ask :func:`count_growth` (a question, exact) and only then :func:`grow`.

A row of a table, here a sliding window with one sink block::

    logical   0      1     2     3      4      5      6      7
            [sink] [null][null][null][block][block][block][----]
                                     ^FIRST_BLOCK          ^NUM_BLOCKS
"""

from typing import Final

from pagedkv.core.blocks import (
    EXTRA,
    HOLD_STEP,
    LIFE,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    REF_COUNT,
    Int32Array,
    PoolArrays,
)
from pagedkv.core.compiled import compiled, inlined, unsigned
from pagedkv.core.pool import acquire, release
from pagedkv.core.rows import (
    AT,
    BLOCK_SIZE,
    CACHING,
    DIRTY_FROM,
    DIRTY_TO,
    FIRST_BLOCK,
    KIND,
    MARK,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PUBLISHED,
    NUM_SINK_BLOCKS,
    NUM_TOKENS,
    OCCUPIED,
    RECURRENT,
    RUNNING,
    SERIAL,
    SPAN,
    STATUS,
    TAIL,
    TAIL_LIFE,
    TOUCHED,
    VACANT,
    GroupArrays,
)
from pagedkv.core.rules import first_needed_token

COUNTED_COPY: Final = 2  # a bit of TOUCHED, set only while count_growth runs

__all__ = [
    "clear_rows",
    "count_growth",
    "first_unfit_growth",
    "first_unfit_row",
    "grow",
    "release_rows",
    "seat",
    "slide",
]


@compiled
def first_unfit_row(rows: Int32Array, batch: Int32Array, status: int, mark: int) -> int:
    """Name the first place in a batch whose row is foreign, vacant, repeated, or not of that status; or -1.

    ``mark`` is a number that no batch has used before.
    """
    for place in range(len(batch)):
        row = batch[place]
        if row < 0 or row >= len(rows) or rows[row, MARK] == mark:
            return place
        if rows[row, STATUS] == VACANT or (status != OCCUPIED and rows[row, STATUS] != status):
            return place
        rows[row, MARK] = mark
    return -1


@inlined
def blocks_for(num_tokens: int, block_size: int) -> int:
    """Count the blocks that hold so many tokens."""
    return (num_tokens + block_size - 1) // block_size


@inlined
def writes_shared_block(pool: PoolArrays, group: GroupArrays, row: int, num_tokens: int) -> bool:
    """Tell whether the next token goes into a partly filled block that others hold too."""
    block_size = group.parameters[BLOCK_SIZE]
    if num_tokens % block_size == 0:
        return False
    return bool(pool.records[group.table[row, num_tokens // block_size], REF_COUNT] > 1)


@compiled
def count_growth(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, growth: Int32Array, num_lookahead: int
) -> int:
    """Count exactly the blocks that :func:`grow` would take, copies on write included.

    A question: reference counts are lowered to see which of several sharers copies, and put back.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    reserve = 0 if group.parameters[KIND] == RECURRENT else num_lookahead
    num_needed = 0
    for place in range(len(batch)):
        row = batch[place]
        num_tokens = rows[row, NUM_TOKENS]
        if growth[place] > 0 and writes_shared_block(pool, group, row, num_tokens):
            pool.records[group.table[row, num_tokens // block_size], REF_COUNT] -= 1
            rows[row, TOUCHED] |= COUNTED_COPY
            num_needed += 1
        wanted = blocks_for(num_tokens + growth[place] + reserve, block_size)
        num_needed += max(0, wanted - rows[row, at + NUM_BLOCKS])
    for row in batch:
        if rows[row, TOUCHED] & COUNTED_COPY:
            rows[row, TOUCHED] &= ~COUNTED_COPY
            pool.records[group.table[row, rows[row, NUM_TOKENS] // block_size], REF_COUNT] += 1
    return num_needed


@compiled
def grow(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    growth: Int32Array,
    tokens: Int32Array,
    num_lookahead: int,
    copies: Int32Array,
    num_draft: int,
    is_last_group: int,
) -> tuple[int, int]:
    """Give each row of a batch the blocks for its next tokens and write the tokens down.

    The free blocks suffice: the caller has asked.

    Args:
        copies: int32 ``[rows, 2]``; ``copies[i]`` becomes (source, destination) of a copy on write.
        num_draft: trailing tokens of each row that are guesses; all before become certain.
        is_last_group: 1 for the last group, with which the new tokens are counted; else 0.

    Returns the number of copies on write, and 1 if a full block of certain tokens waits for its digest, else 0.
    """
    reserve = 0 if group.parameters[KIND] == RECURRENT else num_lookahead
    block_size = group.parameters[BLOCK_SIZE]
    caching = group.parameters[CACHING]
    open_step = pool.counts[OPEN_STEP]
    # Unsigned indices: signed ones are guarded against being negative, 9.1 us instead of 6.7 for 1,024 rows.
    num_blocks_column = unsigned(group.parameters[AT] + NUM_BLOCKS)
    num_digested_column = unsigned(group.parameters[AT] + NUM_DIGESTED)
    num_copies = 0
    next_token = 0
    any_full = 0
    for place in range(len(batch)):
        row = unsigned(batch[place])
        count = growth[place]
        start = rows[row, NUM_TOKENS]
        entry = unsigned(start // block_size)
        offset = start % block_size
        if count > 0 and offset > 0 and pool.records[unsigned(group.table[row, entry]), REF_COUNT] > 1:
            copy_on_write(pool, group, rows, row, entry, copies, num_copies)
            num_copies += 1
        if start + count + reserve > rows[row, num_blocks_column] * block_size:
            extend_row(pool, group, rows, row, start + count + reserve)
        if count == 1:  # the general loop takes 2 us more for 1,024 rows
            block = unsigned(group.table[row, entry])
            pool.records[block, PENDING_STEP] = open_step
            if caching:
                pool.tokens[block, unsigned(offset)] = tokens[next_token]
        else:
            write_tokens(pool, group, row, start // block_size, offset, tokens, next_token, count)
        next_token += count
        if count > 0:
            num_accepted = start + count - num_draft
            if num_accepted >= (rows[row, num_digested_column] + 1) * block_size:
                any_full = 1
            if is_last_group:
                rows[row, NUM_TOKENS] = start + count
                rows[row, NUM_ACCEPTED] = num_accepted
                rows[row, TOUCHED] = 1
    return num_copies, any_full


@compiled
def write_tokens(
    pool: PoolArrays,
    group: GroupArrays,
    row: int,
    index: int,
    offset: int,
    tokens: Int32Array,
    first_token: int,
    num_tokens: int,
) -> None:
    """Note a run of tokens in a row's blocks, from slot ``offset`` of logical block ``index`` on.

    It is content that the open step will compute.
    """
    block_size = group.parameters[BLOCK_SIZE]
    open_step = pool.counts[OPEN_STEP]
    next_token = first_token
    end = first_token + num_tokens
    while next_token < end:
        block = unsigned(group.table[row, index])
        pool.records[block, PENDING_STEP] = open_step
        num_written = min(end - next_token, block_size - offset)
        if group.parameters[CACHING]:
            for slot in range(num_written):
                pool.tokens[block, offset + slot] = tokens[next_token + slot]
        next_token += num_written
        index += 1
        offset = 0


@compiled
def extend_row(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, num_slots: int) -> None:
    """Give a row new blocks for so many slots in all."""
    at = group.parameters[AT]
    held = rows[row, at + NUM_BLOCKS]
    wanted = blocks_for(num_slots, group.parameters[BLOCK_SIZE])
    for index in range(held, wanted):
        group.table[row, index] = acquire(pool)
    rows[row, at + NUM_BLOCKS] = wanted
    note_change(rows, row, at, held, wanted)


@compiled
def copy_on_write(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, entry: int, copies: Int32Array, num_copies: int
) -> None:
    """Replace a row's reference to a shared, partly filled block by a copy; the open step's plan touches both."""
    index = int(entry)
    shared = group.table[row, index]
    own = acquire(pool)
    pool.records[own, EXTRA] = pool.records[shared, EXTRA]
    pool.records[own, PENDING_STEP] = pool.records[shared, PENDING_STEP]
    for slot in range(pool.tokens.shape[1]):
        pool.tokens[own, slot] = pool.tokens[shared, slot]
    pool.records[own, HOLD_STEP] = pool.counts[OPEN_STEP]
    pool.records[shared, HOLD_STEP] = pool.counts[OPEN_STEP]
    release(pool, shared)
    group.table[row, index] = own
    note_change(rows, row, group.parameters[AT], index, index + 1)
    copies[num_copies, 0] = shared
    copies[num_copies, 1] = own


@inlined
def note_change(rows: Int32Array, row: int, at: int, start: int, stop: int) -> None:
    """Widen the range of table entries that the next plan tells the device."""
    if rows[row, at + DIRTY_TO] == 0:
        rows[row, at + DIRTY_FROM] = start
        rows[row, at + DIRTY_TO] = stop
    else:
        rows[row, at + DIRTY_FROM] = min(rows[row, at + DIRTY_FROM], start)
        rows[row, at + DIRTY_TO] = max(rows[row, at + DIRTY_TO], stop)
    rows[row, TOUCHED] = 1


@compiled
def first_unfit_growth(
    rows: Int32Array, batch: Int32Array, growth: Int32Array, num_draft: int, most_tokens: int, mark: int
) -> int:
    """Name the first place in a batch whose row cannot grow, or -1.

    It is not running (see :func:`first_unfit_row`), would exceed ``most_tokens``, or gets fewer tokens than drafts.
    """
    for place in range(len(batch)):
        row = batch[place]
        if row < 0 or row >= len(rows) or rows[row, STATUS] != RUNNING or rows[row, MARK] == mark:
            return place
        rows[row, MARK] = mark
        if growth[place] < num_draft or rows[row, NUM_TOKENS] + growth[place] > most_tokens:
            return place
    return -1


@compiled
def clear_rows(rows: Int32Array, batch: Int32Array, status: int) -> None:
    """Make the records of rows those of new, empty sequences."""
    for row in batch:
        serial = rows[row, SERIAL]
        mark = rows[row, MARK]
        for column in range(rows.shape[1]):
            rows[row, column] = 0
        rows[row, STATUS] = status
        rows[row, SERIAL] = serial + 1
        rows[row, MARK] = mark


@compiled
def seat(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    hits: Int32Array,
    tokens: Int32Array,
    num_lookahead: int,
) -> None:
    """Fill a new row: the blocks of its prefix hit (referenced already), then new ones for the rest."""
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    reserve = 0 if group.parameters[KIND] == RECURRENT else num_lookahead
    num_hits = len(hits)
    num_hit_tokens = num_hits * block_size
    for index in range(num_hits):
        group.table[row, index] = hits[index]
    wanted = blocks_for(len(tokens) + reserve, block_size)
    for index in range(num_hits, wanted):
        group.table[row, index] = acquire(pool)
    write_tokens(pool, group, row, num_hits, 0, tokens, num_hit_tokens, len(tokens) - num_hit_tokens)
    rows[row, at + NUM_BLOCKS] = wanted
    first = num_hits
    while first > 0 and hits[first - 1] != NULL_BLOCK:
        first -= 1
    rows[row, at + FIRST_BLOCK] = first
    rows[row, at + NUM_DIGESTED] = num_hits
    rows[row, at + NUM_PUBLISHED] = num_hits
    if num_hits > 0:
        rows[row, at + TAIL] = hits[num_hits - 1]
        rows[row, at + TAIL_LIFE] = pool.records[hits[num_hits - 1], LIFE]
    note_change(rows, row, at, 0, wanted)


@compiled
def slide(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, computed: Int32Array) -> None:
    """Release what the rows of a batch no longer need.

    ``computed[i]`` tokens of ``batch[i]`` are acknowledged. What a step in flight still reads stays, since
    such a step begins at or after that position; drafts do not count, as they may be rolled back.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(batch)):
        row = batch[place]
        query = min(computed[place], rows[row, NUM_ACCEPTED])
        first_token = first_needed_token(group.parameters[KIND], group.parameters[SPAN], query)
        stop = min(first_token // block_size, rows[row, at + NUM_BLOCKS])
        first = rows[row, at + FIRST_BLOCK]
        if stop <= first:
            continue
        for index in range(stop - 1, max(first, group.parameters[NUM_SINK_BLOCKS]) - 1, -1):
            block = group.table[row, index]
            if block != NULL_BLOCK:
                group.table[row, index] = NULL_BLOCK
                release(pool, block)
        rows[row, at + FIRST_BLOCK] = stop


@compiled
def release_rows(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array) -> None:
    """Give back every block of a batch of rows, the tail of each sequence first."""
    at = group.parameters[AT]
    for row in batch:
        for index in range(rows[row, at + NUM_BLOCKS] - 1, -1, -1):
            if group.table[row, index] != NULL_BLOCK:
                release(pool, group.table[row, index])
                group.table[row, index] = NULL_BLOCK
        rows[row, at + NUM_BLOCKS] = 0
