"""The offline optimum: against every way there is to keep blocks, and against Belady's rule played with sets."""

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.planner.capacity.pool_hits import optimal_hits, pool_hits
from tests.capacity.naive_cache import best_hits, ideal_hits, min_hits
from tests.capacity.prompts import Prompt, prompts, references_of


@pytest.mark.interpreted
@settings(deadline=None, max_examples=60)
@given(prompts(max_prompts=8, max_blocks=3), st.integers(1, 4))
def test_no_way_to_keep_blocks_has_more_hits(trace: list[Prompt], capacity: int) -> None:
    """And one has as many. What is tried need not be prefixes."""
    assert optimal_hits(references_of(trace), capacity) == best_hits(trace, capacity, must_hold=False)


@settings(deadline=None, max_examples=60)
@given(prompts(max_prompts=8, max_blocks=3), st.integers(1, 4))
def test_policies_that_must_hold_each_prompt_stay_between_lru_and_the_optimum(
    trace: list[Prompt], capacity: int
) -> None:
    references = references_of(trace)
    best = best_hits(trace, capacity, must_hold=True)
    assert 0 <= pool_hits(references, capacity) <= best <= optimal_hits(references, capacity)


@pytest.mark.interpreted
@settings(deadline=None)
@given(prompts(max_prompts=30, max_blocks=7))
def test_the_optimum_is_beladys_rule_at_every_capacity(trace: list[Prompt]) -> None:
    references = references_of(trace)
    for capacity in range(1, references.num_unique_blocks + 1):
        hits = optimal_hits(references, capacity)
        assert hits == min_hits(trace, capacity)
        assert pool_hits(references, capacity) <= hits <= sum(ideal_hits(trace))


@settings(deadline=None)
@given(prompts(max_prompts=30, max_blocks=7))
def test_hits_never_fall_as_capacity_grows(trace: list[Prompt]) -> None:
    references = references_of(trace)
    hits = [optimal_hits(references, capacity) for capacity in range(1, references.num_unique_blocks + 1)]
    assert hits == sorted(hits)
    assert hits[-1] == optimal_hits(references, 10**30) == sum(ideal_hits(trace))


def test_bypass_may_hit_where_no_policy_that_holds_prompts_can() -> None:
    trace = [[1], [2], [1]]
    assert optimal_hits(references_of(trace), 1) == 1
    assert best_hits(trace, 1, must_hold=True) == 0
