"""Hits and time at risk, by class and age, from which rates are estimated.

The estimator is that of Nelson and Aalen with delayed entry, in weighted blocks. The weight of a block is the mean
number of requests per block, so that priors, which count requests, mean the same for prompts of any length. Time at
risk is counted by bin: a run's whole time in a bin once it has left it, and for a requested block the time in its
current bin. An eighth of the bins, in turn, is updated at each request; blocks that are requested meanwhile are counted
in the bins that their run has left.

Hit rates of classes by age, and the value of a run, updated by sweeps over the trees, a part at each request.

On its way up, a sweep multiplies the counts by a decay factor and sums leaves into the classes above. On its way down
it makes the *curves* of each class that has data. These are the rates by age, shrunk towards those of the class above
(empirical Bayes, with gamma priors of one hit), and the *index* of each age: the most hits per time held, over all ages
at which the content may be given up (Gittins). A class without data uses the curve of its nearest ancestor with data.
"""

import math
from typing import Final

import numpy as np

from pagedkv.blocks.eviction.hazard.layout import (
    CLASSES,
    CURVES,
    ENDS,
    FIRST_BIN,
    HAS_DATA,
    HITS,
    LAST_SWEEP,
    LEAVES_A,
    LEAVES_B,
    LEAVES_F,
    MIDDLE,
    MOST_BINS,
    NEXT_REFRESH,
    NEXT_RUN,
    NOT_SWEEPING,
    NUM_ALIVE,
    NUM_BINS,
    NUM_NODES,
    NUM_RECOMPUTED,
    NUM_REF_BINS,
    NUM_REFS,
    NUM_REQUESTED,
    NUM_REQUESTS,
    NUM_REUSED,
    NUM_SECOND_BINS,
    OLDEST_RUN,
    PARENTS,
    PASSED,
    RATE,
    REFERENCES,
    REFS,
    REQUESTED_AT,
    REQUESTED_RUN,
    RISK,
    ROOT_B,
    ROOT_F,
    SCRATCH,
    SECONDS,
    SERIAL_MASK,
    START,
    SUM_ALIVE,
    SWEEP,
    SWEPT_REQUESTS,
    TICKS,
    VALUE,
    WIDTH,
    WORK,
    age_in_refs,
    age_in_seconds,
    age_since,
    bin_of_refs,
    bin_of_seconds,
    leaf_a,
    leaf_b,
    leaf_f,
    ticks_now,
)
from pagedkv.blocks.eviction.hazard.runs import NO_RUN, count_against_lru, slot_of
from pagedkv.blocks.record import PoolArrays
from pagedkv.compilation.compiled import compiled, inlined, inlined_sums, unsigned
from pagedkv.contract.arrays import Float32Array, Int32Array, Int64Array

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


EXPONENT_A: Final = 0.5  # weight of each tree's class in the value of a run
EXPONENT_B: Final = 0.5
EXPONENT_F: Final = 0.8
HALF_LIFE: Final = 4000.0  # requests
SHORTEST_INTERVAL: Final = 16  # requests
LONGEST_INTERVAL: Final = 512
INTERVAL_DIVISOR: Final = 16
PRIOR_HITS: Final = 1.0
PRIOR_SHAPE: Final = 0.3  # hits per doubling of the age, roughly, as long as there are no data
MOST_VISITED: Final = 192  # classes without data in one request
COST_OF_CURVE: Final = 16  # a curve counts for so many of them: 12 curves in one request
COST_OF_SUM: Final = 2
LARGEST_EXPONENT: Final = 40.0  # beyond it no block is still waiting
SMALL_EXPONENT: Final = 1e-5  # below it hits are not computed as one minus the waiting share, which would cancel
LARGEST_RATE: Final = 1e6  # if all are requested at once, as if the clock did not advance; its index is still a number
MANTISSA_BITS: Final = 23  # of a float32
MANTISSA: Final = (1 << MANTISSA_BITS) - 1
EXPONENT_OF_ONE: Final = 127
BITS_OF_ONE: Final = EXPONENT_OF_ONE << MANTISSA_BITS
LOG_2: Final = math.log(2)


@compiled
def learn(state: Int64Array, rates: Float32Array) -> None:
    """Do the next part of a sweep; begin one if it is due."""
    if state[SWEEP] == NOT_SWEEPING:
        if state[NUM_REQUESTS] < state[NEXT_REFRESH]:
            return
        _begin_sweep(state)
    num_left = MOST_VISITED
    while num_left > 0 and state[SWEEP] < 2 * NUM_NODES:
        num_left -= _visit(state, rates, state[SWEEP])
        state[SWEEP] += 1
    state[WORK] += MOST_VISITED - num_left
    if state[SWEEP] == 2 * NUM_NODES:
        state[SWEEP] = NOT_SWEEPING


@inlined
def _begin_sweep(state: Int64Array) -> None:
    num_requests = state[NUM_REQUESTS]
    state[SWEEP] = 0
    state[SWEPT_REQUESTS] = num_requests - state[LAST_SWEEP]
    state[LAST_SWEEP] = num_requests
    interval = num_requests // INTERVAL_DIVISOR
    state[NEXT_REFRESH] = num_requests + max(SHORTEST_INTERVAL, min(interval, LONGEST_INTERVAL))


@inlined
def _visit(state: Int64Array, rates: Float32Array, step: int) -> int:
    """Visit one node: first all in reverse order, then all in order. Return the cost."""
    if step < NUM_NODES:
        return _sum_up(state, rates, NUM_NODES - 1 - step)
    return make_curves(state, rates, step - NUM_NODES)


@compiled
def _sum_up(state: Int64Array, rates: Float32Array, node: int) -> int:
    """Decay a leaf's counts, and add a node's counts to those of its parent."""
    if not state[HAS_DATA + node]:
        return 1
    parent = state[PARENTS + node]
    if _is_leaf(node):
        fading = 0.5 ** (state[SWEPT_REQUESTS] / HALF_LIFE)
        for column in range(HITS, HITS + 2 * MOST_BINS):
            rates[node, column] = fading * float(rates[node, column])
    if parent != node:
        for column in range(HITS, HITS + 2 * MOST_BINS):
            rates[parent, column] = float(rates[parent, column]) + float(rates[node, column])
        state[HAS_DATA + parent] = 1
    return COST_OF_SUM


@inlined
def _is_leaf(node: int) -> bool:
    """Whether a node is a leaf of its tree: only these keep counts between sweeps."""
    return LEAVES_A <= node < ROOT_B or LEAVES_B <= node < ROOT_F or node >= LEAVES_F


@compiled
def make_curves(state: Int64Array, rates: Float32Array, node: int) -> int:
    """Make the rates and values of a class with data; give any other its parent's curve. Return the cost."""
    parent = state[PARENTS + node]
    if not state[HAS_DATA + node] and parent != node:
        state[CURVES + node] = state[CURVES + parent]
        return 1
    state[CURVES + node] = node
    scale, num_bins = (REFERENCES, NUM_REF_BINS) if node >= ROOT_F else (SECONDS, NUM_SECOND_BINS)
    if parent == node:
        _root_rates(rates, node, scale, num_bins)
    else:
        _shrunk_rates(rates, node, state[CURVES + parent], num_bins)
    _values(rates, node, scale, num_bins, EXPONENT_F if node >= ROOT_F else EXPONENT_A if node < ROOT_B else EXPONENT_B)
    if not _is_leaf(node):
        for column in range(HITS, HITS + 2 * MOST_BINS):
            rates[node, column] = 0
        state[HAS_DATA + node] = 0
    return COST_OF_CURVE


@inlined_sums
def _root_rates(rates: Float32Array, node: int, scale: int, num_bins: int) -> None:
    """Compute the rates of a root; without data they are inversely proportional to the age."""
    row, bins = rates[node], rates[scale]
    hits, risk = PRIOR_HITS, PRIOR_HITS / PRIOR_SHAPE
    for age_bin in range(num_bins):
        hits += float(row[HITS + age_bin])
        risk += float(row[RISK + age_bin]) / float(bins[MIDDLE + age_bin])
    shape = hits / risk
    for age_bin in range(num_bins):
        prior = shape / float(bins[MIDDLE + age_bin])
        row[RATE + age_bin] = _posterior(float(row[HITS + age_bin]), float(row[RISK + age_bin]), prior)


@inlined_sums
def _shrunk_rates(rates: Float32Array, node: int, above: int, num_bins: int) -> None:
    """Compute the rates of a class; without data they are those of the class above times one ratio."""
    row, row_above = rates[node], rates[above]
    hits, expected = PRIOR_HITS, PRIOR_HITS
    for age_bin in range(num_bins):
        hits += float(row[HITS + age_bin])
        expected += float(row[RISK + age_bin]) * float(row_above[RATE + age_bin])
    ratio = hits / expected
    for age_bin in range(num_bins):
        prior = ratio * float(row_above[RATE + age_bin])
        row[RATE + age_bin] = _posterior(float(row[HITS + age_bin]), float(row[RISK + age_bin]), prior)


@inlined_sums
def _posterior(hits: float, risk: float, prior: float) -> float:
    """Return the mean rate after ``hits`` in the time ``risk``, given ``PRIOR_HITS`` at the rate ``prior``."""
    return min((hits + PRIOR_HITS) * prior / (risk * prior + PRIOR_HITS), LARGEST_RATE)


@inlined
def _values(rates: Float32Array, node: int, scale: int, num_bins: int, exponent: float) -> None:
    """Write the weighted logarithm of the index of each age.

    Of the three loops, the first and the last are vectorised: 0.3 us a class, where calls of the C library for each bin
    took 1.3.
    """
    _hits_of_bins(rates[node], rates[scale], rates[SCRATCH], num_bins)
    _most_hits_per_time(rates[node], rates[SCRATCH], num_bins)
    _take_logarithms(rates[node], num_bins, exponent)


@inlined_sums
def _take_logarithms(row: Float32Array, num_bins: int, exponent: float) -> None:
    """Replace the index of each age by its weighted logarithm."""
    for age_bin in range(num_bins):
        row[VALUE + age_bin] = exponent * _logarithm(row[VALUE + age_bin])


@inlined_sums
def _hits_of_bins(row: Float32Array, bins: Float32Array, scratch: Float32Array, num_bins: int) -> None:
    """Write for each bin the expected hits of a block kept to its end, the time held, and the share still waiting."""
    for age_bin in range(num_bins):
        rate = float(row[RATE + age_bin])
        exponent = min(rate * float(bins[WIDTH + age_bin]), LARGEST_EXPONENT)
        waiting = _exponential(exponent)
        hits = exponent * (1.0 - exponent / 2) if exponent < SMALL_EXPONENT else 1.0 - waiting
        scratch[HITS + age_bin] = hits
        scratch[RISK + age_bin] = hits / rate
        scratch[RATE + age_bin] = waiting


@inlined
def _most_hits_per_time(row: Float32Array, scratch: Float32Array, num_bins: int) -> None:
    """Write the index of each age.

    Bins, from the last to the first, are pushed onto a stack of stretches. A stretch consists of expected hits, time
    held, and the share still waiting at its end. A new stretch is merged with the top of the stack as long as the top
    has more hits per time. The stack is stored in place of the bins.
    """
    top = num_bins
    for age_bin in range(num_bins - 1, -1, -1):
        hits = float(scratch[unsigned(HITS + age_bin)])
        held = float(scratch[unsigned(RISK + age_bin)])
        waiting = float(scratch[unsigned(RATE + age_bin)])
        while top < num_bins:
            next_hits = float(scratch[unsigned(HITS + top)])
            next_held = float(scratch[unsigned(RISK + top)])
            if next_hits * held <= hits * next_held:
                break
            hits += waiting * next_hits
            held += waiting * next_held
            waiting *= float(scratch[unsigned(RATE + top)])
            top += 1
        top -= 1
        scratch[unsigned(HITS + top)] = hits
        scratch[unsigned(RISK + top)] = held
        scratch[unsigned(RATE + top)] = waiting
        row[unsigned(VALUE + age_bin)] = hits / held


@inlined_sums
def _exponential(exponent: float) -> float:
    """Return ``exp(-exponent)``, 0 to LARGEST_EXPONENT, to ten digits: a power series of a 64th, squared six times."""
    part = -exponent / 64
    power = 1.0
    for divisor in (12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1):
        power = 1.0 + power * part / divisor
    for _ in range(6):
        power *= power
    return power


@inlined_sums
def _logarithm(number: float) -> float:
    """Return the natural logarithm of a positive normal number, to seven digits, from its exponent and a power series.

    The series is that of the inverse hyperbolic tangent: log m = 2 artanh((m - 1) / (m + 1)), for m from 1 to 2.
    """
    bits = np.float32(number).view(np.int32)
    exponent = (bits >> MANTISSA_BITS) - EXPONENT_OF_ONE
    mantissa = float(np.int32((bits & MANTISSA) | BITS_OF_ONE).view(np.float32))
    part = (mantissa - 1) / (mantissa + 1)
    square = part * part
    series = 1 / 15
    for divisor in (13, 11, 9, 7, 5, 3, 1):
        series = 1 / divisor + series * square
    return exponent * LOG_2 + 2 * part * series
