"""Promise 27: caps and floors by tenant, and which tenant a block is charged to."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    AllocStatus,
    FullAttention,
    GroupSpec,
    RecurrentState,
    TenantLimits,
)
from pagedkv.errors import ConfigurationError
from tests.compiling import TESTED_POLICIES
from tests.space.spaces import allocate, hit, new_space, only_pool, run_step, tokens, unchanged
from tests.space.tenancy import MIXES, cache_for, has, run_for, share, shared_by, short

pytestmark = pytest.mark.interpreted

PROMPT, OTHER, THIRD = tokens(17), tokens(17, first=100), tokens(17, first=200)  # 4 blocks are cached of each, of 5


# Caps


@pytest.mark.parametrize("eviction", TESTED_POLICIES)
@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_a_tenant_at_its_cap_evicts_its_own(groups: tuple[GroupSpec, ...], eviction: str) -> None:
    space = shared_by(*groups, a=TenantLimits(cap=24), eviction=eviction)
    cache_for(space, PROMPT, "b")
    cache_for(space, OTHER, None)
    for number in range(12):
        cache_for(space, tokens(17, first=1000 + 100 * number), "a")
        its = share(space, "a")
        assert its.num_taken + its.num_cached <= 24
    assert its.num_cached > 12, "it caches what its cap has room for"
    assert hit(space, tokens(17, first=2100)) == 16
    assert hit(space, tokens(17, first=1000)) == 0
    assert (hit(space, PROMPT), hit(space, OTHER)) == (16, 16), "others lose nothing"
    assert space.num_free_blocks() - space.num_cached_blocks() > 20, "though there are empty blocks"


def test_promise_27_a_tenant_that_is_just_within_its_cap_evicts_nothing() -> None:
    """Neither where it takes hits, nor where its cap is lowered to what it has."""
    space = shared_by(a=TenantLimits(cap=9), b=TenantLimits())
    cache_for(space, PROMPT, "b")
    cache_for(space, OTHER, "a")
    row = run_for(space, PROMPT, "a")
    assert has(space, "a") == (5, 4)
    assert hit(space, OTHER) == 16
    space.free(row)
    space.set_tenant("a", TenantLimits(cap=sum(has(space, "a"))))
    assert (hit(space, PROMPT), hit(space, OTHER)) == (16, 16)


def test_promise_27_of_its_own_the_least_recently_used_goes_first_and_the_tail_before_the_head() -> None:
    space = shared_by(a=TenantLimits(cap=9))
    cache_for(space, PROMPT, "a")
    cache_for(space, OTHER, "a")
    assert has(space, "a") == (0, 8)
    found = []
    for first in (1000, 2000):
        row = run_for(space, tokens(9, first=first), "a")
        found.append([hit(space, PROMPT), hit(space, OTHER)])
        space.free(row)
    assert found == [[8, 16], [0, 16]]


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_a_tenant_that_has_nothing_left_to_evict_is_short_and_told_why(
    groups: tuple[GroupSpec, ...],
) -> None:
    space = shared_by(*groups, a=TenantLimits(cap=16))
    row = run_for(space, PROMPT, "a")
    held = share(space, "a").num_taken
    with unchanged(space):
        its = short(space, space.allocate(tokens(60, first=500), tenant="a"))
    assert its == share(space, "a")
    assert (its.tenant, its.cap, its.num_taken, its.num_permitted) == ("a", 16, held, 16 - held)
    with unchanged(space):
        answer = space.append([row], tokens(60, first=900), [60])
        assert "tenant 'a' may take" in str(answer)
        assert not space.can_append([row], [60])
    assert space.allocate(tokens(60, first=500), tenant="b")
    space.check()


def test_promise_27_can_allocate_counts_what_the_tenant_may_take() -> None:
    space = shared_by(a=TenantLimits(cap=10), b=TenantLimits(floor=30), num_blocks=101)
    whole = {length: space.can_allocate(tokens(length, first=500), tenant="a") for length in (40, 41)}
    assert whole == {40: AllocStatus.OK, 41: AllocStatus.NEVER}
    row = run_for(space, PROMPT, "a")
    assert space.can_allocate(tokens(20, first=500), tenant="a") is AllocStatus.OK
    assert space.can_allocate(tokens(21, first=500), tenant="a") is AllocStatus.LATER
    assert space.can_allocate(tokens(40, first=500), tenant="a") is AllocStatus.LATER
    assert space.can_allocate(tokens(20, first=500), tenant="a", num_lookahead=1) is AllocStatus.LATER
    assert space.can_allocate(tokens(17, first=500), tenant="a", num_lookahead=2, num_sequences=4) is AllocStatus.LATER
    assert space.can_allocate(tokens(41, first=500), tenant="a") is AllocStatus.NEVER
    space.free(row)
    assert space.can_allocate(tokens(40, first=500), tenant="a") is AllocStatus.OK, "what it has cached is its to take"
    others = {length: space.can_allocate(tokens(length, first=500)) for length in (280, 281)}
    assert others == {280: AllocStatus.OK, 281: AllocStatus.NEVER}, "b's floor is never anybody else's"
    assert space.can_allocate(tokens(400, first=500), tenant="b") is AllocStatus.OK
    run_for(space, tokens(280, first=500), None)
    assert space.can_allocate(tokens(120, first=900), tenant="b") is AllocStatus.OK
    assert space.can_allocate(tokens(121, first=900), tenant="b") is AllocStatus.LATER
    assert space.can_allocate(tokens(1, first=900), tenant="a") is AllocStatus.LATER


def test_promise_27_the_watermark_is_the_pools_and_does_not_lessen_a_cap() -> None:
    space = shared_by(a=TenantLimits(cap=10), num_blocks=101, watermark=0.5)
    run_for(space, PROMPT, "b")
    assert space.can_allocate(tokens(40, first=500), tenant="a") is AllocStatus.OK
    run_for(space, tokens(180, first=900), "b")
    assert space.can_allocate(tokens(4, first=500), tenant="a") is AllocStatus.LATER
    assert isinstance(space.allocate(tokens(4, first=500), tenant="a"), Allocation), "it bars admission, and no more"


@pytest.mark.parametrize("num_lookahead", [0, 3])
def test_promise_27_growing_is_charged_to_each_rows_tenant_all_or_nothing(num_lookahead: int) -> None:
    space = shared_by(a=TenantLimits(cap=6), b=TenantLimits(cap=12))
    rows = [run_for(space, tokens(4, first=first), tenant) for first, tenant in ((0, "a"), (100, "b"), (200, None))]
    assert [has(space, tenant)[0] for tenant in ("a", "b", None)] == [1, 1, 1]
    with unchanged(space):
        its = short(space, space.append(rows, tokens(84), [28] * 3, num_lookahead=num_lookahead))
        assert (its.tenant, its.num_permitted) == ("a", 5)
        assert not space.can_append(rows, [28] * 3, num_lookahead=num_lookahead)
    assert space.can_append(rows, [17] * 3, num_lookahead=num_lookahead)
    assert space.append(rows, tokens(51), [17] * 3, num_lookahead=num_lookahead) is None
    run_step(space)
    space.check()
    assert [has(space, tenant)[0] for tenant in ("a", "b", None)] == [6, 6, 6]
    space.truncate(rows, [4, 4, 4])
    assert [sum(has(space, tenant)) for tenant in ("a", "b", None)] == [5, 5, 5], "4 blocks that it filled are cached"
    space.free(rows)
    space.check()


def test_promise_27_forks_and_copies_are_their_parents_tenants() -> None:
    space = shared_by(a=TenantLimits(cap=7))
    row = run_for(space, tokens(18), "a")
    children = space.fork(row, 2).tolist()
    assert has(space, "a") == (5, 0), "a fork takes no block"
    assert space.append(children, [1, 2]) is None
    run_step(space)
    assert has(space, "a") == (7, 0)
    with unchanged(space):
        its = short(space, space.fork(row, at=10))
        assert (its.tenant, its.num_permitted) == ("a", 0)
    space.free(children[0])
    assert isinstance(space.fork(row, at=10), np.ndarray)
    run_step(space)
    space.check()
    assert sum(has(space, "a")) == 7


# Floors


@pytest.mark.parametrize("eviction", TESTED_POLICIES)
@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_what_a_floor_promises_is_evicted_for_nobody_else(
    groups: tuple[GroupSpec, ...], eviction: str
) -> None:
    space = shared_by(*groups, a=TenantLimits(floor=30), num_blocks=61, eviction=eviction)
    cache_for(space, PROMPT, "a")
    kept = has(space, "a")
    assert kept[1] <= 30
    for number in range(12):
        cache_for(space, tokens(33, first=1000 + 100 * number), ("b", None)[number % 2])
    assert has(space, "a") == kept
    assert hit(space, PROMPT) == 16
    for number in range(12):
        cache_for(space, tokens(33, first=5000 + 100 * number), "a")
    assert hit(space, PROMPT) == 0, "its own blocks it evicts as it needs"
    assert share(space, "a").num_cached > 30
    for number in range(12):
        cache_for(space, tokens(33, first=9000 + 100 * number), "b")
    assert share(space, "a").num_cached >= 30, "what is above the floor goes, and no more"
    assert share(space, "b").num_cached > 20


def test_promise_27_a_floor_can_be_taken_whatever_others_do() -> None:
    space = shared_by(a=TenantLimits(floor=30), num_blocks=61)
    most = next(n for n in range(240, 0, -1) if space.can_allocate(tokens(n, first=900)) is AllocStatus.OK)
    assert most == 120
    cache_for(space, tokens(120, first=5000), "b")
    assert share(space, "b").num_cached == 30, "what others may take bounds what they can cache at a time"
    cache_for(space, tokens(81, first=7000), None)
    row = run_for(space, tokens(120, first=900), "b")
    with unchanged(space):
        its = short(space, space.append([row], [1]))
        assert (its.tenant, its.num_permitted) == ("b", 0)
        short(space, space.allocate([1], tenant=None))
    assert isinstance(space.allocate(tokens(120, first=3000), tenant="a"), Allocation)
    space.check()
    assert share(space, "a").num_taken == 30
    assert space.num_free_blocks() == 0


def test_promise_27_victims_are_taken_in_turn_among_what_may_go() -> None:
    space = shared_by(a=TenantLimits(floor=5), num_blocks=16)
    for first, tenant in ((0, "a"), (100, "b"), (200, None), (300, "a")):
        cache_for(space, tokens(13, first=first), tenant)  # 3 blocks each: a has one more than its floor
    found = []
    for number in range(3):
        space.free(run_for(space, tokens(9, first=1000 + 10 * number), "b"))
        found.append([hit(space, tokens(13, first=first)) for first in (0, 100, 200, 300)])
    assert found == [[12, 12, 12, 12], [8, 8, 12, 12], [8, 0, 12, 12]]
    assert sum(has(space, "a")) == 5


# Leases


def test_promise_27_at_its_cap_a_tenant_gives_its_leases_up_last_the_largest_first() -> None:
    space = shared_by(a=TenantLimits(cap=13), leases=True)
    for first, end in ((0, 20), (100, 30), (200, None)):
        space.free([run_for(space, tokens(17, first=first), "a")], keep_until_s=end)
    space.free([run_for(space, tokens(17, first=300), "b")], keep_until_s=90)
    found = []
    for number in range(3):
        cache_for(space, tokens(13, first=1000 + 100 * number), "a")
        found.append([hit(space, tokens(17, first=first)) for first in (0, 100, 200, 300)])
    row = run_for(space, tokens(33, first=5000), "a")
    found.append([hit(space, tokens(17, first=first)) for first in (0, 100, 200, 300)])
    assert found == [[16, 16, 4, 16], [16, 16, 0, 16], [16, 16, 0, 16], [16, 0, 0, 16]]
    space.free(row)
    space.check()


def test_promise_27_leases_of_a_floor_stay_and_others_go_when_nothing_else_is_left() -> None:
    space = shared_by(a=TenantLimits(floor=4), num_blocks=17, leases=True)
    for first, tenant, end in ((0, "a", 90), (100, "b", 20), (200, None, 30)):
        space.free([run_for(space, tokens(17, first=first), tenant)], keep_until_s=end)
    found = []
    for length in (16, 32, 48):
        row = run_for(space, tokens(length, first=5000), "b")
        found.append([hit(space, tokens(17, first=first)) for first in (0, 100, 200)])
        space.free(row)
        space.forget(tokens(length, first=5000))
        space.check()
    assert found == [[16, 16, 16], [16, 16, 0], [16, 0, 0]]


def test_promise_27_a_lease_that_is_shared_with_what_may_not_go_gives_way_all_the_same() -> None:
    space = shared_by(a=TenantLimits(floor=2), num_blocks=9, leases=True)
    space.free([run_for(space, tokens(9), "b")])
    answer = space.allocate(tokens(17), tenant="a")
    assert isinstance(answer, Allocation)
    run_step(space)
    blocker = run_for(space, tokens(9, first=900), "b")
    space.free([answer.row], keep_until_s=50)
    space.check()
    row = run_for(space, tokens(8, first=500), "b")
    space.check()
    space.free([row, blocker])
    space.check()


# Off by default, and bad input


def test_promise_27_without_tenants_nothing_is_kept_and_nothing_told() -> None:
    space = new_space()
    assert only_pool(space).arrays.tenants.nbytes == 0
    assert space.statistics().tenants == ()
    assert [share.tenant for share in new_space(tenants={}).statistics().tenants] == [None]  # they may come later
    shared = shared_by(a=TenantLimits())
    assert only_pool(shared).nbytes - only_pool(space).nbytes == 16 * 101 + 3 * 64
    row = allocate(space, PROMPT)
    assert str(space.append([row], tokens(900), [900])).startswith("pool 'device' has 95 free blocks")
    with unchanged(space), pytest.raises(ConfigurationError, match="set tenants in the configuration"):
        space.allocate(OTHER, tenant="a")


def test_promise_27_whoever_is_no_tenant_is_refused() -> None:
    space = shared_by(a=TenantLimits())
    wrong: Any
    for wrong in ("c", "", 1, b"a", ("a",)):
        for ask in (space.allocate, space.can_allocate):
            with unchanged(space), pytest.raises(ConfigurationError, match="there is no tenant"):
                ask(PROMPT, tenant=wrong)
        with unchanged(space), pytest.raises(ConfigurationError, match="there is no tenant"):
            space.load(PROMPT, 16, tenant=wrong)


TWO_POOLS = {"groups": (FullAttention(4), RecurrentState(8)), "num_blocks": {"device": 101, "state": 11}}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"a": TenantLimits(cap=101)}, "is 101 blocks, but the pool has 100"),
        ({"a": TenantLimits(cap=0)}, "must be at least 1 block, got 0"),
        ({"a": TenantLimits(cap=-5)}, "must be at least 1 block, got -5"),
        ({"a": TenantLimits(floor=-1)}, "floor of tenant 'a' in pool 'device' must be at least 0"),
        ({"a": TenantLimits(floor=101)}, "at most 100, got 101"),
        ({"a": TenantLimits(cap=10, floor=11)}, "at most 10, got 11"),
        ({"a": TenantLimits(floor=60), "b": TenantLimits(floor=41)}, "add up to 101 blocks, but it has 100"),
        ({"a": TenantLimits(cap=1.5)}, "must be an integer"),  # type: ignore[arg-type]
        ({"a": TenantLimits(cap=True)}, "must be an integer"),
        ({"a": TenantLimits(cap={"elsewhere": 5})}, "must name the pools"),
        ({"": TenantLimits()}, "must map names"),
        ({1: TenantLimits()}, "must map names"),
        ({"a": 5}, "must map names"),
        (["a"], "must map names"),
    ],
)
def test_promise_27_limits_that_cannot_be_are_refused(limits: Any, message: str) -> None:  # noqa: ANN401 - whatever callers bring
    with pytest.raises(ConfigurationError, match=message):
        new_space(tenants=limits)


def test_promise_27_limits_are_by_pool() -> None:
    several: Mapping[str, int] = {"device": 101, "state": 11}
    groups = (FullAttention(4), RecurrentState(8))
    with pytest.raises(ConfigurationError, match="is one number"):
        new_space(*groups, num_blocks=several, tenants={"a": TenantLimits(cap=5)})
    limits = TenantLimits(cap={"device": None, "state": 3}, floor={"device": 7, "state": 0})
    space = new_space(*groups, num_blocks=several, tenants={"a": limits})
    shares = {(it.pool, it.tenant): (it.cap, it.floor) for it in space.statistics().tenants}
    assert shares == {
        ("device", None): (100, 0),
        ("device", "a"): (100, 7),
        ("state", None): (10, 0),
        ("state", "a"): (3, 0),
    }
    assert space.can_allocate(tokens(33), tenant="a") is AllocStatus.NEVER
    assert space.can_allocate(tokens(24), tenant="a") is AllocStatus.OK


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 6])
def test_promise_27_a_tenants_own_floor_is_there_for_it_and_no_more_than_that(taken: int) -> None:
    """Of 20 blocks 5 are promised to a and 4 to b: a may take what b does not need, its own promise first of all."""
    space = shared_by(a=TenantLimits(floor=5), b=TenantLimits(floor=4), num_blocks=21)
    if taken:
        run_for(space, tokens(4 * taken), "a")
    pool = only_pool(space)
    of_nobody, of_a, of_b = (pool.num_permitted(number) for number in range(3))
    assert (of_a, of_b) == (20 - taken - 4, 20 - taken - max(0, 5 - taken))
    assert of_nobody == 20 - taken - max(0, 5 - taken) - 4
    assert space.can_allocate(tokens(4 * of_a, first=500), tenant="a") is AllocStatus.OK
    assert space.can_allocate(tokens(4 * of_a + 1, first=500), tenant="a") is not AllocStatus.OK
    run_for(space, tokens(4 * of_nobody, first=900), None)
    row = run_for(space, tokens(4 * max(1, 5 - taken), first=1900), "a") if taken < 5 else None
    space.check()
    assert row is None or share(space, "a").num_taken == 5
