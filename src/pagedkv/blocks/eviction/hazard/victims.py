"""The victim: the least valuable of 64 leaves drawn at random, and then its ancestors, up to 64 blocks of the run.

A sample is drawn since the values of runs change with time by themselves, so no order of them could be kept. The
generator is Marsaglia's xorshift of 32 bits ("Xorshift RNGs", J. Stat. Softw. 8(14), 2003), with the same seed in every
pool.
"""

import math
from typing import Final

from pagedkv.blocks.eviction.hazard.ages import age_since, bin_of_refs, bin_of_seconds, ticks_now
from pagedkv.blocks.eviction.hazard.classes import leaf_a, leaf_b, leaf_f
from pagedkv.blocks.eviction.hazard.counting import count_requested
from pagedkv.blocks.eviction.hazard.ghosts import fetch_next
from pagedkv.blocks.eviction.hazard.horizon import lies_within, move_horizon, num_departures
from pagedkv.blocks.eviction.hazard.layout import (
    CURVES,
    DRAWN,
    FETCHED,
    LEAF,
    LEAF_CLASSES,
    LEAF_REFS,
    LEAF_TICKS,
    MOST_DRAWN,
    NO_CLASSES,
    NUM_LEAVES,
    NUM_REFS,
    RANDOM,
    RUN,
    TICKS_PER_SECOND,
    VALUE,
    VICTIM_LEFT,
    VICTIM_RUN,
    WORK,
)
from pagedkv.blocks.eviction.policy import FETCHED_AHEAD
from pagedkv.blocks.record import PoolArrays
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int64Array

__all__ = ["OF_LRU", "draw", "value_of"]

MOST_OF_ONE_RUN: Final = 64
OF_LRU: Final = -1  # in place of a run: the first block in the order of release is evicted
WORTHLESS: Final = -1e30  # of a leaf of a removed run
WORD: Final = 2**32 - 1


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
