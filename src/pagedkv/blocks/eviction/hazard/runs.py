"""Runs of blocks, from their release until they are forgotten: their ring, their ghosts, their leaves, and LRU's part.

Runs are in the ring in the order of their release, without the blocks that were requested since; the oldest are
removed. So the alive blocks of the latest runs are LRU's stack (Mattson et al., "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970). LRU would have as many of them as there is room for, down to the
*horizon*. No second cache is simulated::

    runs by release    removed | beyond: LRU has evicted it | horizon: LRU has its head | within: LRU has it

Evicting a block within the horizon is a *departure*. Departures are paid for, block by block, from an account::

    a part of the pool, and of all blocks served + hits beyond the horizon - content within that was computed again

A departure is made only if the account covers its expected loss and that of earlier departures that may still return.
This is estimated from earlier departures that are over; at first, all are expected to be lost. Otherwise the block that
LRU would evict is evicted. So the policy follows LRU until it has learnt, and departs further when it gains. If its
estimates are wrong, the account is empty after losing hits on 1/400 of the blocks served plus 1/32 of the pool's size:
half a point of the hit rate once 13 times the pool's size was served.

Where a hit needs blocks of several groups (``IN_SETS``), a single missing block can lose a whole sequence, and this is
the expected loss at first. Blocks that were cached, but computed again because other blocks of the hit were missing,
count as lost with these.

The ghosts of evicted blocks are a table of fragments of digests, each with the run of its block. Only two loops access
it (:func:`leave_ghost`, :func:`take_ghost`). A matching fragment is probably the same content: it affects the value of
a block, and is never evidence for a hit. A digest leads to a row of eight ghosts, one cache line. A new ghost
overwrites one of a removed run, else the one of the oldest run.

Only leaves may be evicted: unreferenced cached blocks without unreferenced cached children. A block, in use or not,
counts its children that are free and cached. It is a leaf while it is free and has none. Where whole prefixes are kept,
a free block has no child in use; the blocks behind a window may be evicted even while their sequence continues. Only
the last cached block of a run can be a leaf, so drawing a leaf means drawing a run.

A leaf's row, in a dense array, contains copies of the fields of its run that determine its value. Runs of free blocks
do not change, so the copies stay right, and reading a drawn leaf touches one cache line instead of three. Every
operation is O(1).
"""

from typing import Final

from pagedkv.blocks.eviction.hazard.layout import (
    ABSENT,
    CLASSES,
    COUNTED_LIFE,
    FETCHED,
    FEWEST_REMEMBERED,
    FRAGMENT,
    GAP_CLASSES,
    GHOST_FIELDS,
    GHOST_RUN,
    GHOSTS_PER_BLOCK,
    GHOSTS_PER_ROW,
    HORIZON,
    HORIZON_CUT,
    INNER,
    LARGEST,
    LAST_SWEEP,
    LEAF,
    LEAF_CLASSES,
    LEAF_REFS,
    LEAF_TICKS,
    LENGTH_CLASSES,
    LOST_BEFORE,
    NEXT_RUN,
    NO_CLASSES,
    NUM_ALIVE,
    NUM_ASIDE,
    NUM_CHILDREN,
    NUM_DEPARTED,
    NUM_DOUBTFUL,
    NUM_GAINED,
    NUM_LEAVES,
    NUM_LOST,
    NUM_RECOMPUTED,
    NUM_REFS,
    NUM_REQUESTS,
    NUM_REUSED,
    OLDEST_RUN,
    OUTPUT_CLASSES,
    PENDING,
    PENDING_UNIT,
    PLACE,
    REFS,
    RUN,
    SERIAL_MASK,
    SUM_ALIVE,
    SUM_WITHIN,
    TICKS,
    USE_CLASSES,
    WORK,
    age_in_seconds,
    bit_length,
    output_of,
    pack,
    ticks_now,
    uses_of,
)
from pagedkv.blocks.record import IN_SETS, LIFE, NAME, NULL_BLOCK, NUM_FREE, NUM_LEASED, PARENT, PARENT_LIFE, PoolArrays
from pagedkv.compilation.compiled import compiled, inlined, prefetch
from pagedkv.contract.arrays import Int32Array, Int64Array

MOST_MOVED: Final = 64  # runs that the horizon passes at once
REFS_A_BLOCK: Final = 400  # a quarter of a percent of the blocks served may be lost,
BLOCKS_A_BLOCK: Final = 32  # and this part of the pool
BLOCKS_A_DOUBT: Final = 512  # departures assumed at first to have come back, as a part of the pool


@inlined
def lies_within(state: Int64Array, mark: int) -> bool:
    """Whether LRU has blocks of a run that is in the ring."""
    return bool(((state[NEXT_RUN] - mark) & SERIAL_MASK) <= state[NEXT_RUN] - state[HORIZON])


@compiled
def move_horizon(pool: PoolArrays) -> None:
    """Advance the horizon past the blocks that LRU has no room for, up to a limit on the runs at once."""
    state, runs = pool.eviction, pool.eviction_runs
    room = pool.counts[NUM_FREE] - pool.counts[NUM_LEASED]
    num_left = MOST_MOVED
    while num_left > 0 and state[HORIZON] < state[NEXT_RUN]:
        num_alive = runs[state[HORIZON] & (len(runs) - 1), NUM_ALIVE]
        if state[SUM_WITHIN] - num_alive < room:
            break
        if num_alive > 0:  # departures are assumed to be spread evenly among the alive blocks
            state[PENDING] -= state[PENDING] * num_alive // state[SUM_WITHIN]
        state[SUM_WITHIN] -= num_alive
        state[HORIZON] += 1
        state[HORIZON_CUT] = 0
        num_left -= 1
    state[HORIZON_CUT] = max(state[HORIZON_CUT], state[SUM_WITHIN] - room)


@inlined
def count_against_lru(runs: Int32Array, state: Int64Array, mark: int, num_requested: int) -> None:
    """Count the hits gained or lost against LRU by requested blocks of a run, which are still in it."""
    num_reused, num_recomputed = state[NUM_REUSED], state[NUM_RECOMPUTED]
    behind = (state[NEXT_RUN] - mark) & SERIAL_MASK
    to_horizon = state[NEXT_RUN] - state[HORIZON]
    num_of_lru = 0
    if behind < to_horizon:
        num_of_lru = num_requested
    elif behind == to_horizon:
        num_of_lru = max(0, min(num_requested, runs[mark & (len(runs) - 1), NUM_ALIVE] - state[HORIZON_CUT]))
        state[HORIZON_CUT] = max(0, state[HORIZON_CUT] - (num_requested - num_of_lru))
    if behind <= to_horizon:
        state[SUM_WITHIN] -= num_requested
    if num_reused > num_of_lru:
        state[NUM_GAINED] += num_reused - num_of_lru
    elif num_of_lru > num_reused:
        num_doubtful = min(num_recomputed, num_of_lru - num_reused)
        num_lost = num_of_lru - num_reused - num_doubtful
        state[NUM_DOUBTFUL] += num_doubtful
        state[NUM_LOST] += num_lost
        state[PENDING] = max(0, state[PENDING] - num_lost * PENDING_UNIT)


@inlined
def judge_doubtful(state: Int64Array) -> None:
    """Count doubtful blocks as lost, if any other block was lost since the last sequence ended."""
    if state[NUM_LOST] > state[LOST_BEFORE]:
        state[NUM_LOST] += state[NUM_DOUBTFUL]
    state[NUM_DOUBTFUL] = 0
    state[LOST_BEFORE] = state[NUM_LOST]


@inlined
def note_departure(state: Int64Array, mark: int) -> None:
    """Record the eviction of a block of a run; it is a departure if LRU has all of that run."""
    if ((state[NEXT_RUN] - mark) & SERIAL_MASK) < state[NEXT_RUN] - state[HORIZON]:
        state[NUM_DEPARTED] += 1
        state[PENDING] += PENDING_UNIT


@compiled
def num_departures(pool: PoolArrays) -> int:
    """Return how many blocks that LRU has may be evicted now."""
    state = pool.eviction
    if state[LAST_SWEEP] == 0:
        return 0  # nothing was learnt
    num_blocks = len(pool.eviction_blocks) - 1
    allowance = num_blocks / BLOCKS_A_BLOCK + state[NUM_REFS] / REFS_A_BLOCK
    account = allowance + state[NUM_GAINED] - state[NUM_LOST]
    num_pending = state[PENDING] / PENDING_UNIT
    num_over = max(0.0, state[NUM_DEPARTED] - num_pending)
    doubt = 1 + num_blocks / BLOCKS_A_DOUBT
    most = max(1, pool.counts[IN_SETS] * state[LARGEST])  # hits that one missing block can lose
    feared = min(most, (state[NUM_LOST] + doubt * most) / (num_over + doubt))
    return int(max(0.0, account / feared - num_pending))


NO_RUN: Final = -1


@inlined
def slot_of(state: Int64Array, num_slots: int, mark: int) -> int:
    """Find the place of a run in the ring by its serial number, negated or not; NO_RUN if it was removed."""
    serial = abs(mark)
    behind = (state[NEXT_RUN] - serial) & SERIAL_MASK
    if serial == 0 or behind == 0 or behind > state[NEXT_RUN] - state[OLDEST_RUN]:
        return NO_RUN
    return serial & (num_slots - 1)


@compiled
def leave_run(runs: Int32Array, state: Int64Array, mark: int) -> None:
    """Remove a block from the count of its run, if it is in one."""
    if mark > 0:
        slot = slot_of(state, len(runs), mark)
        if slot != NO_RUN:
            runs[slot, NUM_ALIVE] -= 1
            state[SUM_ALIVE] -= 1
            if lies_within(state, mark):
                state[SUM_WITHIN] -= 1


WORD: Final = 2**32 - 1
NAME_SPREAD: Final = 0x9E3779B1  # equal digests of different groups leave different ghosts


@inlined
def _row_of(pool: PoolArrays, first_word: int) -> int:
    """Return the row of a ghost, by the first word of its digest."""
    return int(first_word) * len(pool.eviction_table) >> 32


@inlined
def fetch_ghosts(pool: PoolArrays, first_word: int) -> None:
    """Prefetch the row of the ghost with this first word of its digest."""
    prefetch(pool.eviction_table, _row_of(pool, first_word), 0)


@inlined
def fetch_next(pool: PoolArrays) -> None:
    """Prefetch the row of ghosts of the parent of the block that was fetched for last."""
    block = pool.records[pool.eviction[FETCHED], PARENT]
    pool.eviction[FETCHED] = block
    fetch_ghosts(pool, pool.digests[block, 0])


@inlined
def _fragment_of(pool: PoolArrays, block: int) -> int:
    """Return the fragment of a block's digest and group that identifies its ghost."""
    return (int(pool.digests[block, 1]) + int(pool.records[block, NAME]) * NAME_SPREAD) & WORD


@compiled
def leave_ghost(pool: PoolArrays, block: int, mark: int) -> None:
    """Make the ghost of a block that is evicted, with the run that it is still in (0: none)."""
    table, runs, state = pool.eviction_table, pool.eviction_runs, pool.eviction
    if slot_of(state, len(runs), mark) == NO_RUN:
        return
    row = _row_of(pool, pool.digests[block, 0])
    chosen = 0
    furthest = -1
    for place in range(0, GHOSTS_PER_ROW * GHOST_FIELDS, GHOST_FIELDS):
        serial = int(table[row, place + GHOST_RUN])
        is_known = slot_of(state, len(runs), serial) != NO_RUN
        behind = (state[NEXT_RUN] - serial) & SERIAL_MASK if is_known else SERIAL_MASK
        if behind > furthest:
            furthest = behind
            chosen = place
    leave_run(runs, state, int(table[row, chosen + GHOST_RUN]))
    table[row, chosen + FRAGMENT] = _fragment_of(pool, block)
    table[row, chosen + GHOST_RUN] = mark


@compiled
def take_ghost(pool: PoolArrays, block: int) -> int:
    """Find the run of a newly named block's ghost, and remove the ghost. 0: there is none."""
    table, state = pool.eviction_table, pool.eviction
    row = _row_of(pool, pool.digests[block, 0])
    fragment = _fragment_of(pool, block)
    for place in range(0, GHOSTS_PER_ROW * GHOST_FIELDS, GHOST_FIELDS):
        serial = int(table[row, place + GHOST_RUN])
        if serial != 0 and int(table[row, place + FRAGMENT]) == fragment:
            table[row, place + GHOST_RUN] = 0
            return serial if slot_of(state, len(pool.eviction_runs), serial) != NO_RUN else 0
    return 0


MOST_FORGOTTEN: Final = 64  # runs removed at one request, besides one for each of its blocks
NO_GAP: Final = 0


@compiled
def begin_runs(pool: PoolArrays, blocks: Int32Array, num_outputs: int) -> int:
    """Cut the named blocks of a sequence that ends into runs, released now; return the number of these blocks.

    A block that was not requested since leaves its old run: this sequence then referred to it before that run began.
    """
    state, marks = pool.eviction, pool.eviction_blocks
    now = ticks_now(pool)
    num_named, num_new, last_known, last = _look_through(pool, blocks)
    output = min(bit_length(max(0, num_outputs)), OUTPUT_CLASSES - 1)
    length = min(bit_length(num_new) // 2, LENGTH_CLASSES - 1)
    gap, previous = NO_GAP, 0
    if last_known != NO_RUN:
        gap = _gap_class(age_in_seconds(pool.eviction_runs, last_known, now))
        previous = 1 + output_of(pool.eviction_runs[last_known, CLASSES])
    classes = -1
    slot = NO_RUN
    for block in blocks[::-1]:  # the tail is released first
        if block == NULL_BLOCK or not pool.records[block, NAME]:
            continue
        uses = _uses_now(pool, marks[block, RUN])
        wanted = pack(1 if block == last else 0, uses, output, length, gap, previous)
        if wanted != classes:
            classes = wanted
            slot = _begin_run(pool, classes, now)
        pool.eviction_runs[slot, NUM_ALIVE] += 1
        state[SUM_ALIVE] += 1
        state[SUM_WITHIN] += 1
        marks[block, RUN] = (state[NEXT_RUN] - 1) & SERIAL_MASK
    state[NUM_REFS] += num_named + state[NUM_ASIDE]
    state[NUM_ASIDE] = 0
    state[LARGEST] = max(state[LARGEST], num_named)
    state[NUM_REQUESTS] += 1
    return num_named


@compiled
def begin_run_aside(pool: PoolArrays, block: int) -> None:
    """Put a block that was released singly into the run of the one released singly before it, if the classes agree."""
    state, runs, marks = pool.eviction, pool.eviction_runs, pool.eviction_blocks
    now = ticks_now(pool)
    slot = slot_of(state, len(runs), marks[block, RUN])
    gap, previous = NO_GAP, 0
    if slot != NO_RUN:
        gap = _gap_class(age_in_seconds(runs, slot, now))
        previous = 1 + output_of(runs[slot, CLASSES])
    classes = pack(0, _uses_now(pool, marks[block, RUN]), 0, 0, gap, previous)
    slot = (state[NEXT_RUN] - 1) & (len(runs) - 1)
    is_latest = state[NEXT_RUN] > state[OLDEST_RUN] and runs[slot, CLASSES] == classes
    if not (is_latest and runs[slot, TICKS] == now & SERIAL_MASK and runs[slot, REFS] == state[NUM_REFS] & SERIAL_MASK):
        slot = _begin_run(pool, classes, now)
    state[NUM_ASIDE] += 1
    runs[slot, NUM_ALIVE] += 1
    state[SUM_ALIVE] += 1
    state[SUM_WITHIN] += 1
    marks[block, RUN] = (state[NEXT_RUN] - 1) & SERIAL_MASK


@inlined
def _look_through(pool: PoolArrays, blocks: Int32Array) -> tuple[int, int, int, int]:
    """Count named and new blocks; find the run of the last of the leading known blocks, and the last block."""
    num_named = 0
    num_new = 0
    last_known = NO_RUN
    last = NULL_BLOCK
    for block in blocks:
        if block == NULL_BLOCK or not pool.records[block, NAME]:
            continue
        num_named += 1
        last = block
        slot = slot_of(pool.eviction, len(pool.eviction_runs), pool.eviction_blocks[block, RUN])
        if slot == NO_RUN:
            num_new += 1
        elif num_new == 0:
            last_known = slot
    return num_named, num_new, last_known, last


@inlined
def _gap_class(age_s: float) -> int:
    return 1 + min(bit_length(int(2 * age_s)) // 2, GAP_CLASSES - 2)


@inlined
def _uses_now(pool: PoolArrays, mark: int) -> int:
    """Remove a block from its run, if it is still in it; return how often it was used before this sequence."""
    slot = slot_of(pool.eviction, len(pool.eviction_runs), mark)
    if slot == NO_RUN:
        return 0
    uses = uses_of(pool.eviction_runs[slot, CLASSES])
    if mark > 0:
        leave_run(pool.eviction_runs, pool.eviction, mark)
        return uses
    return min(uses + 1, USE_CLASSES - 1)


@inlined
def _begin_run(pool: PoolArrays, classes: int, now: int) -> int:
    """Begin a run, over the oldest if the ring is full; return its place."""
    state, runs = pool.eviction, pool.eviction_runs
    if state[NEXT_RUN] - state[OLDEST_RUN] == len(runs):
        _forget_one(pool)
    slot = state[NEXT_RUN] & (len(runs) - 1)
    state[NEXT_RUN] += 1
    runs[slot, TICKS] = now & SERIAL_MASK
    runs[slot, REFS] = state[NUM_REFS] & SERIAL_MASK
    runs[slot, NUM_ALIVE] = 0
    runs[slot, CLASSES] = classes
    return int(slot)


@inlined
def _forget_one(pool: PoolArrays) -> None:
    """Remove the oldest run: its blocks and ghosts have no run from now on."""
    state, runs = pool.eviction, pool.eviction_runs
    num_alive = runs[state[OLDEST_RUN] & (len(runs) - 1), NUM_ALIVE]
    state[SUM_ALIVE] -= num_alive
    if state[HORIZON] == state[OLDEST_RUN]:
        state[SUM_WITHIN] -= num_alive
        state[HORIZON] += 1
        state[HORIZON_CUT] = 0
    state[OLDEST_RUN] += 1


@compiled
def forget_oldest(pool: PoolArrays, num_blocks: int) -> None:
    """Remove the oldest runs while too many blocks are recorded; the last request's ``num_blocks`` come on top."""
    state = pool.eviction
    most = max(GHOSTS_PER_BLOCK * (len(pool.eviction_blocks) - 1), FEWEST_REMEMBERED) + num_blocks
    num_left = MOST_FORGOTTEN + num_blocks
    while state[SUM_ALIVE] > most and num_left > 0 and state[OLDEST_RUN] < state[NEXT_RUN]:
        _forget_one(pool)
        num_left -= 1
    state[WORK] += MOST_FORGOTTEN + num_blocks - num_left


@inlined
def live_parent(pool: PoolArrays, block: int) -> int:
    """Return the parent of a named block; the null block if the parent's content is gone or there is no parent."""
    parent = pool.records[block, PARENT]
    if pool.records[parent, LIFE] != pool.records[block, PARENT_LIFE]:
        return NULL_BLOCK
    return int(parent)


@inlined
def _num_children(pool: PoolArrays, block: int) -> int:
    """Count the free cached children of a block's current content."""
    marks = pool.eviction_blocks
    return int(marks[block, NUM_CHILDREN]) if marks[block, COUNTED_LIFE] == pool.records[block, LIFE] else 0


@inlined
def _count_children(pool: PoolArrays, block: int, num_children: int) -> None:
    pool.eviction_blocks[block, NUM_CHILDREN] = num_children
    pool.eviction_blocks[block, COUNTED_LIFE] = pool.records[block, LIFE]


@inlined
def _add_leaf(pool: PoolArrays, block: int) -> None:
    marks, runs, state = pool.eviction_blocks, pool.eviction_runs, pool.eviction
    state[NUM_LEAVES] += 1
    place = state[NUM_LEAVES]
    marks[block, PLACE] = place
    marks[place, LEAF] = block
    slot = slot_of(state, len(runs), marks[block, RUN])
    if slot == NO_RUN:
        marks[place, LEAF_CLASSES] = NO_CLASSES
        return
    marks[place, LEAF_TICKS] = runs[slot, TICKS]
    marks[place, LEAF_REFS] = runs[slot, REFS]
    marks[place, LEAF_CLASSES] = runs[slot, CLASSES]


@inlined
def _take_leaf(pool: PoolArrays, block: int, now_is: int) -> None:
    """Remove a leaf; the last leaf takes its place."""
    marks, state = pool.eviction_blocks, pool.eviction
    place = marks[block, PLACE]
    last = state[NUM_LEAVES]
    marks[marks[last, LEAF], PLACE] = place
    for field in (LEAF, LEAF_TICKS, LEAF_REFS, LEAF_CLASSES):
        marks[place, field] = marks[last, field]
    marks[block, PLACE] = now_is
    state[NUM_LEAVES] -= 1


@compiled
def join_cached(pool: PoolArrays, block: int) -> None:
    """Record that a named block is free now."""
    marks = pool.eviction_blocks
    mark = marks[block, RUN]  # behind a window, for example, no end of a sequence gave the block a run
    if mark <= 0 or slot_of(pool.eviction, len(pool.eviction_runs), mark) == NO_RUN:
        begin_run_aside(pool, block)
    if _num_children(pool, block):
        marks[block, PLACE] = INNER
    else:
        _add_leaf(pool, block)
    parent = live_parent(pool, block)
    if parent != NULL_BLOCK:
        _count_children(pool, parent, _num_children(pool, parent) + 1)
        if marks[parent, PLACE] > 0:
            _take_leaf(pool, parent, INNER)


@inlined
def leave_cached(pool: PoolArrays, block: int) -> None:
    """Record that a block, if it was free and cached, is now in use, evicted, spare, or about to lose its name."""
    if pool.eviction_blocks[block, PLACE] != ABSENT:
        _leave_cached(pool, block)


@compiled
def _leave_cached(pool: PoolArrays, block: int) -> None:
    marks = pool.eviction_blocks
    if marks[block, PLACE] > 0:
        _take_leaf(pool, block, ABSENT)
    marks[block, PLACE] = ABSENT
    parent = live_parent(pool, block)
    if parent != NULL_BLOCK:
        num_children = _num_children(pool, parent) - 1
        _count_children(pool, parent, num_children)
        if num_children == 0 and marks[parent, PLACE] == INNER:
            _add_leaf(pool, parent)
