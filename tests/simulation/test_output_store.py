"""Outputs in one array against a dictionary of them, through any order of puts, drops and moves."""

import numpy as np
from hypothesis import given, strategies as st

from pagedkv.simulation.virtual_clock import LEAST_ROOM, OutputStore


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, LEAST_ROOM)), max_size=40), st.integers(0, 2**32 - 1))
def test_tokens_are_those_that_were_put(changes: list[tuple[int, int]], seed: int) -> None:
    store, expected = OutputStore(), dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]]()
    random = np.random.default_rng(seed)
    for number, length in changes:
        if length == 0:
            store.drop(number)
            expected.pop(number, None)
        else:
            expected[number] = random.integers(2**31, size=length, dtype=np.int32)
            store.put(number, expected[number])
        for each, tokens in expected.items():
            first = int(random.integers(len(tokens)))
            assert (store.of(each, first, 3) == tokens[first : first + 3]).all()
        if expected:
            numbers = list(expected)
            count = min(4, *map(len, expected.values()))
            firsts = np.array([random.integers(len(expected[each]) - count + 1) for each in numbers])
            together = store.together(numbers, firsts, count)
            assert together.shape == (count, len(numbers))
            for place, each in enumerate(numbers):
                assert (together[:, place] == expected[each][firsts[place] : firsts[place] + count]).all()
