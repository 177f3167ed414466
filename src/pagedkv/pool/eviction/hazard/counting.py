"""Hits and time at risk, by class and age: what rates are estimated from.

The estimator of Nelson and Aalen with delayed entry, in weighted blocks: a block weighs as much as the mean prompt has
requests to a block, so that priors, which count requests, mean the same for prompts of any length. Time is counted bin
by bin: what a run has behind it once it has left a bin, and what an asked block had of the bin that it was in.
"""

from typing import Final

from pagedkv.arrays import Float32Array, Int32Array, Int64Array
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.pool.blocks import PoolArrays
from pagedkv.pool.eviction.hazard.ages import age_in_refs, age_in_seconds, bin_of_refs, bin_of_seconds, ticks_now
from pagedkv.pool.eviction.hazard.classes import leaf_a, leaf_b, leaf_f
from pagedkv.pool.eviction.hazard.layout import (
    ASKED_AT,
    ASKED_RUN,
    CLASSES,
    FIRST_BIN,
    HAS_DATA,
    HITS,
    NEXT_RUN,
    NUM_ALIVE,
    NUM_ASKED,
    NUM_REF_BINS,
    NUM_REFS,
    NUM_REQUESTS,
    NUM_SECOND_BINS,
    OLDEST_RUN,
    PASSED,
    PASSED_AT,
    REFERENCES,
    RISK,
    SECONDS,
    START,
    SUM_ALIVE,
    WIDTH,
    WORK,
)
from pagedkv.pool.eviction.hazard.serials import NO_RUN, slot_of

__all__ = ["count_asked", "note_asked", "pass_bins"]

MOST_PASSED: Final = 640  # runs and bins in one request


@inlined
def _weight(state: Int64Array) -> float:
    """Weight of a block: requests so far to blocks so far."""
    return float(state[NUM_REQUESTS]) / max(1.0, float(state[NUM_REFS]))


@inlined
def _add(rates: Float32Array, node: int, column: int, amount: float) -> None:
    rates[node, column] = float(rates[node, column]) + amount
    rates[node, HAS_DATA] = 1


@inlined
def note_asked(pool: PoolArrays, mark: int) -> None:
    """Note that a block of a run was asked for. Counted run by run: all of one are asked for at the same time."""
    state = pool.eviction
    now = ticks_now(pool)
    if state[ASKED_RUN] != mark or state[ASKED_AT] != now:
        if state[PASSED_AT] != now:
            pass_bins(pool)  # the block was at risk until now
        count_asked(pool.eviction_runs, pool.eviction_rates, state)
        state[ASKED_RUN] = mark
        state[ASKED_AT] = now
    state[NUM_ASKED] += 1


@compiled
def count_asked(runs: Int32Array, rates: Float32Array, state: Int64Array) -> None:
    """Count the blocks that were asked for and not counted yet, and let them leave their run."""
    num_asked = state[NUM_ASKED]
    slot = slot_of(state, len(runs), state[ASKED_RUN])
    state[NUM_ASKED] = 0
    if num_asked == 0 or slot == NO_RUN:
        return
    classes = runs[slot, CLASSES]
    wt = num_asked * _weight(state)
    age_s = age_in_seconds(runs, slot, state[ASKED_AT])
    second_bin = bin_of_seconds(age_s)
    _count_hits(rates, leaf_a(classes), SECONDS, second_bin, age_s, wt)
    _count_hits(rates, leaf_b(classes), SECONDS, second_bin, age_s, wt)
    age = age_in_refs(runs, slot, state[NUM_REFS])
    _count_hits(rates, leaf_f(classes), REFERENCES, bin_of_refs(age), float(age), wt)
    runs[slot, NUM_ALIVE] -= num_asked
    state[SUM_ALIVE] -= num_asked


@inlined
def _count_hits(rates: Float32Array, node: int, scale: int, age_bin: int, age: float, wt: float) -> None:
    _add(rates, node, HITS + age_bin, wt)
    _add(rates, node, RISK + age_bin, (age - float(rates[scale, START + age_bin])) * wt)


@compiled
def pass_bins(pool: PoolArrays) -> None:
    """Count what runs have behind them that have left a bin since; the rest with the next request, if it is much."""
    state = pool.eviction
    count_asked(pool.eviction_runs, pool.eviction_rates, state)
    num_bins = NUM_SECOND_BINS + NUM_REF_BINS
    now = ticks_now(pool)
    state[PASSED_AT] = now
    wt = _weight(state)
    num_left = MOST_PASSED
    place = state[FIRST_BIN]
    for _ in range(num_bins):
        num_left = _pass_bin(pool.eviction_runs, pool.eviction_rates, state, place, now, wt, num_left)
        if num_left <= 0:
            break
        place = place + 1 if place + 1 < num_bins else 0
    state[FIRST_BIN] = place
    state[WORK] += MOST_PASSED - num_left


@inlined
def _pass_bin(
    runs: Int32Array, rates: Float32Array, state: Int64Array, place: int, now: int, wt: float, num_left: int
) -> int:
    """Pass the runs that have left one bin; return how many more may be passed."""
    in_seconds = place < NUM_SECOND_BINS
    scale = SECONDS if in_seconds else REFERENCES
    age_bin = place if in_seconds else place - NUM_SECOND_BINS
    if age_bin == (NUM_SECOND_BINS if in_seconds else NUM_REF_BINS) - 1:
        return num_left  # nobody leaves the last
    width = float(rates[scale, WIDTH + age_bin])
    end = float(rates[scale, START + age_bin + 1])
    serial = max(state[PASSED + place], state[OLDEST_RUN])
    while serial < state[NEXT_RUN] and num_left > 0:
        slot = serial & (len(runs) - 1)
        age = age_in_seconds(runs, slot, now) if in_seconds else float(age_in_refs(runs, slot, state[NUM_REFS]))
        if age < end:
            break
        if runs[slot, NUM_ALIVE] > 0:
            risk = runs[slot, NUM_ALIVE] * width * wt
            classes = runs[slot, CLASSES]
            if in_seconds:
                _add(rates, leaf_a(classes), RISK + age_bin, risk)
                _add(rates, leaf_b(classes), RISK + age_bin, risk)
            else:
                _add(rates, leaf_f(classes), RISK + age_bin, risk)
        serial += 1
        num_left -= 1
    state[PASSED + place] = serial
    return num_left
