"""How much KV memory is needed, in the same words wherever it is told."""

import pytest

from pagedkv.contract.space_config import GIB
from pagedkv.planner.capacity.curve import CacheNeed, MemoryNeed, cache_need, live_need

CACHE = CacheNeed(8000, 16, 8 * GIB)


def test_both_sizes_are_told_in_gib_and_blocks_with_what_they_rest_on() -> None:
    live = live_need(
        {"full": 100, "window": 28}, {"full": 500, "window": 500}, {"full": GIB // 64, "window": 0}, "a test"
    )
    told = MemoryNeed(live, CACHE).sentence
    assert told == (
        "KV memory needed: 1.56 GiB (128 blocks) for requests in flight at their peak; 8 GiB (8,000 blocks of 16 "
        "tokens) with the cache, for 99 % of the hits of an unbounded one (by a test; LRU, prompts one at a time)"
    )


def test_a_full_pool_may_have_held_requests_back() -> None:
    assert (
        "at least 5 blocks (name a model for GiB)" in MemoryNeed(live_need({"full": 5}, {"full": 5}, {}, "x")).sentence
    )
    assert "at least" not in MemoryNeed(live_need({"full": 5}, {"full": 6}, {}, "x")).sentence
    nearly = MemoryNeed(live_need({"full": 10_224}, {"full": 10_239}, {}, "x")).sentence
    assert "at least" in nearly, "requests wait before the last block is taken"


def test_what_is_missing_is_told() -> None:
    assert MemoryNeed(cache=CACHE).sentence.endswith("is told by pagedkv plan and pagedkv replay")
    assert MemoryNeed().sentence.startswith("KV memory needed: unknown")
    assert "more than 8 GiB" in MemoryNeed(cache=CacheNeed(8000, None, 8 * GIB, "more than")).sentence


@pytest.mark.parametrize(("token_nbytes", "nbytes"), [(None, None), (4, 9 * 16 * 4)])
def test_the_cache_is_read_from_a_curve(token_nbytes: int | None, nbytes: int | None) -> None:
    assert cache_need({"0.9": 5, "0.99": 9}, 16, token_nbytes) == CacheNeed(9, 16, nbytes)
    assert cache_need({}, 16, token_nbytes) is None
