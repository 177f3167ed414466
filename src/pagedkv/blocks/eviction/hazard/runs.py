"""Runs: stretches of a sequence that were released together, in a ring by time, from which the oldest are removed."""

from typing import Final

from pagedkv.blocks.eviction.hazard.ages import age_in_seconds, ticks_now
from pagedkv.blocks.eviction.hazard.classes import bit_length, output_of, pack, uses_of
from pagedkv.blocks.eviction.hazard.layout import (
    CLASSES,
    FEWEST_REMEMBERED,
    GAP_CLASSES,
    GHOSTS_PER_BLOCK,
    HORIZON,
    HORIZON_CUT,
    LARGEST,
    LENGTH_CLASSES,
    NEXT_RUN,
    NUM_ALIVE,
    NUM_ASIDE,
    NUM_REFS,
    NUM_REQUESTS,
    OLDEST_RUN,
    OUTPUT_CLASSES,
    REFS,
    RUN,
    SERIAL_MASK,
    SUM_ALIVE,
    SUM_WITHIN,
    TICKS,
    USE_CLASSES,
    WORK,
)
from pagedkv.blocks.eviction.hazard.serials import NO_RUN, leave_run, slot_of
from pagedkv.blocks.record import NAME, NULL_BLOCK, PoolArrays
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array

__all__ = ["begin_run_aside", "begin_runs", "forget_oldest"]

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
