"""The functions that curves of the learning policy are made of, beside those of the C library."""

import math

import numpy as np
import pytest

from pagedkv.pool.eviction.hazard import learning


@pytest.mark.interpreted
@pytest.mark.parametrize("exponent", [0.0, 1e-9, 1e-5, *np.linspace(0.01, learning.LARGEST_EXPONENT, 200).tolist()])
def test_the_power_series_is_the_exponential(exponent: float) -> None:
    assert learning._exponential(exponent) == pytest.approx(math.exp(-exponent), rel=1e-9)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "number", [1.0, 2.0, np.nextafter(np.float32(2), np.float32(1)), *np.geomspace(1e-26, 1e5, 200)]
)
def test_the_power_series_is_the_logarithm(number: float) -> None:
    taken = float(np.float32(number))
    assert learning._logarithm(taken) == pytest.approx(math.log(taken), rel=1e-6, abs=1e-7)
