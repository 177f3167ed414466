"""Hits through the block space: as lists say where one group is full, as an engine serves where there are windows."""

from collections.abc import Iterable
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks.windows.ours import our_hits
from benchmarks.windows.setting import BLOCK_SIZE, MAX_CHUNK, NUM_WINDOWS, WINDOW, two_pools
from benchmarks.windows.workloads import WORKLOADS
from pagedkv.contract.space_config import GIB, SpaceConfig
from pagedkv.contract.spec import FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.planner.capacity.curve import CacheNeed
from pagedkv.planner.capacity.model_curve import CachedModel, CachePoint, SpaceHits, measure_model_curve, space_hits
from pagedkv.planner.capacity.references import BlockReferences, ReferenceCollector
from tests.capacity import naive_cache
from tests.capacity.prompts import Prompt, prompts, references_of, request_of


def config_of(references: BlockReferences, num_blocks: int) -> SpaceConfig:
    """Configure one full group with so many usable blocks, of the trace's size."""
    return serving_one(references, (FullAttention(references.block_size),), {"device": num_blocks + 1})


def serving_one(references: BlockReferences, groups: tuple[GroupSpec, ...], num_blocks: dict[str, int]) -> SpaceConfig:
    longest = references.longest_prompt * references.block_size
    return SpaceConfig(groups, num_blocks, max_sequences=1, max_tokens=longest, watermark=0.0)


@pytest.mark.interpreted
@settings(deadline=None, max_examples=40)
@given(prompts(max_blocks=4))
def test_one_full_group_hits_as_lists_do(trace: list[Prompt]) -> None:
    ends = [[*prompt, 10**15 + place] for place, prompt in enumerate(trace)]  # what is asked for once is not hit
    references = references_of(ends)
    longest = max(map(len, ends))
    for capacity in range(longest, references.num_unique_blocks + 1):
        expected = naive_cache.lru_hits(ends, capacity)
        assert space_hits(references, config_of(references, capacity)) == SpaceHits(expected, 0)


def test_the_last_token_of_a_prompt_is_computed() -> None:
    references = references_of([[1, 2, 3], [1, 2, 3]])
    assert space_hits(references, config_of(references, 8)).num_hit_tokens == 2


def test_a_prompt_beyond_the_pool_is_not_served_and_the_others_are() -> None:
    references = references_of([[1], [2, 3, 4], [1, 5], []])
    assert space_hits(references, config_of(references, 2)) == SpaceHits(1, 1)


def blocks_of(texts: Iterable[np.ndarray]) -> BlockReferences:
    """Name the full blocks of prompts by all that comes before them."""
    ids: dict[bytes, int] = {}
    collector = ReferenceCollector("drawn")
    for text in texts:
        ends = range(BLOCK_SIZE, len(text) + 1, BLOCK_SIZE)
        path = [ids.setdefault(text[:end].tobytes(), len(ids)) for end in ends]
        collector.add(request_of(path, block_size=BLOCK_SIZE))
    return collector.references()


@pytest.mark.parametrize("is_separate", [False, True], ids=["one pool", "two pools"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_windows_hit_as_an_engine_that_serves_one_prompt_after_another(name: str, is_separate: bool) -> None:  # noqa: FBT001
    requests = list(islice(WORKLOADS[name](0), 60))
    whole = [request.prompt[: len(request.prompt) // BLOCK_SIZE * BLOCK_SIZE] for request in requests]
    references = blocks_of(whole)
    num_blocks = 1_500
    pools = ("full", "window") if is_separate else ("device", "device")
    sizes = dict(zip(pools, two_pools(num_blocks), strict=True)) if is_separate else {"device": num_blocks}
    groups = (
        FullAttention(BLOCK_SIZE, pool=pools[0]),
        *NUM_WINDOWS * (SlidingWindow(WINDOW, BLOCK_SIZE, pool=pools[1]),),
    )
    found = space_hits(references, serving_one(references, groups, sizes), MAX_CHUNK)
    one = np.zeros(1, np.int32)  # an answer's one token is never computed
    served = [type(request)(prompt, one) for request, prompt in zip(requests, whole, strict=True)]
    assert found == SpaceHits(sum(our_hits(served, num_blocks, separate=is_separate)), 0)
    assert found.num_hit_tokens > 0


def test_states_are_kept_at_the_ends_of_prompts_and_hit_there() -> None:
    references = references_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [1, 2, 9]])
    groups = (FullAttention(1), RecurrentState(100, pool="state"))
    config = serving_one(references, groups, {"device": 20, "state": 6})
    assert space_hits(references, config).num_hit_tokens == 4  # the prompt's last token has no state before it


@pytest.mark.plain_only
def test_a_curve_has_every_policy_at_every_size_in_order() -> None:
    references = references_of([[1, 2, 3], [4, 5, 6], [1, 2, 3], [1, 2, 3, 7]])
    shown: list[int] = []
    points = [CachePoint(2.0, {"device": 9}), CachePoint(1.0, {"device": 4})]
    model = CachedModel("small", (FullAttention(1),), points)
    curve = measure_model_curve(references, model, ["lru", "fifo"], shown.append)
    assert shown == [1, 2, 3, 4]
    assert [point.memory_gib for point in curve.points] == [1.0, 2.0]
    assert curve.need.cache == CacheNeed(9, None, 2 * GIB, "more than")  # 5 of 6 tokens are not 99 %
    assert curve.as_dict() == {
        "need": curve.need.as_dict(),
        "model": "small",
        "block_size": 1,
        "num_requests": 4,
        "num_prompt_tokens": 13,
        "ideal_hit_tokens": 6,
        "points": [
            {
                "memory_gib": 1.0,
                "num_blocks": {"device": 4},
                "hit_tokens": {"lru": 0, "fifo": 0},
                "num_unserved": {"lru": 1, "fifo": 1},
            },
            {
                "memory_gib": 2.0,
                "num_blocks": {"device": 9},
                "hit_tokens": {"lru": 5, "fifo": 5},
                "num_unserved": {"lru": 0, "fifo": 0},
            },
        ],
    }
    assert curve.hit_ratio("lru", 1) == 5 / 13
