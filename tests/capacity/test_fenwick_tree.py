"""A Fenwick tree against a list of weights."""

from itertools import accumulate

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.planner.capacity.pool_hits import add_weight, find_unit, new_fenwick_tree, sum_through


@pytest.mark.interpreted
@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_sums_and_units_are_those_of_the_list(weights: list[int]) -> None:
    tree = new_fenwick_tree(len(weights))
    for index, weight in enumerate(weights):
        add_weight(tree, index, weight + 1)
        add_weight(tree, index, -1)
    sums = list(accumulate(weights))
    assert [sum_through(tree, index) for index in range(len(weights))] == sums
    units = [index for index, weight in enumerate(weights) for _ in range(weight)]
    assert [find_unit(tree, unit) for unit in range(1, sums[-1] + 1)] == units
