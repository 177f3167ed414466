"""Intents in the scheduler: caps make only their own tenants wait, and whatever is said, every request is served."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv import TenantLimits
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention, GroupSpec, SlidingWindow
from pagedkv.errors import ConfigurationError
from pagedkv.scheduling import Breakpoint, CacheIntent, Request, SchedulingConfig
from tests.scheduling.engine import Engine

pytestmark = pytest.mark.interpreted

A, B = CacheIntent(tenant="a"), CacheIntent(tenant="b")
GROUPS: tuple[tuple[GroupSpec, ...], ...] = ((FullAttention(4),), (FullAttention(4), SlidingWindow(8, 4)))


def engine(
    num_blocks: int = 60,
    groups: tuple[GroupSpec, ...] = GROUPS[0],
    tenants: dict[str, TenantLimits] | None = None,
    num_host_blocks: int = 0,
    max_tokens: int | None = None,
    **limits: Any,  # noqa: ANN401 - as they are
) -> Engine:
    """Make an engine over a pool of blocks of 4 tokens."""
    scheduling = replace(SchedulingConfig(8, 32, "swap" if num_host_blocks else "recompute"), **limits)
    config = SpaceConfig(
        groups=groups,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_sequences=(2 if num_host_blocks else 1) * scheduling.max_sequences,
        max_tokens=max_tokens or 4 * num_blocks,
        watermark=0.0,
        leases=True,
        tenants={} if tenants is None else tenants,
    )
    return Engine(scheduling, config)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_every_request_is_served_whatever_is_said_of_it(data: st.DataObject) -> None:
    """Requests of tenants come, end and are aborted, limits change, time passes, with up to three batches in flight."""
    num_blocks = data.draw(st.integers(12, 30))
    served = engine(
        num_blocks,
        data.draw(st.sampled_from(GROUPS)),
        {"a": TenantLimits(cap=data.draw(st.integers(3, 10))), "b": TenantLimits(floor=data.draw(st.integers(0, 4)))},
        max_sequences=data.draw(st.integers(3, 8)),
        max_batched_tokens=data.draw(st.integers(8, 40)),
        num_host_blocks=data.draw(st.sampled_from([0, 0, 30])),
        max_tokens=data.draw(st.sampled_from([None, 26])),
    )
    served.end_probability = data.draw(st.sampled_from([0.0, 0.1]))
    most_in_flight = data.draw(st.integers(1, 3))
    trunk = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
    places = st.builds(Breakpoint, st.integers(1, 20), st.sampled_from([1.0, 100.0]))
    intents = st.builds(
        CacheIntent,
        tenant=st.sampled_from([None, "a", "a", "b"]),
        keep_for_s=st.sampled_from([None, 5.0, 500.0]),
        breakpoints=st.lists(places, max_size=2).map(tuple),
        publish=st.sampled_from(["all", "all", "prompt", "none"]),
    ) | st.builds(CacheIntent, tenant=st.sampled_from([None, "a", "b"]), retention=st.sampled_from([-1, 0, 1]))
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "add", "step", "step", "step", "abort", "limits", "time"])):
            case "add":
                earlier = [each.request for each in served.served]
                prompt = trunk[: data.draw(st.integers(1, len(trunk)))] + data.draw(
                    st.lists(st.integers(0, 3), max_size=6)
                )
                served.add(
                    prompt,
                    data.draw(st.integers(0, 20) | st.just(served.space.config.max_tokens + 1 - len(prompt))),
                    num_sequences=data.draw(st.integers(1, 3)),
                    priority=data.draw(st.integers(0, 1)),
                    intent=data.draw(intents),
                    replaces=data.draw(st.none() | st.sampled_from(earlier)) if earlier else None,
                )
            case "abort" if served.served:
                served.scheduler.abort(data.draw(st.sampled_from(served.served)).request)
                served.space.check()
            case "limits":
                try:
                    served.space.set_tenant("a", TenantLimits(cap=data.draw(st.integers(1, 10))))
                except ConfigurationError as problem:
                    assert "free rows of it first" in str(problem)  # noqa: PT017 - it may be refused
                served.space.check()
            case "time":
                now_s += data.draw(st.sampled_from([0.5, 10.0]))
                served.space.advance(now_s)
            case _:
                if len(served.in_flight) == most_in_flight or (served.in_flight and data.draw(st.booleans())):
                    served.finish()
                else:
                    served.schedule()
    while served.in_flight:
        served.finish()
    served.run()
    assert all(each.request.is_done for each in served.served)


def is_running(request: Request) -> bool:
    return bool(request.rows)


def test_a_request_at_its_tenants_cap_is_passed_by_other_tenants_and_by_none_of_its_own() -> None:
    served = engine(tenants={"a": TenantLimits(cap=8), "b": TenantLimits()})
    first, large, small = (served.add([n] * length, 2, intent=A) for n, length in enumerate((20, 20, 4)))
    other, unnamed = served.add([8] * 4, 2, intent=B), served.add([9] * 4, 2)
    served.step()
    assert [is_running(each) for each in (first, large, small, other, unnamed)] == [True, False, False, True, True]
    served.run()
    assert served.rejected == []


def test_a_request_that_the_pool_has_no_room_for_is_passed_by_none() -> None:
    served = engine(num_blocks=12, tenants={"a": TenantLimits(cap=10), "b": TenantLimits()})
    first, large, other = (
        served.add([n] * length, 2, intent=intent) for n, (length, intent) in enumerate(((28, B), (24, A), (4, B)))
    )
    served.step()
    assert [is_running(each) for each in (first, large, other)] == [True, False, False]
    served.run()


def test_the_promises_of_a_tenants_sequences_may_exceed_the_longest_one() -> None:
    """They are counted together as slots, whose number has nothing to do with the length of a table."""
    served = engine(num_blocks=30, max_tokens=40, tenants={"a": TenantLimits(cap=29)}, max_sequences=8)
    for number in range(8):
        served.add([number, 1, 2, 3, 4], 33, intent=A)
    num_preempted = 0
    while not served.scheduler.is_idle:
        num_preempted += len(served.step().preempted)
    assert num_preempted > 3
    assert len(served.finished) == 8


def test_a_cap_that_other_tenants_rows_fill_makes_its_tenant_wait_and_rejects_nothing() -> None:
    """A block is charged to the first tenant that takes it, also while only others use it."""
    served = engine(tenants={"a": TenantLimits(cap=6), "b": TenantLimits()})
    prompt = [1] * 16
    first = served.add(prompt, 2, intent=A)
    served.step()
    other = served.add([*prompt, 2], 6, intent=B)
    served.step()
    assert (first.is_done, is_running(other)) == (True, True)
    assert served.space.tenant_shares("a")[0].num_taken == 4
    later = served.add([7] * 16, 2, intent=A)
    served.step()
    assert not is_running(later)
    served.run()
    assert served.rejected == []
    assert later.num_generated == 2


def test_a_request_of_no_tenant_of_the_space_is_refused_and_nothing_is_changed() -> None:
    served = engine()
    with pytest.raises(ConfigurationError, match="no tenant 'a'"):
        served.add([1, 2], 2, intent=A)
    assert served.scheduler.is_idle


def test_a_fork_of_another_tenant_or_publish_limit_shares_no_blocks() -> None:
    served = engine(tenants={"a": TenantLimits(), "b": TenantLimits()})
    parent = served.add([1] * 10, 8, intent=A)
    served.step()
    known = np.array([1] * 10 + served.served[0].generated[0], np.int32)
    others = (A, 10), (B, 0), (replace(A, publish="none"), 0), (replace(A, retention=-1), 10)
    for number, (intent, num_shared) in enumerate(others, 1):
        child = Request(number, len(known), 2, lambda _: known, intent=intent)
        assert served.scheduler.fork(parent, child) == num_shared
        served.scheduler.abort(child)
        served.space.check()


def test_a_request_as_long_as_the_tables_is_leased_and_replaced() -> None:
    """Its last token is sampled and never computed, so prompt and answer are one token more than the tables have."""
    served = engine(max_tokens=16)
    former = served.add([*range(10)], 7, intent=CacheIntent(keep_for_s=9.0))
    served.run()
    assert former.num_leased_tokens == 12
    served.add([*range(12)], 5, replaces=former)
    served.run()
    assert len(served.finished) == 2


def test_a_caller_whose_answers_are_gone_leaves_no_row_behind() -> None:
    """The tokens of a replaced or leased request are asked of its caller, who may fail."""

    def forgotten() -> list[np.ndarray[Any, Any]]:
        raise KeyError(former.number)

    served = engine(tenants={})
    former = served.add([*range(10)], 2, intent=CacheIntent(keep_for_s=9.0))
    served.step()
    sequences, former.sequences = former.sequences, forgotten
    served.schedule()
    with pytest.raises(KeyError):
        served.finish()
    assert served.scheduler.running == [former]
    former.sequences = sequences
    assert served.scheduler.abort(former)
    former.sequences = forgotten
    later = served.add([*range(12)], 2, replaces=former)
    with pytest.raises(KeyError):
        served.scheduler.schedule()
    assert served.space.statistics().pools[0].num_in_use == 0
    assert served.scheduler.abort(later)
    assert served.scheduler.is_idle


def test_a_swapped_out_request_that_its_tenants_new_cap_excludes_is_rejected() -> None:
    served = engine(8, tenants={"a": TenantLimits(), "b": TenantLimits()}, num_host_blocks=30)
    swapped, other = served.add([1] * 8, 12, intent=A, priority=-1), served.add([2] * 8, 12, intent=B)
    while not served.scheduler.num_swapped:
        served.step()
    served.space.set_tenant("a", TenantLimits(cap=2))
    served.run()
    assert (served.rejected, served.finished) == ([swapped], [other])


def test_a_waiting_request_that_its_tenants_new_cap_excludes_is_rejected_before_it_computes_anything() -> None:
    """Its prompt still fits, its answer does not."""
    served = engine(tenants={"a": TenantLimits()})
    request = served.add([1] * 4, 12, intent=A)
    served.space.set_tenant("a", TenantLimits(cap=2))
    batch = served.step()
    assert (batch.rejected, batch.plan.compute.num_tokens) == ((request,), 0)
