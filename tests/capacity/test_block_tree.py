"""BlockTree: driven against a dictionary of whole prefixes."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.planner.capacity.references import ROOT, BlockTree
from tests.capacity.prompts import Prompt, prompts


def insert(tree: BlockTree, prompt: Prompt) -> int | None:
    return tree.insert(np.array(prompt, np.int64))


@pytest.mark.interpreted
@settings(deadline=None)  # the first example may have to wait for loops to compile
@given(prompts())
def test_blocks_are_numbered_as_their_prefixes_first_appear(trace: list[Prompt]) -> None:
    tree = BlockTree()
    numbers: dict[tuple[int, ...], int] = {(): ROOT}
    for prompt in trace:
        for end in range(len(prompt)):
            numbers.setdefault(tuple(prompt[: end + 1]), len(numbers))
        assert insert(tree, prompt) == numbers[tuple(prompt)]
    assert tree.parents().tolist() == [numbers[prefix[:-1]] for prefix in numbers]


def is_chained(trace: list[Prompt]) -> bool:
    """Tell whether each id follows the same ids wherever it stands."""
    prefixes: dict[int, list[int]] = {}
    return all(
        prefixes.setdefault(block_id, prompt[:index]) == prompt[:index]
        for prompt in trace
        for index, block_id in enumerate(prompt)
    )


@pytest.mark.interpreted
@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=4))
def test_ids_that_stand_in_two_places_are_refused_and_nothing_else_is(trace: list[Prompt]) -> None:
    tree, accepted = BlockTree(), list[Prompt]()
    for prompt in trace:
        before = tree.parents().tolist()
        if insert(tree, prompt) is None:
            assert not is_chained([*accepted, prompt])
            assert tree.parents().tolist() == before
        else:
            accepted.append(prompt)
            assert is_chained(accepted)


@pytest.mark.parametrize("prompt", [[2], [1, 3], [1, 2, 1], [7, 2], [7, 7], [3, 2], [1, 2, 3, 3], [7, 8, 7]])
def test_each_way_to_stand_in_two_places_is_noticed(prompt: Prompt) -> None:
    tree = BlockTree()
    insert(tree, [1, 2, 3])
    assert insert(tree, prompt) is None
    assert [insert(tree, [1, 2, 3]), insert(tree, [1, 2, 4]), insert(tree, [7, 8])] == [3, 4, 6]
