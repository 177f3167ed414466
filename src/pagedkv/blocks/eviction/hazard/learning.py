"""Hit rates of classes by age, and the value of a run, updated by sweeps over the trees, a part at each request.

On its way up, a sweep multiplies the counts by a decay factor and sums leaves into the classes above. On its way down
it makes the *curves* of each class that has data. These are the rates by age, shrunk towards those of the class above
(empirical Bayes, with gamma priors of one hit), and the *index* of each age: the most hits per time held, over all ages
at which the content may be given up (Gittins). A class without data uses the curve of its nearest ancestor with data.
"""

import math
from typing import Final

import numpy as np

from pagedkv.blocks.eviction.hazard.layout import (
    CURVES,
    HAS_DATA,
    HITS,
    LAST_SWEEP,
    LEAVES_A,
    LEAVES_B,
    LEAVES_F,
    MIDDLE,
    MOST_BINS,
    NEXT_REFRESH,
    NOT_SWEEPING,
    NUM_NODES,
    NUM_REF_BINS,
    NUM_REQUESTS,
    NUM_SECOND_BINS,
    PARENTS,
    RATE,
    REFERENCES,
    RISK,
    ROOT_B,
    ROOT_F,
    SCRATCH,
    SECONDS,
    SWEEP,
    SWEPT_REQUESTS,
    VALUE,
    WIDTH,
    WORK,
)
from pagedkv.compilation.compiled import compiled, inlined, inlined_sums, unsigned
from pagedkv.contract.arrays import Float32Array, Int64Array

__all__ = ["learn", "make_curves"]

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
