"""Intent: a caller's hints about a request (tenant, salt, leases, priority) reach the scheduler and the blocks."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedModel

from pagedkv import TenantLimits
from pagedkv.engine import LLM, AsyncLLM, Breakpoint, EngineConfig, EngineRequest, Intent, RequestOutput, SamplingParams
from pagedkv.errors import ConfigurationError, RequestError
from pagedkv.scheduling import PublishLimit
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, SHARED

ROOMY = replace(CONFIG, num_blocks=200, max_batched_tokens=64)
SMALL = replace(CONFIG, num_blocks=25, watermark=0.0, max_batched_tokens=64)  # 24 blocks of 4 tokens
FEW = SamplingParams(max_tokens=2)
LIMITS = TenantLimits(cap=10)


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Give seconds."""
        return self.now_s


def one(llm: LLM, prompt: Sequence[int], intent: Intent | None = None, params: SamplingParams = FEW) -> RequestOutput:
    """Serve one prompt; the space proves its invariants."""
    (output,) = llm.generate([list(prompt)], params, intent)
    llm.core.space.check()
    return output


def fresh(start: int, num_tokens: int) -> list[int]:
    """Give tokens that no other test prompt begins with."""
    return [(start * 31 + 7 * place) % 180 for place in range(num_tokens)]


def press(llm: LLM, num_prompts: int = 5) -> None:
    """Serve prompts, one by one, that take all blocks of a small pool."""
    for start in range(num_prompts):
        one(llm, [start + 1, *fresh(start + 1, 60)])


# Salts and tenants


def test_a_prompt_hits_under_its_own_salt_alone(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    one(llm, SHARED, Intent(salt=b"a"))
    assert one(llm, SHARED, Intent(salt=b"b")).num_cached_tokens == 0
    assert one(llm, SHARED).num_cached_tokens == 0
    assert one(llm, SHARED, Intent(salt=b"a")).num_cached_tokens == 20


def test_a_tenant_is_charged_for_what_its_requests_take(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, tenants={"a": LIMITS, "b": TenantLimits()}))
    one(llm, SHARED, Intent(tenant="a"))
    (share,) = llm.core.space.tenant_shares("a")
    assert (share.num_taken, share.num_cached) == (0, 6)
    assert one(llm, SHARED, Intent(tenant="b")).num_cached_tokens == 20  # tenants share content, salts do not


def test_a_tenant_at_its_cap_keeps_only_its_own_requests_waiting(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, tenants={"a": LIMITS, "b": TenantLimits()}))
    mine, also_mine, other = (
        llm.submit([fresh(place, 28)], SamplingParams(max_tokens=8), Intent(tenant=tenant))[0]
        for place, tenant in enumerate("aab")
    )
    llm.step()
    assert [request.admitted is not None for request in (mine, also_mine, other)] == [True, False, True]
    while llm.core.has_work:
        llm.step()
        llm.core.space.check()
    assert [len(each.output().token_ids) for each in (mine, also_mine, other)] == [8, 8, 8]
    assert also_mine.num_preemptions == 0


def test_requests_of_a_capped_tenant_preempt_each_other_and_no_other(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, tenants={"a": TenantLimits(cap=12), "b": TenantLimits()}))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    tenants = "aaab"
    requests = [llm.submit([fresh(n, 10)], params, Intent(tenant=it))[0] for n, it in enumerate(tenants)]
    while llm.core.has_work:
        llm.step()
        llm.core.space.check()
    assert [len(each.output().token_ids) for each in requests] == [24] * 4
    assert requests[-1].num_preemptions == 0 < sum(each.num_preemptions for each in requests)


def test_what_a_cap_can_never_hold_ends_rejected_with_the_numbers(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, tenants={"a": LIMITS}))
    other, rejected = llm.generate([SHARED, SHARED], SamplingParams(max_tokens=40), [Intent(), Intent(tenant="a")])
    assert (other.completions[0].finish_reason, rejected.completions[0].finish_reason) == ("length", "rejected")
    assert rejected.error is not None
    assert "tenant 'a' can have, {'full': 10} blocks" in rejected.error
    updates = list(llm.stream([SHARED], SamplingParams(max_tokens=40), Intent(tenant="a")))
    assert [update.finish_reason for update in updates] == ["rejected"]
    tiny = LLM(model, replace(SMALL, num_blocks=6, tenants={"a": TenantLimits()}))
    with pytest.raises(RequestError, match="does not fit"):  # even without the cap
        tiny.submit([SHARED], FEW, Intent(tenant="a"))


def test_a_cap_lowered_meanwhile_rejects_who_waits(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, tenants={"a": TenantLimits()}))
    (request,) = llm.submit([SHARED], SamplingParams(max_tokens=8), Intent(tenant="a"))
    llm.set_tenant("a", TenantLimits(cap=3))
    llm.step()
    assert request.output().completions[0].finish_reason == "rejected"
    assert "{'full': 3}" in str(request.error)


def test_tenants_come_and_go_while_the_engine_runs(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, tenants={}))
    with pytest.raises(RequestError, match="does not have"):
        llm.generate([SHARED], FEW, Intent(tenant="a"))
    llm.set_tenant("a", LIMITS)
    llm.submit([SHARED], FEW, Intent(tenant="a"))
    for _ in range(2):  # it waits, then runs
        with pytest.raises(ConfigurationError, match="has requests"):
            llm.remove_tenant("a")
        llm.step()
    while llm.core.has_work:
        llm.step()
    llm.remove_tenant("a")
    llm.core.space.check()
    assert one(llm, SHARED).num_cached_tokens == 20
    with pytest.raises(ConfigurationError, match="not distinguished"):
        LLM(model, ROOMY).set_tenant("a", LIMITS)


# Priority


def test_a_higher_priority_goes_first(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, max_sequences=1))
    low, high = llm.submit([SHARED, [1, 2, 3]], FEW, [Intent(priority=-1), Intent(priority=5)])
    llm.step()
    assert (low.admitted, high.admitted is not None) == (None, True)


# Leases


def leasing(model: PreTrainedModel, config: EngineConfig = SMALL) -> tuple[LLM, Clock]:
    clock = Clock()
    return LLM(model, replace(config, leases=True), clock=clock), clock


def test_what_a_request_leaves_survives_pressure_until_its_lease_ends(model: PreTrainedModel) -> None:
    llm, clock = leasing(model)
    output = one(llm, SHARED, Intent(keep_for_s=60.0))
    assert output.num_leased_tokens == 24
    press(llm)
    assert one(llm, SHARED).num_cached_tokens == 20
    clock.now_s += 61.0
    press(llm)
    assert one(llm, SHARED).num_cached_tokens == 0


def test_tokens_before_a_breakpoint_are_leased_once_they_are_computed(model: PreTrainedModel) -> None:
    llm, clock = leasing(model)
    intent = Intent(breakpoints=(Breakpoint(10, 60.0), Breakpoint(16, 600.0)))
    output = one(llm, SHARED, intent)
    assert output.breakpoint_tokens == (8, 16)
    assert output.num_leased_tokens == 0
    press(llm)
    assert one(llm, SHARED).num_cached_tokens == 16
    clock.now_s += 601.0
    press(llm)
    assert one(llm, SHARED).num_cached_tokens == 0


def test_a_hit_through_a_breakpoint_renews_its_lease(model: PreTrainedModel) -> None:
    llm, clock = leasing(model)
    one(llm, SHARED, Intent(breakpoints=(Breakpoint(16, 60.0),)))
    clock.now_s += 50.0
    assert one(llm, [*SHARED[:20], 1, 2]).num_cached_tokens == 20  # without a breakpoint of its own
    clock.now_s += 50.0
    press(llm)
    assert one(llm, SHARED).num_cached_tokens == 16
    clock.now_s += 61.0
    press(llm)
    assert one(llm, SHARED).num_cached_tokens == 0


def test_breakpoints_are_exact_where_windows_move_on() -> None:
    llm, _ = leasing(make_model("mistral"), replace(SMALL, num_blocks=40))
    output = one(llm, fresh(3, 60), Intent(breakpoints=(Breakpoint(20, 60.0), Breakpoint(41, 60.0))))
    assert output.breakpoint_tokens == (20, 40)


def test_a_lease_is_soft(model: PreTrainedModel) -> None:
    llm, _ = leasing(model)
    one(llm, SHARED, Intent(keep_for_s=1e6))
    output = one(llm, fresh(5, 70), params=SamplingParams(max_tokens=8))
    assert output.completions[0].finish_reason == "length"
    assert one(llm, SHARED).num_cached_tokens < 20


def test_a_refused_lease_is_told_and_no_error(model: PreTrainedModel) -> None:
    output = one(LLM(model, SMALL), SHARED, Intent(keep_for_s=9.0, breakpoints=(Breakpoint(8, 9.0),)))
    assert (output.num_leased_tokens, output.breakpoint_tokens) == (0, (0,))


def test_an_aborted_request_keeps_what_it_was_to_keep(model: PreTrainedModel) -> None:
    llm, _ = leasing(model)
    (request,) = llm.submit([SHARED], FEW, Intent(keep_for_s=60.0))
    llm.step()
    llm.core.abort(request)
    assert request.output().num_leased_tokens == 24
    press(llm)
    assert one(llm, SHARED).num_cached_tokens == 20


@pytest.mark.parametrize(("retention", "num_hit"), [(0, 0), (1, 20)])
def test_what_is_to_be_retained_outlives_other_content(model: PreTrainedModel, retention: int, num_hit: int) -> None:
    llm, _ = leasing(model)
    one(llm, SHARED, Intent(retention=retention))
    press(llm)
    assert one(llm, SHARED).num_cached_tokens == num_hit


def test_what_is_not_to_be_retained_goes_first(model: PreTrainedModel) -> None:
    llm = LLM(model, SMALL)
    one(llm, fresh(1, 24))
    one(llm, fresh(2, 24), Intent(retention=-1))
    one(llm, fresh(3, 56))
    assert one(llm, fresh(1, 24)).num_cached_tokens == 20


# Supersession


def test_what_only_a_superseded_request_has_goes_first(model: PreTrainedModel) -> None:
    llm = LLM(model, SMALL)
    (former,) = llm.submit([[*SHARED[:8], *fresh(1, 16)]], FEW)
    while llm.core.has_work:
        llm.step()
    one(llm, [*SHARED[:8], *fresh(2, 16)], Intent(replaces=former))
    one(llm, fresh(3, 70))  # 18 blocks: the 14 without content, and the 4 that only the former one has
    assert one(llm, [*SHARED[:8], *fresh(2, 16)]).num_cached_tokens == 20
    assert one(llm, [*SHARED[:8], *fresh(1, 16)]).num_cached_tokens == 8


def test_a_superseded_request_that_runs_is_served_and_its_tail_goes_first(model: PreTrainedModel) -> None:
    llm = LLM(model, SMALL)
    (former,) = llm.submit([[*SHARED[:8], *fresh(1, 16)]], FEW)
    (later,) = llm.submit([[*SHARED[:8], *fresh(2, 16)]], SamplingParams(max_tokens=4), Intent(replaces=former))
    while llm.core.has_work:
        llm.step()
        llm.core.space.check()
    assert [len(each.output().token_ids) for each in (former, later)] == [2, 4]
    assert later.intent.replaces is None  # else a conversation would keep all of its turns
    one(llm, fresh(3, 70))  # 18 blocks: the 14 without content, and the 4 that only the former one has
    assert one(llm, [*SHARED[:8], *fresh(2, 16)]).num_cached_tokens == 20
    assert one(llm, [*SHARED[:8], *fresh(1, 16)]).num_cached_tokens == 8


# Publishing


@pytest.mark.parametrize(("publish", "num_prompt", "num_answer"), [("all", 20, 32), ("prompt", 20, 24), ("none", 0, 0)])
def test_others_hit_what_may_be_published(
    model: PreTrainedModel, publish: PublishLimit, num_prompt: int, num_answer: int
) -> None:
    llm = LLM(model, ROOMY)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    output = one(llm, SHARED, Intent(publish=publish), params)
    assert one(llm, [*SHARED, *output.token_ids], Intent(publish="none")).num_cached_tokens == num_answer
    assert one(llm, SHARED, Intent(publish="none")).num_cached_tokens == num_prompt


def test_an_answer_stays_unpublished_when_its_request_was_preempted(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(CONFIG, num_blocks=22, max_batched_tokens=64))
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    intents = [Intent(publish="prompt")] * 3
    outputs = llm.generate([fresh(place, 21) for place in range(3)], params, intents)
    preempted = [output for output in outputs if output.num_preemptions]
    assert preempted
    for output in preempted:
        whole = [*output.prompt_token_ids, *output.token_ids]
        assert one(llm, whole, Intent(publish="none")).num_cached_tokens <= 20


# Forks, preemption


def run(llm: LLM, request: EngineRequest) -> RequestOutput:
    while not request.is_finished:
        llm.step()
        llm.core.space.check()
    return request.output()


def test_forks_inherit_an_intent_unless_another_is_given(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, leases=True, tenants={"a": TenantLimits(), "b": TenantLimits()}))
    intent = Intent(tenant="a", salt=b"x", priority=2, breakpoints=(Breakpoint(8, 9.0), Breakpoint(24, 9.0)))
    (parent,) = llm.submit([SHARED], SamplingParams(max_tokens=8), intent)
    llm.step()
    child, shorter = parent.fork(), parent.fork(at=10)
    other = parent.fork(intent=Intent(tenant="b"))
    assert child.intent == intent
    assert shorter.intent == replace(intent, breakpoints=intent.breakpoints[:1])
    assert (child.num_cached_tokens, other.num_cached_tokens) == (24, None)  # other tenants' rows are not forked
    for each in (parent, child, shorter, other):
        run(llm, each)
    assert other.num_cached_tokens == 0  # another salt


def test_a_preempted_request_keeps_its_intent(model: PreTrainedModel) -> None:
    tenants = {"a": TenantLimits(cap=14)}
    llm, _ = leasing(model, replace(CONFIG, num_blocks=60, max_batched_tokens=64, tenants=tenants))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    intent = Intent(tenant="a", salt=b"s", keep_for_s=600.0)
    requests = llm.submit([fresh(place, 10) for place in range(3)], params, intent)
    outputs = [run(llm, request) for request in requests]
    assert sum(output.num_preemptions for output in outputs)
    assert [output.num_leased_tokens for output in outputs] == [32] * 3
    assert llm.core.space.tenant_shares(None)[0].num_cached == 0


def test_epochs_of_a_request_are_told(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, weights_epoch=3, max_epoch_lag=1))
    assert one(llm, SHARED).epochs == (3, 3)
    llm.set_weights_epoch(4)
    assert one(llm, [*SHARED, 5, 6, 7, 8]).epochs == (3, 4)
    assert one(LLM(model, ROOMY), SHARED).epochs is None


def test_the_shortest_lease_is_one(model: PreTrainedModel) -> None:
    llm, clock = leasing(model)
    clock.now_s += 1e9
    output = one(llm, SHARED, Intent(keep_for_s=1e-300, breakpoints=(Breakpoint(8, 1e-300),)))
    assert (output.num_leased_tokens, output.breakpoint_tokens) == (24, (8,))


def test_a_salt_shows_in_no_text(model: PreTrainedModel) -> None:
    (request,) = LLM(model, ROOMY).submit([SHARED], FEW, Intent(salt=b"secret"))
    assert "secret" not in repr(request)
    assert "secret" not in repr(request.intent)


# What is refused


@pytest.mark.parametrize(
    "odd",
    [
        {"tenant": ""},
        {"tenant": 3},
        {"salt": "text"},
        {"priority": 1.5},
        {"keep_for_s": 0},
        {"keep_for_s": float("nan")},
        {"keep_for_s": 1e30},
        {"keep_for_s": 1.0, "retention": 1},
        {"retention": 2},
        {"publish": "some"},
        {"publish": True},
        {"breakpoints": (8,)},
        {"breakpoints": (Breakpoint(8, 1.0),) * 5},
    ],
)
def test_an_odd_intent_is_refused_when_it_is_made(odd: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        Intent(**odd)


@pytest.mark.parametrize(
    "intent",
    [
        Intent(tenant="a"),
        Intent(retention=1),
        Intent(breakpoints=(Breakpoint(25, 1.0),)),
        Intent(replaces=3),  # type: ignore[arg-type]
        "intent",
    ],
)
def test_an_intent_that_an_engine_cannot_follow_is_refused(model: PreTrainedModel, intent: Intent) -> None:
    llm = LLM(model, ROOMY)
    with pytest.raises(RequestError):
        llm.generate([SHARED], FEW, intent)
    with pytest.raises(RequestError, match="as many Intents"):
        llm.generate([SHARED], FEW, [])
    assert not llm.core.has_work


# From an event loop


def test_intents_and_tenants_from_an_event_loop(model: PreTrainedModel) -> None:
    clock = Clock()
    llm = LLM(model, replace(ROOMY, leases=True, tenants={}), clock=clock)

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            await engine.set_tenant("a", LIMITS)
            intent = Intent(tenant="a", salt=b"s", keep_for_s=60.0)
            output = await engine.generate(SHARED, FEW, intent=intent).output()
            assert output.num_leased_tokens == 24
            rejected = await engine.generate(SHARED, SamplingParams(max_tokens=40), intent=intent).output()
            assert rejected.completions[0].finish_reason == "rejected"
            again = await engine.generate(SHARED, FEW, intent=intent, deadline_s=60.0).output()
            assert again.num_cached_tokens == 20
            await engine.remove_tenant("a")
            with pytest.raises(ConfigurationError, match="no tenant"):
                await engine.remove_tenant("a")
            with pytest.raises(RequestError, match="does not have"):
                await engine.generate(SHARED, FEW, intent=intent).output()

    asyncio.run(asyncio.wait_for(main(), 300.0))
    llm.core.space.check()


def test_who_streams_may_have_an_intent(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    updates = list(llm.stream([SHARED, SHARED], FEW, [Intent(salt=b"a"), Intent(salt=b"b", priority=1)]))
    assert {update.prompt for update in updates} == {0, 1}
    assert one(llm, SHARED, Intent(salt=b"a")).num_cached_tokens == 20
