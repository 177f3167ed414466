"""Hits and time at risk, by class and age, from which rates are estimated.

The estimator is that of Nelson and Aalen with delayed entry, in weighted blocks. The weight of a block is the mean
number of requests per block, so that priors, which count requests, mean the same for prompts of any length. Time at
risk is counted by bin: a run's whole time in a bin once it has left it, and for a requested block the time in its
current bin. An eighth of the bins, in turn, is updated at each request; blocks that are requested meanwhile are counted
in the bins that their run has left.
"""

from typing import Final

from pagedkv.blocks.eviction.hazard.ages import (
    age_in_refs,
    age_in_seconds,
    age_since,
    bin_of_refs,
    bin_of_seconds,
    ticks_now,
)
from pagedkv.blocks.eviction.hazard.classes import leaf_a, leaf_b, leaf_f
from pagedkv.blocks.eviction.hazard.horizon import count_against_lru
from pagedkv.blocks.eviction.hazard.layout import (
    CLASSES,
    ENDS,
    FIRST_BIN,
    HAS_DATA,
    HITS,
    NEXT_RUN,
    NUM_ALIVE,
    NUM_BINS,
    NUM_RECOMPUTED,
    NUM_REFS,
    NUM_REQUESTED,
    NUM_REQUESTS,
    NUM_REUSED,
    NUM_SECOND_BINS,
    OLDEST_RUN,
    PASSED,
    REFERENCES,
    REFS,
    REQUESTED_AT,
    REQUESTED_RUN,
    RISK,
    SECONDS,
    SERIAL_MASK,
    START,
    SUM_ALIVE,
    TICKS,
    WIDTH,
    WORK,
)
from pagedkv.blocks.eviction.hazard.serials import NO_RUN, slot_of
from pagedkv.blocks.record import PoolArrays
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.contract.arrays import Float32Array, Int32Array, Int64Array

__all__ = ["count_requested", "note_requested", "pass_bins"]

MOST_PASSED: Final = 640  # runs and bins in one request
BINS_A_REQUEST: Final = 17  # an eighth of them: some runs leave each bin between two visits, so few visits are in vain


@inlined
def _weight(state: Int64Array) -> float:
    """Return the weight of a block: requests so far per block so far."""
    return float(state[NUM_REQUESTS]) / max(1.0, float(state[NUM_REFS]))


@inlined
def _add(rates: Float32Array, node: int, column: int, amount: float) -> None:
    rates[unsigned(node), unsigned(column)] = float(rates[unsigned(node), unsigned(column)]) + amount


@inlined
def note_requested(pool: PoolArrays, mark: int) -> None:
    """Record that a block of a run was requested. Blocks of one run are requested together, and counted together."""
    state = pool.eviction
    now = ticks_now(pool)
    if state[REQUESTED_RUN] != mark or state[REQUESTED_AT] != now:
        count_requested(pool.eviction_runs, pool.eviction_rates, state)
        state[REQUESTED_RUN] = mark
        state[REQUESTED_AT] = now
    state[NUM_REQUESTED] += 1


@compiled
def count_requested(runs: Int32Array, rates: Float32Array, state: Int64Array) -> None:
    """Count the requested blocks that are not counted yet, and remove them from their run."""
    num_requested = state[NUM_REQUESTED]
    slot = slot_of(state, len(runs), state[REQUESTED_RUN])
    state[NUM_REQUESTED] = 0
    if num_requested == 0 or slot == NO_RUN:
        state[NUM_REUSED] = state[NUM_RECOMPUTED] = 0
        return
    classes = runs[slot, CLASSES]
    in_a, in_b, in_f = leaf_a(classes), leaf_b(classes), leaf_f(classes)
    wt = num_requested * _weight(state)
    age_s = age_in_seconds(runs, slot, state[REQUESTED_AT])
    second_bin = bin_of_seconds(age_s)
    _count_hits(rates, state, in_a, SECONDS, second_bin, age_s, wt)
    _count_hits(rates, state, in_b, SECONDS, second_bin, age_s, wt)
    age = age_in_refs(runs, slot, state[NUM_REFS])
    ref_bin = bin_of_refs(age)
    _count_hits(rates, state, in_f, REFERENCES, ref_bin, float(age), wt)
    serial = state[NEXT_RUN] - ((state[NEXT_RUN] - state[REQUESTED_RUN]) & SERIAL_MASK)
    _count_unpassed(rates, state, in_a, SECONDS, second_bin, serial, wt)
    _count_unpassed(rates, state, in_b, SECONDS, second_bin, serial, wt)
    _count_unpassed(rates, state, in_f, REFERENCES, ref_bin, serial, wt)
    count_against_lru(runs, state, state[REQUESTED_RUN], num_requested)
    state[NUM_REUSED] = state[NUM_RECOMPUTED] = 0
    runs[slot, NUM_ALIVE] -= num_requested
    state[SUM_ALIVE] -= num_requested


@inlined
def _count_hits(
    rates: Float32Array, state: Int64Array, node: int, scale: int, age_bin: int, age: float, wt: float
) -> None:
    _add(rates, node, HITS + age_bin, wt)
    _add(rates, node, RISK + age_bin, (age - float(rates[scale, START + age_bin])) * wt)
    state[HAS_DATA + node] = 1


@inlined
def _count_unpassed(
    rates: Float32Array, state: Int64Array, node: int, scale: int, num_bins: int, serial: int, wt: float
) -> None:
    """Count the bins that a run has left but was not passed in yet, as requested blocks are no longer in it then."""
    passed = PASSED if scale == SECONDS else PASSED + NUM_SECOND_BINS
    for age_bin in range(num_bins):
        if serial >= state[passed + age_bin]:
            _add(rates, node, RISK + age_bin, float(rates[scale, WIDTH + age_bin]) * wt)


@compiled
def pass_bins(pool: PoolArrays) -> None:
    """Count the time of runs that have left one of the next bins, up to a limit on the work at once."""
    state = pool.eviction
    count_requested(pool.eviction_runs, pool.eviction_rates, state)
    now = ticks_now(pool)
    wt = _weight(state)
    num_left = MOST_PASSED
    place = state[FIRST_BIN]
    for _ in range(BINS_A_REQUEST):
        num_left = _pass_bin(pool.eviction_runs, pool.eviction_rates, state, place, now, wt, num_left)
        if num_left == 0:
            break
        place = place + 1 if place + 1 < NUM_BINS else 0
    state[FIRST_BIN] = place
    state[WORK] += MOST_PASSED - num_left


@inlined
def _pass_bin(
    runs: Int32Array, rates: Float32Array, state: Int64Array, place: int, now: int, wt: float, num_left: int
) -> int:
    """Pass the runs that have left one bin; return how many more may be passed."""
    in_seconds = place < NUM_SECOND_BINS
    age_bin = place if in_seconds else place - NUM_SECOND_BINS
    risk_of_one = float(rates[SECONDS if in_seconds else REFERENCES, WIDTH + age_bin]) * wt
    begun = TICKS if in_seconds else REFS
    reached = now if in_seconds else state[NUM_REFS]
    end = state[ENDS + place]
    first = max(state[PASSED + place], state[OLDEST_RUN])
    stop = min(state[NEXT_RUN], first + num_left)
    serial = first
    while serial < stop:
        slot = unsigned(serial & (len(runs) - 1))
        if age_since(runs[slot, begun], reached) < end:
            break
        classes = runs[slot, CLASSES]
        risk = runs[slot, NUM_ALIVE] * risk_of_one
        if risk > 0:
            if in_seconds:
                _add(rates, leaf_a(classes), RISK + age_bin, risk)
                _add(rates, leaf_b(classes), RISK + age_bin, risk)
                state[HAS_DATA + leaf_a(classes)] = 1
                state[HAS_DATA + leaf_b(classes)] = 1
            else:
                _add(rates, leaf_f(classes), RISK + age_bin, risk)
                state[HAS_DATA + leaf_f(classes)] = 1
        serial += 1
    state[PASSED + place] = serial
    return int(num_left - (serial - first))
