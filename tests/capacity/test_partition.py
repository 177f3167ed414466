"""Hits by tenant and by window: each part's, in the cache of all, held against caches that are lists."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.blocks.eviction.registry import policy_named
from pagedkv.contract.spec import FullAttention
from pagedkv.planner.capacity.curve import OPTIMAL, POLICIES, measure_curve
from pagedkv.planner.capacity.model_curve import CachedModel, CachePoint, measure_model_curve
from pagedkv.planner.capacity.pool_hits import pool_hits
from pagedkv.planner.capacity.references import Partition, ReferenceCollector
from tests.capacity import naive_cache
from tests.capacity.prompts import Prompt, prompts, references_of, request_of

pytestmark = pytest.mark.plain_only


@settings(deadline=None)
@given(prompts(), st.integers(1, 9), st.randoms(use_true_random=False))
def test_parts_have_the_hits_of_their_own_requests(trace: list[Prompt], capacity: int, random: st.DataObject) -> None:
    numbers = np.array([random.randrange(3) for _ in trace], np.int32)  # type: ignore[attr-defined] # a Random
    partition = Partition("tenant", ["a", "b", "c"], numbers)
    curve = measure_curve(references_of(trace), [capacity, capacity + 1], partitions=[partition])
    hits_of_all = [naive_cache.lru_hits(trace[:end], capacity + 1) for end in range(len(trace) + 1)]
    hits = [after - before for before, after in pairwise(hits_of_all)]
    ideal = naive_cache.ideal_hits(trace)
    for number, part in enumerate(curve.parts):
        mine = [place for place in range(len(trace)) if numbers[place] == number]
        assert (part.kind, part.name) == ("tenant", "abc"[number])
        assert part.num_requests == len(mine)
        assert part.num_block_refs == part.num_prompt_tokens == sum(len(trace[place]) for place in mine)
        assert part.ideal_hits == part.ideal_hit_tokens == sum(ideal[place] for place in mine)
        assert part.hits["lru"][capacity + 1] == sum(hits[place] for place in mine)
    for policy in (*POLICIES, OPTIMAL):
        for size in (capacity, capacity + 1):
            assert sum(part.hits[policy][size] for part in curve.parts) == curve.hits[policy][size]
    assert curve.hits["fifo"][capacity] == pool_hits(references_of(trace), capacity, policy_named("fifo"))


def test_parts_of_a_models_curve_add_up_and_tell_one_tenant_from_another() -> None:
    trace = [[0, 1, 2], [5, 6], [0, 1, 3], [5, 6], [0, 1, 2]]
    partition = Partition("tenant", ["a", "b"], np.array([0, 1, 0, 1, 0], np.int32))
    model = CachedModel("tiny", (FullAttention(block_size=1),), [CachePoint(1.0, {"device": 21})])
    curve = measure_model_curve(references_of(trace), model, ["lru"], partitions=[partition])
    a, b = curve.parts
    # A prompt's last token is always computed: 2 of the third, 1 of the fourth, 2 of the fifth.
    assert (a.hit_tokens["lru"], b.hit_tokens["lru"]) == ([4], [1])
    assert (a.num_prompt_tokens, b.num_prompt_tokens, a.num_requests, b.num_requests) == (9, 4, 3, 2)
    assert curve.hits["lru"][0].num_hit_tokens == 5
    assert curve.as_dict()["by_tenant"] == [a.as_dict(), b.as_dict()]


@pytest.mark.parametrize("names", [(None, None), ("a", "b", None), (None, None, "b", None, "a"), (None, "a")])
def test_requests_before_the_first_that_names_a_tenant_are_nobodys(names: tuple[str | None, ...]) -> None:
    collector = ReferenceCollector("trace")
    for name in names:
        collector.add(replace(request_of([1, 2]), tenant=name))
    references = collector.references()
    told = [references.tenants[number] for number in references.tenant_numbers]
    assert told == ([name or "(none)" for name in names] if any(names) else [])
