"""Promise 27 while a space is in use: tenants come, get other limits, and go."""

from typing import Any

import numpy as np
import pytest

from pagedkv import FullAttention, GroupSpec, Load, TenantLimits
from pagedkv.errors import ConfigurationError
from tests.compiling import TESTED_POLICIES
from tests.space.spaces import hit, new_space, only_pool, run_step, tokens, unchanged
from tests.space.tenancy import MIXES, cache_for, has, run_for, share, shared_by

pytestmark = pytest.mark.interpreted

PROMPT, OTHER, THIRD = tokens(17), tokens(17, first=100), tokens(17, first=200)  # 4 blocks are cached of each, of 5


@pytest.mark.parametrize("eviction", TESTED_POLICIES)
@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_a_tenant_that_comes_is_like_one_from_the_beginning(
    groups: tuple[GroupSpec, ...], eviction: str
) -> None:
    limits = TenantLimits(cap=24, floor=3)
    begun, grown = (new_space(*groups, tenants=named, eviction=eviction) for named in ({"b": limits, "a": limits}, {}))
    cache_for(grown, THIRD, None)
    grown.reset_prefix_cache()
    for name in "ba":
        grown.set_tenant(name, limits)
        grown.check()
    assert grown.config == begun.config
    for space in (begun, grown):
        for number in range(12):
            cache_for(space, tokens(17, first=1000 + 100 * number), "a" if number % 3 else "b")
    shares = [(it.tenant, it.num_taken, it.num_permitted) for it in begun.statistics().tenants]
    assert [(it.tenant, it.num_taken, it.num_permitted) for it in grown.statistics().tenants] == shares
    assert all(it.num_taken + it.num_cached <= it.cap for it in grown.statistics().tenants)


def test_promise_27_accounts_grow_in_place_so_that_nothing_is_compiled_again() -> None:
    space = new_space(tenants={})
    arrays = only_pool(space).arrays
    before, kind = arrays.tenants, (arrays.tenants.dtype, arrays.tenants.ndim, arrays.tenants.flags.c_contiguous)
    for number in range(20):
        space.set_tenant(str(number), TenantLimits(cap=50))
        space.check()
    assert only_pool(space).arrays.tenants is before
    assert (before.dtype, before.ndim, before.flags.c_contiguous) == kind
    assert before.nbytes == 16 * 101 + 21 * 64
    for number in range(20):
        space.remove_tenant(str(number))
    space.set_tenant("new", TenantLimits())
    assert before.nbytes == 16 * 101 + 21 * 64, "numbers of removed tenants are given out again"
    space.check()


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_a_lower_cap_evicts_a_tenants_own(groups: tuple[GroupSpec, ...]) -> None:
    space = shared_by(*groups, a=TenantLimits(), leases=True)
    cache_for(space, OTHER, "b")
    row = run_for(space, THIRD, "a")
    for number in range(4):
        cache_for(space, tokens(17, first=1000 + 100 * number), "a")
    space.lease(tokens(17, first=1000), 9.0)
    taken, cached = has(space, "a")
    space.set_tenant("a", TenantLimits(cap=taken + cached // 2))
    space.check()
    assert has(space, "a") == (taken, cached // 2)
    assert hit(space, tokens(17, first=1000)) == 16, "leases go last"
    assert hit(space, OTHER) == 16
    with unchanged(space), pytest.raises(ConfigurationError, match=f"uses {taken} blocks of pool 'device', more than"):
        space.set_tenant("a", TenantLimits(cap=taken - 1))
    space.free(row)
    space.set_tenant("a", TenantLimits(cap=1))
    space.check()
    assert sum(has(space, "a")) <= 1


def test_promise_27_a_floor_that_comes_later_holds_from_then_on() -> None:
    space = shared_by(a=TenantLimits(), num_blocks=21)
    row = run_for(space, tokens(60), "b")
    space.set_tenant("a", TenantLimits(floor=10))  # more than is free
    space.check()
    assert (share(space, "a").num_permitted, share(space, None).num_permitted) == (5, 0)
    space.free(row)
    assert (share(space, "a").num_permitted, share(space, None).num_permitted) == (20, 10)


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_what_a_removed_tenant_has_is_charged_to_the_unnamed_one(groups: tuple[GroupSpec, ...]) -> None:
    space = shared_by(*groups, a=TenantLimits(cap=40, floor=20), leases=True)
    cache_for(space, PROMPT, "a")
    cache_for(space, OTHER, None)
    cache_for(space, THIRD, "a")
    space.lease(THIRD, 9.0)
    before = space.num_cached_blocks()
    space.remove_tenant("a")
    space.check()
    assert [it.tenant for it in space.statistics().tenants] == [None, "b"]
    assert has(space, None) == (0, before)
    assert share(space, "b").num_permitted == space.num_free_blocks(), "its floor is gone"
    assert [hit(space, each) for each in (PROMPT, OTHER, THIRD)] == [16] * 3
    assert space.config.tenants == {"b": TenantLimits()}
    with unchanged(space), pytest.raises(ConfigurationError, match="no tenant 'a'"):
        space.allocate(PROMPT, tenant="a")


def test_promise_27_removal_leaves_the_order_of_eviction() -> None:
    space = shared_by(a=TenantLimits(), num_blocks=14)
    for prompt, tenant in ((PROMPT, "a"), (OTHER, None), (THIRD, "a")):
        cache_for(space, prompt, tenant)
    space.remove_tenant("a")
    found = []
    for first in (1000, 2000, 3000):
        cache_for(space, tokens(17, first=first), "b")
        found.append([hit(space, each) > 0 for each in (PROMPT, OTHER, THIRD)])
    assert found == [[False, True, True], [False, False, True], [False, False, False]]


def test_promise_27_a_tenant_with_sequences_stays_and_one_whose_blocks_others_use_may_go() -> None:
    space = shared_by(a=TenantLimits(cap=40), num_host_blocks=20)
    row = run_for(space, PROMPT, "a")
    other = run_for(space, PROMPT, "b")
    with unchanged(space), pytest.raises(ConfigurationError, match="has 1 sequences"):
        space.remove_tenant("a")
    space.swap_out([row])
    run_step(space)
    with unchanged(space), pytest.raises(ConfigurationError, match="has 1 sequences"):
        space.remove_tenant("a")
    space.free([row])
    assert has(space, "a")[0] == 4
    space.remove_tenant("a")
    space.check()
    assert has(space, None) == (4, 0)
    space.free([other])
    space.check()


def test_promise_27_a_load_outlasts_its_tenant() -> None:
    space = shared_by(a=TenantLimits(cap=40))
    load = space.load(PROMPT, 16, tenant="a")
    assert isinstance(load, Load)
    space.remove_tenant("a")
    space.check()
    space.finish_load(load)
    space.check()
    assert hit(space, PROMPT) == 16


@pytest.mark.parametrize(
    ("name", "limits", "message"),
    [
        ("", TenantLimits(), "must have a name"),
        (None, TenantLimits(), "must have a name"),
        ("c", 5, "must be TenantLimits"),
        ("c", TenantLimits(cap=101), "but the pool has 100"),
        ("c", TenantLimits(floor=60), "add up to 110"),
        ("c", TenantLimits(cap={"elsewhere": 3}), "must name the pools"),
    ],
)
def test_promise_27_other_limits_that_cannot_be_are_refused(name: Any, limits: Any, message: str) -> None:  # noqa: ANN401 - whatever callers bring
    space = shared_by(a=TenantLimits(floor=50))
    with unchanged(space), pytest.raises(ConfigurationError, match=message):
        space.set_tenant(name, limits)
    with unchanged(space), pytest.raises(ConfigurationError, match="cannot be removed"):
        space.remove_tenant(None)  # type: ignore[arg-type]


def test_promise_27_without_tenants_none_can_come() -> None:
    space = new_space()
    with unchanged(space), pytest.raises(ConfigurationError, match="not distinguished"):
        space.set_tenant("a", TenantLimits())
    with unchanged(space), pytest.raises(ConfigurationError, match="not distinguished"):
        space.remove_tenant("a")


def test_promise_27_whether_a_cap_is_in_the_way_is_told_exactly() -> None:
    space = shared_by(a=TenantLimits(cap=8), num_blocks=31)
    run_for(space, tokens(17), "a")  # 5 of its 8
    for length in range(1, 40):
        prompt = tokens(length, first=500)
        assert space.exceeds_cap(prompt, tenant="a") == (-(-length // 4) > 3)
        assert not space.exceeds_cap(prompt, tenant="b")
    assert not space.exceeds_cap(tokens(28), tenant="a"), "what it hits and uses takes nothing more"
    assert space.most_blocks("a") == {"device": 8}
    assert [it.num_permitted for it in space.tenant_shares("a")] == [3]
    assert not new_space().exceeds_cap(PROMPT, tenant=None)
    assert new_space().tenant_shares(None) == ()


# Supersession after the end


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_what_an_ended_sequence_alone_had_goes_first_once_it_is_superseded(groups: tuple[GroupSpec, ...]) -> None:
    space = new_space(*groups, num_blocks=60, max_sequences=60)
    old = [*PROMPT[:8], *OTHER]
    cache_for(space, THIRD, None)
    cache_for(space, old, None)
    row = run_for(space, PROMPT, None)
    space.supersede([*old, 0])
    space.check()
    assert hit(space, old) == 24, "it can be hit until it is evicted"
    space.supersede([*old, 0])
    space.check()
    rows = [row]
    while hit(space, old) == 24:
        rows.append(run_for(space, tokens(4, first=3000 + 10 * len(rows)), None))
    assert (hit(space, THIRD), hit(space, PROMPT)) == (16, 16)
    space.free(rows)
    space.check()


def test_what_a_lease_keeps_is_not_superseded() -> None:
    space = new_space(leases=True, num_blocks=14)
    cache_for(space, OTHER, None)
    space.lease(OTHER, 9.0)
    cache_for(space, PROMPT, None)
    space.supersede(OTHER)
    space.check()
    cache_for(space, tokens(33, first=3000), None)
    assert (hit(space, OTHER), hit(space, PROMPT) < 16) == (16, True)


def test_a_tenants_accounts_are_read_by_all_groups() -> None:
    """Compiled loops take the arrays of a pool as they were when the space was built."""
    space = new_space(FullAttention(4), tenants={})
    group = space._state.groups[0]
    assert group.view[0].tenants is only_pool(space).arrays.tenants
    space.set_tenant("a", TenantLimits(cap=9))
    cache_for(space, PROMPT, "a")
    assert np.shares_memory(group.view[0].tenants, only_pool(space).accounts)
