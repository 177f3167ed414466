"""The victim: the least valuable of 64 leaves drawn at random, and then its ancestors, up to 64 blocks of the run.

A sample is drawn since the values of runs change with time by themselves, so no order of them could be kept. The
generator is Marsaglia's xorshift of 32 bits ("Xorshift RNGs", J. Stat. Softw. 8(14), 2003), with the same seed in every
pool.

The functions of the learning policy at each moment of a block's life, and the checks of its arrays.
"""

import math
from typing import ClassVar, Final

import numpy as np

from pagedkv.blocks.eviction.hazard.layout import (
    CLASSES,
    COUNTED_LIFE,
    CURVES,
    DRAWN,
    FETCHED,
    GHOST_FIELDS,
    GHOST_RUN,
    GHOSTS_PER_ROW,
    HORIZON,
    INNER,
    LEAF,
    LEAF_CLASSES,
    LEAF_REFS,
    LEAF_TICKS,
    MOST_DRAWN,
    NEXT_RUN,
    NO_CLASSES,
    NUM_ALIVE,
    NUM_CHILDREN,
    NUM_LEAVES,
    NUM_RECOMPUTED,
    NUM_REFS,
    NUM_REQUESTED,
    NUM_REUSED,
    OLDEST_RUN,
    PLACE,
    RANDOM,
    REFS,
    REQUESTED_RUN,
    ROOT_A,
    ROOT_B,
    ROOT_F,
    RUN,
    SUM_ALIVE,
    SUM_WITHIN,
    TICKS,
    TICKS_PER_SECOND,
    VALUE,
    VICTIM,
    VICTIM_LEFT,
    VICTIM_RUN,
    WORK,
    age_since,
    bin_of_refs,
    bin_of_seconds,
    leaf_a,
    leaf_b,
    leaf_f,
    new_arrays,
    ticks_now,
)
from pagedkv.blocks.eviction.hazard.learning import count_requested, learn, make_curves, note_requested, pass_bins
from pagedkv.blocks.eviction.hazard.runs import (
    NO_RUN,
    WORD,
    begin_runs,
    fetch_ghosts,
    fetch_next,
    forget_oldest,
    join_cached,
    judge_doubtful,
    leave_cached,
    leave_ghost,
    leave_run,
    lies_within,
    live_parent,
    move_horizon,
    note_departure,
    num_departures,
    slot_of,
    take_ghost,
)
from pagedkv.blocks.eviction.policy import FETCHED_AHEAD, EvictionPolicy, PolicyMoments, PolicyState, check_cold
from pagedkv.blocks.free_queue import put_last
from pagedkv.blocks.record import (
    FREE,
    KEPT,
    LIFE,
    NAME,
    NULL_BLOCK,
    PARENT,
    PARENT_LIFE,
    QUEUE,
    SPARE,
    FeaturedArrays,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array, Int64Array

MOST_OF_ONE_RUN: Final = 64
OF_LRU: Final = -1  # in place of a run: the first block in the order of release is evicted
WORTHLESS: Final = -1e30  # of a leaf of a removed run


@compiled
def draw(pool: PoolArrays, first: int) -> int:
    """Draw leaves, or all if there are few; choose the least valuable, and among equals the one released first.

    If that is a departure which is not allowed, LRU's victims are evicted: ``first``, and the blocks after it.
    """
    count_requested(pool.eviction_runs, pool.eviction_rates, pool.eviction)
    move_horizon(pool)
    num_allowed = num_departures(pool)
    marks, state = pool.eviction_blocks, pool.eviction
    num_drawn = _draw_places(pool)
    now = ticks_now(pool)
    best = 0  # row 0 has no leaf
    least = math.inf
    oldest = 0
    for number in range(num_drawn):
        place = state[DRAWN + number]
        value = value_of(pool, place, now)
        age = age_since(marks[place, LEAF_REFS], state[NUM_REFS])
        is_less = (value < least) | ((value == least) & (age > oldest))  # no branch: it would be mispredicted
        best = place if is_less else best
        least = value if is_less else least
        oldest = age if is_less else oldest
    chosen = marks[best, LEAF]
    state[WORK] += num_drawn
    is_departure = lies_within(state, marks[chosen, RUN])
    if is_departure and num_allowed == 0:
        state[VICTIM_RUN] = OF_LRU
        state[VICTIM_LEFT] = MOST_OF_ONE_RUN
        return int(first)
    state[FETCHED] = chosen
    for _ in range(FETCHED_AHEAD):
        fetch_next(pool)
    state[VICTIM_RUN] = marks[chosen, RUN]
    state[VICTIM_LEFT] = min(MOST_OF_ONE_RUN, num_allowed) if is_departure else MOST_OF_ONE_RUN
    return int(chosen)


@inlined
def _draw_places(pool: PoolArrays) -> int:
    """Draw the places of leaves, requesting the memory of all before any is read; return how many."""
    marks, state = pool.eviction_blocks, pool.eviction
    num_leaves = state[NUM_LEAVES]
    if num_leaves <= MOST_DRAWN:
        for number in range(num_leaves):
            state[DRAWN + number] = 1 + number
        return int(num_leaves)
    last = 0
    for number in range(MOST_DRAWN):
        place = 1 + ((_next_random(state) * num_leaves) >> 32)
        state[DRAWN + number] = place
        last |= marks[place, LEAF]
    return MOST_DRAWN if last else 0


@inlined
def _next_random(state: Int64Array) -> int:
    number = state[RANDOM]
    number ^= (number << 13) & WORD
    number ^= number >> 17
    number ^= (number << 5) & WORD
    state[RANDOM] = number
    return int(number)


@inlined
def value_of(pool: PoolArrays, place: int, now: int) -> float:
    """Return the value of the leaf at a place: the logarithm of hits per time and block, up to a constant."""
    marks, rates, state = pool.eviction_blocks, pool.eviction_rates, pool.eviction
    classes = marks[place, LEAF_CLASSES]
    if classes == NO_CLASSES:
        return WORTHLESS
    age_bin = bin_of_seconds(age_since(marks[place, LEAF_TICKS], now) / TICKS_PER_SECOND)
    value = float(rates[state[CURVES + leaf_a(classes)], VALUE + age_bin])
    value += float(rates[state[CURVES + leaf_b(classes)], VALUE + age_bin])
    ref_bin = bin_of_refs(age_since(marks[place, LEAF_REFS], state[NUM_REFS]))
    return value + float(rates[state[CURVES + leaf_f(classes)], VALUE + ref_bin])


def _new_state(num_blocks: int) -> PolicyState:
    """Make empty tables, and curves of the roots, which all classes use at first."""
    state = new_arrays(num_blocks)
    for root in (ROOT_A, ROOT_B, ROOT_F):
        make_curves(state.counts, state.rates, root)
    return state


@inlined
def _recall(pool: PoolArrays, block: int) -> None:
    """Give a newly named block the run of its ghost, and count that it was requested."""
    mark = take_ghost(pool, block)
    if mark:
        note_requested(pool, mark)
    pool.eviction_blocks[block, RUN] = -mark


@inlined
def _note_reuse(pool: PoolArrays, block: int) -> None:
    """Count that a block was requested, once for each run."""
    mark = pool.eviction_blocks[block, RUN]
    if mark > 0:
        note_requested(pool, mark)
        pool.eviction[NUM_REUSED] += 1
        pool.eviction_blocks[block, RUN] = -mark


@inlined
def _note_recomputed(pool: PoolArrays, block: int) -> None:
    """Count that a block was requested and could not be hit, once for each run."""
    mark = pool.eviction_blocks[block, RUN]
    if mark > 0:
        note_requested(pool, mark)
        pool.eviction[NUM_RECOMPUTED] += 1
        pool.eviction_blocks[block, RUN] = -mark


@inlined
def _enqueue(pool: PoolArrays, block: int) -> None:
    """Keep free blocks in the order of their release, for LRU's choice, and make the block evictable."""
    put_last(pool, block)
    join_cached(pool, block)


@inlined
def _note_claim(pool: PoolArrays, block: int) -> None:
    """Make a block not evictable any more."""
    leave_cached(pool, block)


@inlined
def _note_eviction(pool: PoolArrays, block: int) -> None:
    """Make a ghost that takes the block's place in its run; the block's parent is the next victim."""
    marks = pool.eviction_blocks
    leave_cached(pool, block)
    leave_ghost(pool, block, max(0, marks[block, RUN]))
    if marks[block, RUN] > 0 and pool.eviction[VICTIM_RUN] != OF_LRU:
        note_departure(pool.eviction, marks[block, RUN])
    marks[block, RUN] = 0
    pool.eviction[VICTIM] = live_parent(pool, block)
    fetch_next(pool)


@inlined
def _note_drop(pool: PoolArrays, block: int) -> None:
    """Remove a block from its run."""
    marks = pool.eviction_blocks
    leave_cached(pool, block)
    leave_run(pool.eviction_runs, pool.eviction, marks[block, RUN])
    marks[block, RUN] = 0


@compiled
def _note_request(pool: PoolArrays, blocks: Int32Array, num_outputs: int) -> None:
    """Count hits and time at risk, cut the sequence into runs, remove the oldest, and do a part of the learning."""
    pass_bins(pool)
    judge_doubtful(pool.eviction)
    move_horizon(pool)
    num_named = begin_runs(pool, blocks, num_outputs)
    forget_oldest(pool, num_named)
    learn(pool.eviction, pool.eviction_rates)


@inlined
def _choose_victim(pool: PoolArrays, first: int) -> int:
    """Choose the next victim. As long as any block is cached, at least one is a leaf."""
    state, marks = pool.eviction, pool.eviction_blocks
    victim = state[VICTIM]
    if state[VICTIM_RUN] == OF_LRU and state[VICTIM_LEFT] > 0:
        victim = first
    elif state[VICTIM_LEFT] <= 0 or marks[victim, PLACE] <= 0 or marks[victim, RUN] != state[VICTIM_RUN]:
        victim = draw(pool, first)
    state[VICTIM_LEFT] -= 1
    return int(victim)


def _check(where: str, pool: PoolArrays, cold: list[int], protected: list[int]) -> None:
    """Check the leaves, their rows, and the counts of runs."""
    check_cold(where, pool, cold, protected)
    _check_leaves(where, pool)
    _check_rows(where, pool)
    _check_runs(where, pool)


def _check_leaves(where: str, pool: PoolArrays) -> None:
    """Check that the free cached blocks without free cached children are leaves, each at its place."""
    records, marks = pool.records, pool.eviction_blocks
    num_children = np.zeros(len(marks), np.int64)
    cached = [
        block
        for block in range(1, len(marks))
        if records[block, QUEUE] == FREE and records[block, NAME] and records[block, KEPT] != SPARE
    ]
    cached = [block for block in cached if not (len(pool.leases) and pool.leases[block])]  # those are not evictable
    for block in cached:
        parent = records[block, PARENT]
        if parent != NULL_BLOCK and records[parent, LIFE] == records[block, PARENT_LIFE]:
            num_children[parent] += 1
    counted = np.where(marks[:, COUNTED_LIFE] == records[: len(marks), LIFE], marks[:, NUM_CHILDREN], 0)
    assert (num_children == counted).all(), f"{where}: what continues blocks is miscounted"
    inner = {block for block in cached if num_children[block]}
    assert inner == set(np.flatnonzero(marks[:, PLACE] == INNER).tolist()), f"{where}: blocks that others continue"
    leaves = set(cached) - inner
    assert leaves == set(np.flatnonzero(marks[:, PLACE] > 0).tolist()), f"{where}: leaves differ from what may go"
    assert pool.eviction[NUM_LEAVES] == len(leaves), f"{where}: leaves miscounted"
    assert all(marks[marks[leaf, PLACE], LEAF] == leaf for leaf in leaves), f"{where}: a leaf is not in its place"


def _check_rows(where: str, pool: PoolArrays) -> None:
    """Check that a leaf's row has a copy of its run's fields, as long as that run exists."""
    marks, runs = pool.eviction_blocks, pool.eviction_runs
    for place in range(1, int(pool.eviction[NUM_LEAVES]) + 1):
        slot = slot_of(pool.eviction, len(runs), marks[marks[place, LEAF], RUN])
        if slot != NO_RUN:
            copied, known = marks[place, [LEAF_TICKS, LEAF_REFS, LEAF_CLASSES]], runs[slot, [TICKS, REFS, CLASSES]]
            assert (copied == known).all(), f"{where}: place {place} has {copied}, its run has {known}"


def _check_runs(where: str, pool: PoolArrays) -> None:
    """Check that runs count their unrequested blocks and ghosts, and that the ring is large enough."""
    state, runs = pool.eviction, pool.eviction_runs
    serials = range(state[OLDEST_RUN], state[NEXT_RUN])
    assert len(serials) <= len(runs), f"{where}: {len(serials)} runs in {len(runs)} rows"
    num_alive: dict[int, int] = dict.fromkeys((serial & (len(runs) - 1) for serial in serials), 0)
    ghosts = pool.eviction_table[:, GHOST_RUN : GHOST_FIELDS * GHOSTS_PER_ROW : GHOST_FIELDS]
    marks = pool.eviction_blocks[:, RUN]
    requested = slot_of(state, len(runs), state[REQUESTED_RUN])
    if state[NUM_REQUESTED] and requested != NO_RUN:
        num_alive[int(requested)] += int(state[NUM_REQUESTED])  # not counted yet
    for mark in np.concatenate([ghosts[ghosts != 0].astype(np.int64), marks[marks > 0].astype(np.int64)]).tolist():
        slot = slot_of(state, len(runs), mark)
        if slot != NO_RUN:
            num_alive[int(slot)] += 1
    for slot, count in num_alive.items():
        assert count == runs[slot, NUM_ALIVE], f"{where}: a run counts {runs[slot, NUM_ALIVE]} blocks, has {count}"
    assert sum(num_alive.values()) == state[SUM_ALIVE], f"{where}: remembered blocks miscounted"
    within = (num_alive[serial & (len(runs) - 1)] for serial in range(state[HORIZON], state[NEXT_RUN]))
    assert sum(within) == state[SUM_WITHIN], f"{where}: what LRU would have is miscounted"
    assert state[OLDEST_RUN] <= state[HORIZON] <= state[NEXT_RUN], f"{where}: the horizon lies outside the ring"


class HazardArrays(FeaturedArrays):
    """The arrays of a pool with this policy."""

    __slots__ = ()
    policy: ClassVar = PolicyMoments(
        note_name=_recall,
        expect=fetch_ghosts,
        note_reuse=_note_reuse,
        note_recomputed=_note_recomputed,
        enqueue=_enqueue,
        note_eviction=_note_eviction,
        note_drop=_note_drop,
        note_claim=_note_claim,
        note_request=_note_request,
        choose_victim=_choose_victim,
    )


HAZARD: Final = EvictionPolicy("hazard", HazardArrays, new_state=_new_state, check=_check)
