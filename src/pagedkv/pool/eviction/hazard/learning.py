"""Hit rates of classes by age, and what a run is worth from them: swept through the trees, a slice with each request.

On its way up the sweep lets what was counted fade, and sums leaves into the classes above. On its way down it makes the
*curves* of each class that has data: rates by age, shrunk towards those of the class above (empirical Bayes, with gamma
priors of one hit), and the *index* of each age: the most hits per time held, over all ages at which one may give up
(Gittins). A class without data has the curve of the next above that has.
"""

import math
from typing import Final

from pagedkv.arrays import Float32Array, Int64Array
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.pool.eviction.hazard.layout import (
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

__all__ = ["learn", "make_curves"]

EXPONENT_A: Final = 0.5  # what a class of each tree weighs in a run's worth
EXPONENT_B: Final = 0.5
EXPONENT_F: Final = 0.6
HALF_LIFE: Final = 4000.0  # requests
SHORTEST_INTERVAL: Final = 16  # requests
LONGEST_INTERVAL: Final = 512
INTERVAL_DIVISOR: Final = 16
PRIOR_HITS: Final = 1.0
PRIOR_SHAPE: Final = 0.3  # hits per doubling of the age, about, while nothing is known
MOST_VISITED: Final = 192  # classes without data in one request
COST_OF_CURVE: Final = 16  # those that a curve counts for: 12 curves in one request
COST_OF_SUM: Final = 2


@compiled
def learn(state: Int64Array, rates: Float32Array) -> None:
    """Do the next slice of a sweep, and begin one if it is time."""
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
    """Visit one node: from the last to the first, then from the first to the last. Return what that cost."""
    if step < NUM_NODES:
        return _sum_up(state, rates, NUM_NODES - 1 - step)
    return make_curves(state, rates, step - NUM_NODES)


@compiled
def _sum_up(state: Int64Array, rates: Float32Array, node: int) -> int:
    """Let a leaf's counts fade, and add a node's to those of its parent."""
    if not rates[node, HAS_DATA]:
        return 1
    parent = state[PARENTS + node]
    if _is_leaf(node):
        fading = 0.5 ** (state[SWEPT_REQUESTS] / HALF_LIFE)
        for column in range(HITS, HITS + 2 * MOST_BINS):
            rates[node, column] = fading * float(rates[node, column])
    if parent != node:
        for column in range(HITS, HITS + 2 * MOST_BINS):
            rates[parent, column] = float(rates[parent, column]) + float(rates[node, column])
        rates[parent, HAS_DATA] = 1
    return COST_OF_SUM


@inlined
def _is_leaf(node: int) -> bool:
    """Tell whether a node is the last of its kind: counts are kept there."""
    return LEAVES_A <= node < ROOT_B or LEAVES_B <= node < ROOT_F or node >= LEAVES_F


@compiled
def make_curves(state: Int64Array, rates: Float32Array, node: int) -> int:
    """Make the rates and values of a class, if it has data, else give it its parent's. Return what that cost."""
    parent = state[PARENTS + node]
    if not rates[node, HAS_DATA] and parent != node:
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
        rates[node, HAS_DATA] = 0
    return COST_OF_CURVE


@inlined
def _root_rates(rates: Float32Array, node: int, scale: int, num_bins: int) -> None:
    """Rates that fall with age as its inverse, where nothing else was counted."""
    hits, risk = PRIOR_HITS, PRIOR_HITS / PRIOR_SHAPE
    for age_bin in range(num_bins):
        hits += float(rates[node, HITS + age_bin])
        risk += float(rates[node, RISK + age_bin]) / float(rates[scale, MIDDLE + age_bin])
    shape = hits / risk
    for age_bin in range(num_bins):
        middle = float(rates[scale, MIDDLE + age_bin])
        hits = float(rates[node, HITS + age_bin]) + PRIOR_HITS
        risk = float(rates[node, RISK + age_bin]) / middle + PRIOR_HITS / shape
        rates[node, RATE + age_bin] = hits / risk / middle


@inlined
def _shrunk_rates(rates: Float32Array, node: int, above: int, num_bins: int) -> None:
    """Rates of the class above, times one ratio, where nothing else was counted."""
    hits, expected = PRIOR_HITS, PRIOR_HITS
    for age_bin in range(num_bins):
        hits += float(rates[node, HITS + age_bin])
        expected += float(rates[node, RISK + age_bin]) * float(rates[above, RATE + age_bin])
    ratio = hits / expected
    for age_bin in range(num_bins):
        prior = ratio * float(rates[above, RATE + age_bin])
        hits = float(rates[node, HITS + age_bin]) + PRIOR_HITS
        rates[node, RATE + age_bin] = hits / (float(rates[node, RISK + age_bin]) + PRIOR_HITS / prior)


@inlined
def _values(rates: Float32Array, node: int, scale: int, num_bins: int, exponent: float) -> None:
    """Write the weighted logarithm of the index of each age.

    Bins from the last to the first are put on a stack of stretches, each of hits expected, time held and the share that
    is still waiting at its end. A stretch whose top is worth more per time than itself takes it in.
    """
    top = 0
    for age_bin in range(num_bins - 1, -1, -1):
        rate = float(rates[node, RATE + age_bin])
        hits = -math.expm1(-rate * float(rates[scale, WIDTH + age_bin]))
        held = hits / rate
        waiting = 1.0 - hits
        while top > 0:
            next_hits = float(rates[SCRATCH, HITS + top - 1])
            next_held = float(rates[SCRATCH, RISK + top - 1])
            if next_hits * held <= hits * next_held:
                break
            hits += waiting * next_hits
            held += waiting * next_held
            waiting *= float(rates[SCRATCH, RATE + top - 1])
            top -= 1
        rates[SCRATCH, HITS + top] = hits
        rates[SCRATCH, RISK + top] = held
        rates[SCRATCH, RATE + top] = waiting
        top += 1
        rates[node, VALUE + age_bin] = exponent * math.log(hits / held)
