"""Promise 4, at the caller's word: cached content that is touched is evicted last, and evicted when it is asked for."""

import pytest

from pagedkv import (
    BlockSpace,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
    TenantLimits,
    hash_request_tokens,
)
from pagedkv.errors import ConfigurationError
from tests.space.spaces import allocate, cache, hit, new_space, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted

OLD, YOUNG = tokens(17), tokens(17, first=100)
MIXES: list[tuple[GroupSpec, ...]] = [
    (FullAttention(4),),
    (FullAttention(4), SlidingWindow(8, 4)),
    (FullAttention(4), RecurrentState(8, pool="device")),
]


def of_two_prompts(*groups: GroupSpec, **settings: object) -> BlockSpace:
    space = new_space(*groups, **settings)  # type: ignore[arg-type]
    for prompt in (OLD, YOUNG):
        cache(space, prompt)
    return space


def hits(space: BlockSpace) -> tuple[int, int]:
    space.check()
    return hit(space, OLD), hit(space, YOUNG)


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_what_is_touched_is_evicted_last(groups: tuple[GroupSpec, ...]) -> None:
    space = of_two_prompts(*groups)
    assert space.touch(OLD) == 16
    assert space.evict(space.num_cached_blocks() // 2) > 0
    old, young = hits(space)
    assert old == 16 > young


def test_without_a_touch_the_older_is_evicted_first_and_from_its_tail() -> None:
    space = of_two_prompts()
    expected = [(16, 16), (12, 16), (8, 16), (4, 16), (0, 16), (0, 12)]
    assert [(hits(space), space.evict(1))[0] for _ in expected] == expected


def test_the_next_victims_are_what_allocations_evict() -> None:
    space = of_two_prompts()
    num_empty = space.num_free_blocks() - space.num_cached_blocks()
    with unchanged(space):
        assert len(space.next_victims(num_empty)) == 0
        victims = space.next_victims(num_empty + 3)
    digests = [each.tobytes() for each in victims.digests]
    assert digests == hash_request_tokens(OLD, 4)[:0:-1]
    allocate(space, tokens(4 * (num_empty + 3), first=500))
    assert [space.stored_block(digest) for digest in digests] == [None] * 3
    assert hits(space) == (4, 16)


def test_a_touch_takes_nothing_and_counts_no_hit() -> None:
    space = of_two_prompts(receipts=True)
    before = space.statistics()
    space.touch(OLD)
    assert space.statistics() == before


def test_a_touched_prompt_in_use_stays_as_it_is() -> None:
    space = new_space()
    prefill(space, OLD)
    with unchanged(space):
        assert space.touch(OLD) == 16


def test_what_was_superseded_is_ordinary_again_once_it_is_touched() -> None:
    space = of_two_prompts()
    space.supersede(YOUNG)
    space.touch(YOUNG)
    space.evict(4)
    assert hits(space) == (0, 16)


def test_a_lease_outlives_other_content_that_is_evicted() -> None:
    space = of_two_prompts(leases=True)
    space.lease(OLD, 9.0)
    assert space.evict(5) == 5
    assert hits(space)[1] == 0
    assert space.evict(50) == 3
    assert hits(space) == (0, 0)


def test_evicting_leaves_what_is_free_without_content_and_what_is_in_use() -> None:
    space = of_two_prompts()
    row = prefill(space, tokens(9, first=500))
    num_free = space.num_free_blocks()
    assert space.evict(1000) == 8
    assert (space.num_free_blocks(), space.num_cached_blocks()) == (num_free, 0)
    assert space.evict(1) == 0
    assert hit(space, tokens(9, first=500)) == 8
    space.free(row)
    space.check()


def test_what_a_floor_keeps_is_not_evicted() -> None:
    tenants = {"a": TenantLimits(floor=3), "b": TenantLimits()}
    space = new_space(tenants=tenants)
    for first, tenant in ((0, "a"), (100, "b")):
        answer = space.allocate(tokens(17, first=first), tenant=tenant)
        run_step(space)
        space.free(answer.row)
    assert space.evict(1000) == 5
    assert hits(space) == (12, 0)


def test_evicted_blocks_are_told() -> None:
    space = of_two_prompts(events=True)
    space.drain_events()
    space.evict(3)
    (events,) = space.drain_events()
    assert len(events.kinds) == 3
    assert space.explain(OLD).cause.value


def test_a_pool_is_named() -> None:
    space = new_space(FullAttention(4), RecurrentState(8, pool="states"), num_blocks={"device": 60, "states": 20})
    cache(space, OLD)
    assert space.evict(9, pool="states") == 2
    assert space.num_cached_blocks() == 4
    with unchanged(space), pytest.raises(ConfigurationError, match="there is no pool"):
        space.evict(9, pool="other")


def test_the_open_step_may_still_be_planned() -> None:
    space = of_two_prompts()
    row = allocate(space, OLD)
    space.evict(8)
    run_step(space)
    assert hits(space) == (16, 0)
    space.free(row)
