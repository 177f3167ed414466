"""Least squares without negative coefficients, against all choices of columns."""

from itertools import chain, combinations

import numpy as np
from hypothesis import given, strategies as st

from pagedkv.simulation.calibration.fitting import nonnegative_least_squares


@given(seed=st.integers(0, 10_000), num_columns=st.integers(1, 4), num_rows=st.integers(4, 12))
def test_no_choice_of_columns_comes_nearer(seed: int, num_columns: int, num_rows: int) -> None:
    random = np.random.default_rng(seed)
    columns = random.standard_normal((num_rows, num_columns)) * 10.0 ** random.integers(-9, 9, num_columns)
    wanted = random.standard_normal(num_rows)
    found = nonnegative_least_squares(columns, wanted)
    assert (found >= 0).all()
    error = np.linalg.norm(columns @ found - wanted)
    sizes = range(num_columns + 1)
    for chosen in chain.from_iterable(combinations(range(num_columns), size) for size in sizes):
        part = columns[:, chosen]
        plain = np.linalg.lstsq(part, wanted, rcond=None)[0] if chosen else np.zeros(0)
        if (plain >= 0).all():
            assert error <= np.linalg.norm(part @ plain - wanted) + 1e-9


def test_of_columns_that_say_the_same_the_first_gets_it_all() -> None:
    assert nonnegative_least_squares(np.ones((5, 2)), np.full(5, 3.0)).round(9).tolist() == [3.0, 0.0]


def test_nothing_is_explained_by_columns_of_zeros() -> None:
    assert nonnegative_least_squares(np.zeros((3, 2)), np.ones(3)).tolist() == [0.0, 0.0]
