"""Promise 27: which tenant is charged for a block, also when blocks are shared, swapped and loaded."""

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    AllocStatus,
    FullAttention,
    GroupSpec,
    Load,
    RecurrentState,
    Shortage,
    SlidingWindow,
    TenantLimits,
    TenantShare,
)
from pagedkv.errors import BlockError
from pagedkv.space import swapping
from tests.space.spaces import hit, run_step, tokens, unchanged
from tests.space.tenancy import MIXES, allocate_for, cache_for, has, run_for, share, shared_by, short

pytestmark = pytest.mark.interpreted

PROMPT, OTHER, THIRD = tokens(17), tokens(17, first=100), tokens(17, first=200)  # 4 blocks are cached of each, of 5


# Which tenant is charged


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_shared_blocks_are_charged_to_who_allocated_them_first(groups: tuple[GroupSpec, ...]) -> None:
    space = shared_by(*groups, a=TenantLimits(cap=40))
    first = run_for(space, PROMPT, "a")
    before = has(space, "a")[0]
    second = run_for(space, PROMPT, "b")
    assert has(space, "a")[0] == before
    assert 0 < has(space, "b")[0] < before, "only what it does not share"
    space.free(first)
    assert sum(has(space, "a")) > 0, "still, though a uses them no more"
    charged = sum(has(space, "a")) + sum(has(space, "b"))
    space.free(second)
    space.check()
    assert sum(has(space, "a")) + sum(has(space, "b")) <= charged
    assert share(space, "a").num_cached > 0


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_who_takes_what_nobody_uses_is_charged_from_then_on(groups: tuple[GroupSpec, ...]) -> None:
    space = shared_by(*groups, a=TenantLimits(cap=40))
    cache_for(space, PROMPT, "a")
    cached = share(space, "a").num_cached
    needed = space.match(PROMPT).num_blocks_needed["device"]
    row = allocate_for(space, PROMPT, "b")
    assert has(space, "b")[0] == needed, "hits and new blocks alike"
    assert share(space, "a").num_cached < cached
    run_step(space)
    space.free(row)
    space.check()
    assert share(space, "b").num_cached > 0


def test_promise_27_hits_of_others_blocks_make_a_tenant_give_up_its_own() -> None:
    space = shared_by(a=TenantLimits(cap=9))
    cache_for(space, PROMPT, "b")
    cache_for(space, OTHER, "a")
    cache_for(space, THIRD, "a")
    assert has(space, "a") == (0, 8)
    row = run_for(space, PROMPT, "a")
    assert has(space, "a") == (5, 4)
    assert (hit(space, OTHER), hit(space, THIRD)) == (0, 16)
    with unchanged(space):
        its = short(space, space.allocate(np.append(THIRD[:12], tokens(5, first=900)), tenant="a"))
        assert its.num_permitted == 4, "two new blocks and three hits would be above its cap"
    space.free(row)


def test_promise_27_a_hit_of_what_others_use_costs_no_room_under_a_cap() -> None:
    space = shared_by(a=TenantLimits(cap=2))
    row = run_for(space, PROMPT, "b")
    assert space.can_allocate(PROMPT, tenant="a") is AllocStatus.OK
    other = allocate_for(space, PROMPT, "a")
    assert has(space, "a")[0] == 1
    run_step(space)
    space.free([row, other])
    assert space.can_allocate(PROMPT, tenant="a") is AllocStatus.NEVER, "alone it cannot have so many"
    space.check()


@pytest.mark.parametrize("end", ["reset", "forget", "withdraw", "invalidate", "epoch"])
def test_promise_27_content_that_is_given_up_is_charged_to_nobody(end: str) -> None:
    space = shared_by(a=TenantLimits(cap=20), num_host_blocks=20)
    cache_for(space, PROMPT, "a")
    running = run_for(space, OTHER, "a")
    blocks = np.concatenate([space.match(PROMPT).block_ids[0]])
    match end:
        case "reset":
            space.reset_prefix_cache()
        case "forget":
            space.forget(PROMPT)
        case "withdraw":
            space.withdraw(blocks)
        case "invalidate":
            space.invalidate_memory()
        case _:
            space.set_weights_epoch("b")
    space.check()
    assert has(space, "a") == (5, 0)
    space.free(running)
    space.check()
    assert share(space, "a").num_taken == 0


def test_promise_27_readers_outside_take_nothing_for_themselves() -> None:
    space = shared_by(a=TenantLimits(cap=8), b=TenantLimits(floor=8), num_blocks=17)
    cache_for(space, PROMPT, "a")
    ticket = space.hold(space.match(PROMPT).block_ids[0])
    space.check()
    assert has(space, "a") == (4, 0), "what is held stays whose it was"
    assert share(space, "a").num_permitted == 4
    space.release(ticket)
    space.check()
    assert has(space, "a") == (0, 4)
    for first in (0, 100, 200):
        cache_for(space, tokens(17, first=first), None)
    free = np.flatnonzero(space.ref_counts() == 0)[1:]
    with unchanged(space), pytest.raises(BlockError, match="floors of tenants keep 8"):
        space.hold(free[:9])
    ticket = space.hold(free[:8])
    space.check()
    assert share(space, "b").num_permitted == 8, "a floor is kept from readers too"
    assert share(space, None).num_permitted == 0
    space.release(ticket)


# Swapping, loads, windows, states


def test_promise_27_rows_on_the_host_are_charged_nothing_and_come_back_under_their_cap() -> None:
    space = shared_by(a=TenantLimits(cap=8), b=TenantLimits(floor=2), num_host_blocks=60)
    row = run_for(space, tokens(18), "a")
    assert not isinstance(space.swap_out([row]), Shortage)
    run_step(space)
    space.check()
    assert share(space, "a").num_taken == 0
    other = run_for(space, tokens(18, first=500), "a")
    assert space.can_swap_in([row]) is AllocStatus.LATER
    with unchanged(space):
        its = short(space, space.swap_in([row]))
        assert (its.tenant, its.num_permitted) == ("a", 3)
    assert space.can_swap_in([row], [15]) is AllocStatus.NEVER, "9 blocks are more than its cap"
    space.free(other)
    assert space.can_swap_in([row]) is AllocStatus.OK
    space.swap_in([row])
    space.check()
    run_step(space)
    assert has(space, "a") == (5, 3)
    space.free(row)
    space.check()


def test_promise_27_rows_of_several_tenants_come_back_at_once_or_not_at_all() -> None:
    space = shared_by(a=TenantLimits(cap=6), b=TenantLimits(cap=6), num_host_blocks=60)
    rows = [run_for(space, tokens(17, first=first), tenant) for first, tenant in ((0, "a"), (100, "b"))]
    space.swap_out(rows)
    run_step(space)
    space.reset_prefix_cache()
    blocker = run_for(space, tokens(8, first=900), "b")
    with unchanged(space):
        its = short(space, space.swap_in(rows))
        assert (its.tenant, its.num_permitted) == ("b", 4)
    space.free(blocker)
    assert space.can_swap_in(rows) is AllocStatus.OK
    space.swap_in(rows)
    run_step(space)
    assert [has(space, tenant)[0] for tenant in ("a", "b")] == [5, 5]
    space.check()


def test_promise_27_twins_that_nobody_uses_are_charged_to_who_comes_back() -> None:
    space = shared_by(a=TenantLimits(cap=9), num_host_blocks=60)
    row = run_for(space, tokens(18), "b")
    space.swap_out([row])
    run_step(space)
    assert share(space, "b").num_cached == 4
    cache_for(space, tokens(18), "a")
    assert share(space, "a").num_cached == 4
    space.swap_in([row])
    space.check()
    run_step(space)
    assert (has(space, "a"), has(space, "b")) == ((0, 0), (5, 0))


def test_promise_27_loads_are_charged_to_their_tenant() -> None:
    space = shared_by(a=TenantLimits(cap=6))
    cache_for(space, PROMPT[:9], "b")
    with unchanged(space):
        its = short(space, space.load(tokens(29), 28, tenant="a"))
        assert (its.tenant, its.num_permitted) == ("a", 6)
    load = space.load(tokens(25), 24, tenant="a")
    assert isinstance(load, Load)
    space.check()
    assert (has(space, "a"), has(space, "b")) == ((6, 0), (0, 0)), "the hit before it too, which was unreferenced"
    space.finish_load(load)
    space.check()
    assert has(space, "a") == (0, 6)
    brought = space.allocate(tokens(25, first=500), tenant="a", num_external_tokens=9)
    assert not isinstance(brought, Allocation), "a seventh block"
    assert isinstance(space.allocate(tokens(24, first=500), tenant="a", num_external_tokens=9), Allocation)
    space.check()
    assert has(space, "a") == (6, 0)


def test_promise_27_what_windows_leave_makes_room_under_a_cap() -> None:
    space = shared_by(SlidingWindow(8, 4), a=TenantLimits(cap=5), num_blocks=61)
    row = run_for(space, tokens(8), "a")
    for number in range(20):
        assert space.append([row], tokens(4, first=100 * number), [4]) is None
        run_step(space)
        space.check()
    assert sum(has(space, "a")) <= 5


@pytest.mark.parametrize("is_others", [False, True])
def test_promise_27_beginnings_of_blocks_are_taken_over_where_a_cap_leaves_no_room_to_copy(*, is_others: bool) -> None:
    space = shared_by(a=TenantLimits(cap=4), min_partial_hit=1)
    cache_for(space, tokens(9), "b" if is_others else "a")
    whole = space.match([*range(7), 99, *range(900, 907)])
    assert (whole.num_tokens, whole.num_whole_tokens) == (7, 4)
    answer = space.allocate([*range(7), 99, *range(900, 907)], match=whole, tenant="a")
    assert isinstance(answer, Allocation)
    assert answer.num_hit_tokens == 7
    assert not space.plan_step().copies
    space.check()
    assert has(space, "a") == (4, 0)


def test_promise_27_states_of_a_tenant_at_its_cap_give_way() -> None:
    space = shared_by(
        FullAttention(4), RecurrentState(16), a=TenantLimits(cap={"device": 20, "state": 2}),
        num_blocks={"device": 61, "state": 12},
    )  # fmt: skip
    answer = space.match(tokens(22))
    row = space.allocate(tokens(20), match=answer, tenant="a")
    assert isinstance(row, Allocation)
    run_step(space)
    assert hit(space, tokens(22)) == 20
    assert space.append([row.row], [20, 21], [2]) is None, "it continues in place"
    run_step(space)
    space.check()
    states = next(it for it in space.statistics().tenants if it.pool == "state" and it.tenant == "a")
    assert states.num_taken + states.num_cached <= 2


def come_back_to_what_others_pay_for() -> TenantShare:
    """Swap a tenant in whose blocks another has taken over meanwhile, at its cap by then: it takes no new block."""
    space = shared_by(FullAttention(4), a=TenantLimits(cap=9), num_blocks=60, num_host_blocks=20)
    row = run_for(space, tokens(16), "a")
    space.swap_out(row)
    run_step(space)
    cache_for(space, np.append(tokens(16), 99), "b")
    cache_for(space, tokens(36, first=1_000), "a")
    assert has(space, "a") == (0, 9)
    space.swap_in(row)
    run_step(space)
    space.check()
    return share(space, "a")


def test_promise_27_what_comes_back_to_others_blocks_gives_up_as_much_of_its_own() -> None:
    its = come_back_to_what_others_pay_for()
    assert (its.num_taken, its.num_cached) == (4, 5)


def test_promise_27_negative_control_a_cap_that_hits_exceed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "keep_caps", lambda *_: None)
    with pytest.raises(AssertionError):
        come_back_to_what_others_pay_for()
