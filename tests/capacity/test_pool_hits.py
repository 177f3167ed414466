"""LRU three times: through the production pool, by stack distances, and played with lists."""

import pytest
from hypothesis import given, settings

from pagedkv.planner.capacity.pool_hits import lru_hits_by_capacity, pool_hits
from tests.capacity import naive_cache
from tests.capacity.prompts import Prompt, prompts, references_of


@pytest.mark.interpreted
@settings(deadline=None)
@given(prompts())
def test_pool_stack_distances_and_lists_agree_at_every_capacity(trace: list[Prompt]) -> None:
    references = references_of(trace)
    capacities = range(1, references.num_unique_blocks + 1)
    played = [naive_cache.lru_hits(trace, capacity) for capacity in capacities]
    assert [pool_hits(references, capacity) for capacity in capacities] == played
    assert lru_hits_by_capacity(references).tolist() == [0, *played]


@settings(deadline=None)
@given(prompts(max_prompts=30, max_blocks=7))
def test_hits_never_fall_as_capacity_grows_and_end_at_the_ideal(trace: list[Prompt]) -> None:
    hits = lru_hits_by_capacity(references_of(trace)).tolist()
    assert hits == sorted(hits)
    assert hits[-1] == sum(naive_cache.ideal_hits(trace))


def test_a_capacity_beyond_all_blocks_is_that_of_all_blocks() -> None:
    references = references_of([[1, 2], [1, 3], [1, 2]])
    assert pool_hits(references, 10**15) == pool_hits(references, 3) == 3


def test_a_prompt_longer_than_the_cache_keeps_its_head() -> None:
    references = references_of([[1, 2, 3, 4], [1, 2, 3], [5], [1, 2]])
    assert [pool_hits(references, capacity) for capacity in (1, 2, 3, 4, 5)] == [1, 3, 5, 5, 5]


def test_eviction_of_heads_first_would_be_noticed() -> None:
    trace = [[1, 2], [3], [1, 2]]
    assert naive_cache.lru_hits(trace, 2) == 1
    assert naive_cache.lru_hits(trace, 2, tail_first=False) == 0
    assert pool_hits(references_of(trace), 2) == 1
