"""The functions that curves of the learning policy are made of, beside those of the C library."""

import math

import numpy as np
import pytest

from pagedkv.blocks.eviction.hazard import learning
from pagedkv.blocks.eviction.hazard.layout import (
    HAS_DATA,
    HITS,
    LEAVES_A,
    NUM_SECOND_BINS,
    PARENTS,
    RATE,
    ROOT_A,
    VALUE,
)
from pagedkv.blocks.eviction.hazard.learning import make_curves
from pagedkv.blocks.eviction.hazard.policy import HAZARD

pytestmark = pytest.mark.plain_only


@pytest.mark.parametrize("exponent", [0.0, 1e-9, 1e-5, *np.linspace(0.01, learning.LARGEST_EXPONENT, 200).tolist()])
def test_the_power_series_is_the_exponential(exponent: float) -> None:
    assert learning._exponential(exponent) == pytest.approx(math.exp(-exponent), rel=1e-9)


@pytest.mark.parametrize(
    "number", [1.0, 2.0, np.nextafter(np.float32(2), np.float32(1)), *np.geomspace(1e-26, 1e5, 200)]
)
def test_the_power_series_is_the_logarithm(number: float) -> None:
    taken = float(np.float32(number))
    assert learning._logarithm(taken) == pytest.approx(math.log(taken), rel=1e-6, abs=1e-7)


def test_a_clock_that_stands_still_leaves_rates_and_values_that_are_numbers() -> None:
    """All hits at age 0, and no time at risk: rates grew level by level until they overflowed."""
    arrays = HAZARD.new_state(8)
    path = [LEAVES_A]
    while path[-1] != ROOT_A:
        path.append(int(arrays.counts[PARENTS + path[-1]]))
    for node in reversed(path):
        arrays.rates[node, HITS] = 1e8
        arrays.counts[HAS_DATA + node] = 1
        make_curves(arrays.counts, arrays.rates, node)
        assert (arrays.rates[node, RATE : RATE + NUM_SECOND_BINS] > 0).all()
        assert np.isfinite(arrays.rates[node, RATE : VALUE + NUM_SECOND_BINS]).all()
