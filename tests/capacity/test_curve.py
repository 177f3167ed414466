"""The curve as a whole: capacities, gaps, what is refused, and the two LRUs that watch each other."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.contract.arrays import Int64Array
from pagedkv.errors import ConfigurationError
from pagedkv.planner.capacity import curve
from pagedkv.planner.capacity.curve import OPTIMAL, POLICIES, default_capacities, measure_curve
from pagedkv.planner.capacity.pool_hits import Pause
from pagedkv.planner.capacity.references import BlockReferences
from tests.capacity import naive_cache
from tests.capacity.prompts import Prompt, prompts, references_of

pytestmark = pytest.mark.plain_only


@settings(deadline=None)
@given(prompts(), st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_gaps_and_hits_add_up_to_all_references(trace: list[Prompt], capacities: list[int]) -> None:
    result = measure_curve(references_of(trace), capacities)
    assert result.capacities == sorted(set(capacities))
    assert result.ideal_hits == result.ideal_hit_tokens == sum(naive_cache.ideal_hits(trace))
    assert result.num_block_refs == result.num_prompt_tokens == sum(map(len, trace))
    for capacity in result.capacities:
        assert result.hits["lru"][capacity] == naive_cache.lru_hits(trace, capacity)
        assert result.hits["optimal"][capacity] == naive_cache.min_hits(trace, capacity)
        shares = [
            result.hit_ratio("lru", capacity),
            result.policy_gap("lru", capacity),
            result.capacity_gap(capacity),
            result.content_ceiling,
        ]
        assert min(shares) >= 0
        assert sum(shares) == pytest.approx(1)


@settings(deadline=None)
@given(prompts())
def test_the_capacity_for_a_share_is_the_first_that_reaches_it(trace: list[Prompt]) -> None:
    result = measure_curve(references_of(trace), [1])
    hits = [naive_cache.lru_hits(trace, capacity) for capacity in range(1, result.num_unique_blocks + 1)]
    for share, percent in (("0.9", 90), ("0.99", 99), ("1.0", 100)):
        first = next(capacity for capacity, num in enumerate(hits, 1) if 100 * num >= percent * result.ideal_hits)
        assert result.capacity_for[share] == first


def test_the_default_capacities_run_from_the_longest_prompt_to_all_blocks() -> None:
    trace = [[2 * number, 2 * number + 1] for number in range(512)] * 2
    assert default_capacities(references_of(trace)) == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def test_the_default_capacities_begin_where_half_of_the_ideal_is_reached_if_that_takes_less() -> None:
    trace = [[*range(100)], [100], [100], *([[0, 1]] * 500)]
    assert default_capacities(references_of(trace))[0] == 2


@settings(deadline=None)
@given(prompts())
def test_the_default_capacities_of_small_traces_are_fewer(trace: list[Prompt]) -> None:
    references = references_of(trace)
    capacities = default_capacities(references)
    assert capacities == sorted(set(capacities))
    assert capacities[-1] == references.num_unique_blocks
    assert 1 <= capacities[0] <= references.longest_prompt
    assert len(capacities) <= 10


def test_progress_is_told_after_each_point() -> None:
    told: list[int] = []
    measure_curve(references_of([[1, 2], [1, 3]]), [3, 1, 2, 1], show=told.append)
    assert told == sorted(set(told))
    assert told[-1] == 3 * len(POLICIES)


def test_a_further_policy_gets_its_hits_and_its_gap() -> None:
    policies = {
        "none": _no_hits,
        "lru": POLICIES["lru"],
        OPTIMAL: POLICIES[OPTIMAL],
    }
    result = measure_curve(references_of([[1, 2], [1, 3]]), [2], policies)
    assert result.as_dict()["policies"] == {
        "none": {"2": 0},
        "lru": {"2": 1},
        "optimal": {"2": 1},
    }
    assert result.policy_gap("none", 2) == 1 / 4


def _no_hits(references: BlockReferences, _capacity: int, _pause: Pause) -> Int64Array:
    return np.zeros(references.num_requests, np.int64)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_that_is_not_positive_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigurationError, match=f"a capacity must be at least 1 block, got {capacity}"):
        measure_curve(references_of([[1]]), [5, capacity])


def test_two_lrus_that_disagree_stop_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "lru_hits_by_capacity", lambda _: np.array([0, 7, 7, 7]))
    with pytest.raises(AssertionError, match="the pool of 2 blocks had 1 hits, stack distances 7"):
        measure_curve(references_of([[1, 2], [1, 3]]), [2])
