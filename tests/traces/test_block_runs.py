"""Run-length coded ids, and the block size that the rows imply."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv.errors import TraceError
from pagedkv.planner.traces.lines import Line
from pagedkv.planner.traces.request import MAX_BLOCK_ID, InferredBlockSize, count_ids, expand_runs, run_lengths

LINE = Line("trace", 1, "")


def runs_of(ids: list[int]) -> list[tuple[int, int]]:
    """Code ids as the longest runs."""
    starts = [0, *(i + 1 for i, (left, right) in enumerate(pairwise(ids)) if right != left + 1), len(ids)]
    return [(ids[start], end - start) for start, end in pairwise(starts) if end > start]


@given(st.lists(st.integers(0, 20) | st.integers(0, MAX_BLOCK_ID)))
def test_runs_expand_to_the_ids_they_code(ids: list[int]) -> None:
    runs = runs_of(ids)
    assert expand_runs(runs).tolist() == ids
    assert count_ids(LINE, runs) == len(ids)
    assert run_lengths(np.array(ids, np.int64)) == runs


@given(st.integers(0, 12), st.lists(st.integers(1, 10_000), min_size=1))
def test_the_block_size_is_found_from_the_rows(exponent: int, lengths: list[int]) -> None:
    block_size = 1 << exponent
    inferred = InferredBlockSize(None)
    learnt = [inferred.learn(LINE, length, length // block_size) for length in lengths]
    first_with_ids = next((i for i, length in enumerate(lengths) if length >= block_size), len(lengths))
    assert learnt == [0] * first_with_ids + [block_size] * (len(lengths) - first_with_ids)


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_a_block_size_is_only_inferred_if_it_explains_the_row(input_length: int, num_ids: int) -> None:
    explanations = [1 << e for e in range(11) if input_length // (1 << e) == num_ids]
    assert len(explanations) <= 1
    if explanations:
        assert InferredBlockSize(None).learn(LINE, input_length, num_ids) == explanations[0]
    else:
        with pytest.raises(TraceError):
            InferredBlockSize(None).learn(LINE, input_length, num_ids)
