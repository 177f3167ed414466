"""Tiers of an engine: what one stored another loads, and whatever they do, answers are those of dense generation."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

from pagedkv.engine import LLM, AsyncLLM, EngineConfig, EngineRequest, Intent, SamplingParams
from pagedkv.engine.content import CpuBlockBytes
from pagedkv.engine.engine_tiers import EngineTiers, OpenTier
from pagedkv.errors import ConfigurationError
from pagedkv.space import Receipt
from pagedkv.tiers import BodyTier, FolderTier, HostBody, HostTier, ObjectTier, RedisTier, StoreStatistics, Tier
from pagedkv.tiers.served import TierCause
from tests.choosing import long_but
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, Reference, compare, poison, reference, serve
from tests.engine.tier_bodies import FAULTS, TestBody, tier_over
from tests.tiers.bodies import RedisServer, redis_server
from tests.tiers.examples import IDENTITY, parts_of, some_runs

NUM_NEW: Final = 6
PARAMS: Final = SamplingParams(max_tokens=NUM_NEW)
LONG: Final = [*range(20, 90)]
PROMPTS: Final = (LONG, [*range(100, 150)], [*LONG[:50], 3, 4, 5], [7, 8, 9])
"""Runs are 32 tokens: the first has two, the second one, the third shares one with the first."""
ROOMY: Final = replace(CONFIG, num_blocks=120, max_tokens=100, max_batched_tokens=64, warm_up=False)
SECONDS: Final = 300.0
WAITED_BEFORE_S: Final = 5.0


@pytest.fixture(scope="module")
def answers(model: PreTrainedModel) -> list[Reference]:
    return reference(model, PROMPTS, NUM_NEW)


@pytest.fixture
def body() -> Iterator[TestBody]:
    made = TestBody()
    yield made
    made.close()


def with_tiers(*tiers: Tier, config: EngineConfig = ROOMY) -> EngineConfig:
    return replace(config, tiers=tiers)


def stored(model: PreTrainedModel, config: EngineConfig, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    """Compute prompts with an engine, and store them."""
    llm = LLM(model, config)
    llm.generate(prompts, PARAMS)
    assert llm.core.close(SECONDS)


def forget_device(llm: LLM) -> None:
    """Empty device memory and nothing else."""
    llm.core.space.reset_prefix_cache()


def loaded(requests: Sequence[EngineRequest]) -> list[int]:
    return [sum(request.output().num_loaded_tokens.values()) for request in requests]


def run_until(llm: LLM, requests: Sequence[EngineRequest]) -> None:
    for _ in range(10_000):
        if all(request.is_finished for request in requests):
            return
        llm.step()
        llm.core.space.check()
    raise AssertionError("a request is stuck")


FAMILIES: Final = {
    "llama": [64, 32, 0, 0],
    "gemma3_text": [68, 48, 52, 0],
    "mistral": [68, 48, 52, 0],
    "deepseek_v3": [64, 32, 0, 0],
    "deepseek_v32": [64, 32, 0, 0],
    "deepseek_v4": [64, 48, 48, 0],
    "lfm2": [64, 48, 48, 0],
}
"""Tokens that each prompt loads: in whole runs, or up to where windows and states were stored."""


@pytest.mark.parametrize("family", long_but(("llama", "gemma3_text", "deepseek_v32", "deepseek_v4", "lfm2"), FAMILIES))
def test_a_folder_serves_another_engine_and_answers_stay(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    config = with_tiers(
        FolderTier(tmp_path, "64MiB", loads="always", deadline_s=SECONDS),
        config=replace(ROOMY, overlap=family == "gemma3_text"),
    )
    stored(model, config)
    llm = LLM(model, config)
    poison(llm)
    requests, _ = serve(llm, PROMPTS, PARAMS)
    compare(requests, reference(model, PROMPTS, NUM_NEW))
    assert loaded(requests) == FAMILIES[family]
    assert all(
        sum(each) <= (request.num_cached_tokens or 0)
        for each, request in zip([request.num_loaded_tokens.values() for request in requests], requests, strict=True)
    )


@pytest.mark.parametrize("medium", ["redis", "object"])
def test_servers_serve_another_engine(
    model: PreTrainedModel, answers: list[Reference], tmp_path: Path, medium: str
) -> None:
    with redis_server(tmp_path) if medium == "redis" else nullcontext(f"file://{tmp_path}") as url:
        tier = (RedisTier if medium == "redis" else ObjectTier)(url, "64MiB", loads="always", deadline_s=SECONDS)
        stored(model, with_tiers(tier))
        llm = LLM(model, with_tiers(tier))
        requests, _ = serve(llm, PROMPTS, PARAMS)
        compare(requests, answers)
        assert loaded(requests) == [64, 32, 0, 0]
        assert llm.close()


def test_copies_of_a_load_go_on_over_steps_while_others_run(
    model: PreTrainedModel, answers: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBlockBytes, "filled_nbytes_a_step", 1)
    monkeypatch.setattr(CpuBlockBytes, "filled_nbytes_at_once", 1)
    llm = LLM(model, with_tiers(HostTier("16MiB", loads="always", deadline_s=SECONDS)))
    llm.generate(PROMPTS[:1], PARAMS)
    assert llm.flush_tiers(SECONDS)
    forget_device(llm)
    others = llm.submit(PROMPTS[1:2], replace(PARAMS, max_tokens=30))
    llm.step()
    waiting = llm.submit(PROMPTS[:1], PARAMS)
    num_steps = 0
    while not waiting[0].scheduled.rows and not others[0].is_finished:
        llm.step()
        llm.core.space.check()
        num_steps += 1
    assert num_steps >= 3
    run_until(llm, [*waiting, *others])
    compare(waiting, answers[:1])
    assert loaded(waiting) == [64]


def test_promise_29_hits_by_medium_add_up_over_two_tiers(
    model: PreTrainedModel, answers: list[Reference], tmp_path: Path
) -> None:
    folder = FolderTier(tmp_path, "64MiB", loads="always", deadline_s=SECONDS)
    stored(model, with_tiers(folder), PROMPTS[:1])
    llm = LLM(model, with_tiers(HostTier("64MiB", loads="always", deadline_s=SECONDS), folder))
    first, _ = serve(llm, [LONG[:40]], PARAMS)
    assert first[0].num_loaded_tokens == {"folder": 32}
    assert llm.core.flush_tiers(SECONDS)
    forget_device(llm)
    requests, _ = serve(llm, PROMPTS, PARAMS)
    compare(requests, answers)
    assert requests[0].num_loaded_tokens == {"host": 32, "folder": 32}
    everyone = [*first, *requests]
    for tier in llm.core.tier_statistics():
        assert tier.num_hit_tokens == sum(request.num_loaded_tokens.get(tier.medium, 0) for request in everyone)
        assert tier.num_unused_tokens == 0
    receipts = sum((request.output().receipt for request in everyone), Receipt())
    assert receipts == llm.core.space.statistics().receipts
    assert receipts.num_hit == sum(request.num_cached_tokens or 0 for request in everyone)
    assert receipts.num_loaded == {tier.medium: tier.num_hit_tokens for tier in llm.core.tier_statistics()}
    assert requests[0].output().receipt.hits_by_medium["host"] == 32
    assert sum(receipts.hits_by_medium.values()) == receipts.num_hit
    assert min(receipts.hits_by_medium.values()) >= 0


def test_promise_29_a_hit_from_a_tier_counts_when_a_step_behind_it_is_acknowledged(
    model: PreTrainedModel, answers: list[Reference], body: TestBody
) -> None:
    """It counted at the admission: what was aborted before its first step was over counted as hit."""
    config = with_tiers(tier_over(body), config=replace(ROOMY, overlap=True))
    llm = LLM(model, config)
    serve(llm, PROMPTS[:1], PARAMS)
    assert llm.flush_tiers(SECONDS)
    forget_device(llm)
    aborted = llm.core.add(np.array(LONG, np.int32), PARAMS)
    while aborted.num_cached_tokens is None:
        llm.core.step()
    llm.core.abort(aborted)
    while llm.core.has_work:
        llm.core.step()
    (tier,) = llm.tier_statistics()
    assert (tier.num_loaded_tokens, tier.num_hit_tokens, tier.num_unused_tokens) == (64, 0, 64)
    assert (aborted.num_loaded_tokens, aborted.output().receipt.num_hit) == ({}, 0)
    forget_device(llm)
    requests, _ = serve(llm, PROMPTS[:1], PARAMS)
    compare(requests, answers[:1])
    (tier,) = llm.tier_statistics()
    assert tier.num_hit_tokens == requests[0].output().receipt.num_hit == 64
    assert requests[0].num_loaded_tokens == {"test": 64}


def test_others_compute_while_a_request_waits_and_equal_prefixes_share_one_load(
    model: PreTrainedModel, answers: list[Reference], body: TestBody
) -> None:
    llm = LLM(model, with_tiers(tier_over(body)))
    llm.generate(PROMPTS[:1], PARAMS)
    assert llm.core.flush_tiers(SECONDS)
    forget_device(llm)
    body.may_go_on.clear()
    waiting = llm.submit([PROMPTS[0], PROMPTS[0], PROMPTS[2]], PARAMS)
    others = llm.submit([PROMPTS[1], PROMPTS[3]], PARAMS)
    run_until(llm, others)
    assert not any(request.is_finished for request in waiting)
    assert llm.core.scheduler.num_loading == 3
    assert not any(request.scheduled.rows for request in waiting)
    body.may_go_on.set()
    run_until(llm, waiting)
    compare([waiting[0], others[0], waiting[2], others[1]], answers)
    compare(waiting[1:2], answers[:1])
    assert body.calls["read"] == 2
    assert loaded(waiting) == [64, 0, 0]
    assert all((request.num_cached_tokens or 0) >= least for request, least in zip(waiting, (64, 64, 48), strict=True))


def test_a_request_that_goes_leaves_the_load_to_others_and_the_last_one_ends_it(
    model: PreTrainedModel, answers: list[Reference], body: TestBody
) -> None:
    llm = LLM(model, with_tiers(tier_over(body)))
    llm.generate(PROMPTS[:1], PARAMS)
    assert llm.core.flush_tiers(SECONDS)
    forget_device(llm)
    body.may_go_on.clear()
    first, second = llm.submit([LONG, LONG], PARAMS)
    llm.step()
    llm.core.abort(first)
    assert llm.core.scheduler.num_loading == 1
    body.may_go_on.set()
    run_until(llm, [second])
    compare([second], answers[:1])
    assert loaded([first, second]) == [0, 64]
    forget_device(llm)
    body.may_go_on.clear()
    (third,) = llm.submit([LONG], PARAMS)
    llm.step()
    llm.core.abort(third)
    assert not llm.core.has_work
    assert llm.core.space.statistics().pools[0].num_free == llm.core.space.config.blocks_by_pool()["full"] - 1


def test_what_is_not_there_by_the_deadline_is_computed(
    model: PreTrainedModel, answers: list[Reference], body: TestBody
) -> None:
    llm = LLM(model, with_tiers(tier_over(body, deadline_s=0.02)))
    llm.generate(PROMPTS[:1], PARAMS)
    assert llm.core.flush_tiers(SECONDS)
    forget_device(llm)
    body.may_go_on.clear()
    requests, _ = serve(llm, PROMPTS[:1], PARAMS)
    compare(requests, answers[:1])
    (note,) = requests[0].output().tier_notes
    assert (note.start, note.end, note.cause) == (0, 64, TierCause.TOO_SLOW)
    assert str(note).startswith("tokens 0 to 64 were in tier test: too slow after 0.0")


@pytest.mark.parametrize(("fault", "cause"), [
    ("flip", TierCause.CORRUPT), ("cut", TierCause.CORRUPT), ("other", TierCause.CORRUPT), ("gone", TierCause.GONE),
    ("fail", TierCause.FAILED), ("timeout", TierCause.FAILED), ("raise", TierCause.FAILED),
])  # fmt: skip
def test_a_fault_costs_what_is_behind_it_and_is_explained(
    model: PreTrainedModel, answers: list[Reference], body: TestBody, fault: str, cause: TierCause
) -> None:
    llm = LLM(model, with_tiers(tier_over(body, settings={"max_reads": 1})))
    llm.generate(PROMPTS[:1], PARAMS)
    assert llm.core.flush_tiers(SECONDS)
    forget_device(llm)
    body.faults["read"] += [None, fault]
    requests, _ = serve(llm, PROMPTS[:1], PARAMS)
    compare(requests, answers[:1])
    causes = [(note.start, note.end, note.cause) for note in requests[0].output().tier_notes]
    assert causes == [(0, 32, TierCause.LOADED), (32, 64, cause)]
    (tier,) = llm.core.tier_statistics()
    assert tier.not_loaded[cause] == 32


FAULT: Final = st.sampled_from((None, None, None, *FAULTS))


@settings(max_examples=8, deadline=None)
@given(
    reads=st.lists(FAULT, max_size=8),
    writes=st.lists(FAULT, max_size=8),
    family=st.sampled_from(["llama", "gemma3_text"]),
)
def test_whatever_a_tier_does_answers_are_those_of_dense_generation(
    reads: list[str | None], writes: list[str | None], family: str
) -> None:
    model = made(family)
    body = TestBody()
    short = replace(ROOMY, num_blocks=34, max_sequences=3)
    llm = LLM(model, with_tiers(tier_over(body, deadline_s=0.02, settings={"breaker_failures": 3}), config=short))
    poison(llm)
    body.faults["write"] += writes
    expected = expected_of(family)
    try:
        for _ in range(2):
            requests = llm.submit(PROMPTS, PARAMS)
            run_until(llm, requests)
            compare(requests, expected)
            body.may_go_on.set()
            assert llm.core.flush_tiers(SECONDS) or any(reads) or any(writes)
            body.faults["read"] += reads
    finally:
        body.close()


MODELS: Final[dict[str, PreTrainedModel]] = {}
EXPECTED: Final[dict[str, list[Reference]]] = {}


def made(family: str) -> PreTrainedModel:
    return MODELS.setdefault(family, make_model(family)) if family not in MODELS else MODELS[family]


def expected_of(family: str) -> list[Reference]:
    if family not in EXPECTED:
        EXPECTED[family] = reference(made(family), PROMPTS, NUM_NEW)
    return EXPECTED[family]


class Clock:
    """A clock that advances by so much at each reading."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        """Look at it."""
        self.now_s += self.step_s
        return self.now_s


def test_a_load_has_to_be_faster_than_computing(
    model: PreTrainedModel, answers: list[Reference], tmp_path: Path
) -> None:
    tier = FolderTier(tmp_path, "64MiB", deadline_s=SECONDS)
    stored(model, with_tiers(tier))
    llm = LLM(model, with_tiers(tier), clock=Clock(1000.0))  # computing takes hours
    llm.generate([range(150, 190)], SamplingParams(max_tokens=1))
    tiers = llm.core._live.tiers
    assert isinstance(tiers, EngineTiers)
    for num_loaded in (64, 64, 0):
        requests, _ = serve(llm, PROMPTS[:1], PARAMS)
        compare(requests, answers[:1])
        assert loaded(requests) == [num_loaded]
        forget_device(llm)
        if llm.core.tier_statistics()[0].num_loads == 2:
            tiers._rate.note(10**15, 10**15, 0.0)  # and takes no time from now on
    (note,) = requests[0].output().tier_notes
    assert (note.start, note.end, note.cause) == (0, 64, TierCause.FASTER)


def test_loads_give_way_before_a_running_request_is_preempted(
    model: PreTrainedModel, answers: list[Reference], body: TestBody
) -> None:
    llm = LLM(model, with_tiers(tier_over(body), config=replace(ROOMY, num_blocks=34, watermark=0.0)))
    llm.generate(PROMPTS[:1], PARAMS)
    assert llm.core.flush_tiers(SECONDS)
    forget_device(llm)
    running = llm.submit([PROMPTS[1]], replace(PARAMS, max_tokens=48))
    llm.step()
    body.may_go_on.clear()
    (waiting,) = llm.submit([LONG], PARAMS)
    llm.step()
    assert llm.core.scheduler.num_loading == 1
    run_until(llm, running)
    assert running[0].num_preemptions == 0
    body.may_go_on.set()
    run_until(llm, [waiting])
    compare([waiting], answers[:1])
    compare(running, reference(model, PROMPTS[1:2], 48))
    assert waiting.tier_notes[0].cause is TierCause.GAVE_WAY


def test_promise_10_reset_new_weights_and_forgetting_reach_the_tiers(
    model: PreTrainedModel, answers: list[Reference], tmp_path: Path
) -> None:
    llm = LLM(model, with_tiers(FolderTier(tmp_path, "64MiB", loads="always", deadline_s=SECONDS)))

    def entries() -> int:
        assert llm.core.flush_tiers(SECONDS)
        return llm.core.tier_statistics()[0].store.num_entries

    def served() -> list[int]:
        requests, _ = serve(llm, PROMPTS[:2], PARAMS)
        compare(requests, answers[:2])
        return loaded(requests)

    served()
    assert entries() == 3
    llm.forget(LONG, start=40)
    assert entries() == 2
    forget_device(llm)
    assert served() == [32, 32]
    llm.reset_prefix_cache()
    assert entries() == 0
    assert served() == [0, 0]
    assert entries() == 2  # what was forgotten is not stored again
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    kept = weight.detach().clone()

    def change(factor: float) -> None:
        weight.data.copy_(kept * factor)

    try:
        llm.set_weights_epoch("second", change=lambda: change(1.5))
        assert entries() == 0
        others, _ = serve(llm, PROMPTS[:2], PARAMS)
        compare(others, reference(model, PROMPTS[:2], NUM_NEW))
        assert loaded(others) == [0, 0]
    finally:
        llm.set_weights_epoch("third", change=lambda: change(1.0))
    assert entries() == 2  # the first weights are back, and so is their store
    assert served() == [32, 32]


def test_withdrawn_content_does_not_come_back_from_a_tier(
    model: PreTrainedModel, answers: list[Reference], tmp_path: Path
) -> None:
    """It did: `withdraw` reached the device alone, and the next request loaded it again."""
    tier = FolderTier(tmp_path, "64MiB", loads="always", deadline_s=SECONDS)
    llm = LLM(model, with_tiers(tier))
    serve(llm, PROMPTS[:1], PARAMS)
    assert llm.flush_tiers(SECONDS)
    before = llm.tier_statistics()[0].store.num_entries
    hit = llm.core.space.match(LONG)
    bad = hit.block_ids[0][40 // llm.core.space.config.groups[0].block_size]  # in the second entry
    for _ in range(2):
        llm.core.space.withdraw([bad])
        forget_device(llm)
        requests, _ = serve(llm, PROMPTS[:1], PARAMS)
        compare(requests, answers[:1])
        assert loaded(requests) == [32]
        assert llm.flush_tiers(SECONDS)
        assert llm.tier_statistics()[0].store.num_entries == 1 < before
    other = LLM(model, with_tiers(tier))
    requests, _ = serve(other, PROMPTS[:1], PARAMS)
    compare(requests, answers[:1])
    assert loaded(requests) == [32]


def test_a_tier_that_does_not_answer_after_new_weights_is_left_out(
    model: PreTrainedModel, answers: list[Reference], caplog: pytest.LogCaptureFixture
) -> None:
    bodies: list[HostBody] = []

    def make(_: bytes) -> HostBody:
        if bodies:
            raise OSError("gone")
        bodies.append(HostBody())
        return bodies[0]

    llm = LLM(model, with_tiers(BodyTier(make, "1MiB", "tape"), HostTier("1MiB", loads="always", deadline_s=SECONDS)))
    llm.generate(PROMPTS, PARAMS)
    with caplog.at_level(logging.WARNING, "pagedkv.tiers"):
        llm.set_weights_epoch("second")
    assert [record.getMessage() for record in caplog.records] == [
        "tier tape is left out after new weights: the tape tier cannot be opened: gone"
    ]
    llm.generate(PROMPTS, PARAMS)
    assert llm.flush_tiers(SECONDS)
    forget_device(llm)
    requests, _ = serve(llm, PROMPTS, PARAMS)
    compare(requests, answers)
    assert loaded(requests) == [64, 32, 0, 0]
    assert [tier.name for tier in llm.tier_statistics()] == ["host"]


def test_promise_8_another_salt_is_not_served(model: PreTrainedModel, answers: list[Reference], tmp_path: Path) -> None:
    llm = LLM(model, with_tiers(FolderTier(tmp_path, "64MiB", loads="always", deadline_s=SECONDS)))
    for salt, expected in ((b"a", 0), (b"b", 0), (b"", 0), (b"a", 64)):
        (output,) = llm.generate([LONG], PARAMS, Intent(salt=salt))
        assert list(output.token_ids) == answers[0].token_ids
        assert sum(output.num_loaded_tokens.values()) == expected
        assert llm.core.flush_tiers(SECONDS)
        forget_device(llm)


def test_the_second_offer_is_stored(model: PreTrainedModel) -> None:
    llm = LLM(model, with_tiers(HostTier("64MiB", admission="second-offer", loads="always", deadline_s=SECONDS)))
    for expected in (0, 2):  # a request that ends long after its prompt was computed offers that once
        llm.generate([LONG], PARAMS)
        assert llm.core.flush_tiers(SECONDS)
        assert llm.core.tier_statistics()[0].store.num_entries == expected


BEFORE_EVICTION: Final = HostTier("64MiB", admission="before-eviction", loads="always", deadline_s=SECONDS)


def num_entries(llm: LLM) -> int:
    for tier in llm.core._live.tiers._tiers:  # type: ignore[union-attr]
        assert tier.store.wait_until_quiet(SECONDS)
    return llm.tier_statistics()[0].store.num_entries


def test_what_is_about_to_be_evicted_is_stored_and_nothing_before(model: PreTrainedModel) -> None:
    """A pool in which a prompt of 20 blocks leaves few of the last one; what it leaves is no part of a load."""
    prompts = [LONG, [*range(120, 190)], LONG]
    expected = reference(model, prompts, NUM_NEW)
    config = replace(ROOMY, num_blocks=24, watermark=0.0)
    llm = LLM(model, with_tiers(BEFORE_EVICTION, config=config))
    stored_so_far = []
    for prompt, answer in zip(prompts, expected, strict=True):
        requests, _ = serve(llm, [prompt], PARAMS)
        compare(requests, [answer])
        stored_so_far.append(num_entries(llm))
    assert stored_so_far == [0, 2, 3]
    assert sum(loaded(requests)) >= 40
    assert requests[0].output().num_cached_tokens >= 64


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_what_waits_for_its_eviction_is_stored_by_a_flush(family: str) -> None:
    """Windows are stored as they come, at the ends of prompts and answers."""
    model = made(family)
    llm = LLM(model, with_tiers(BEFORE_EVICTION))
    llm.generate(PROMPTS, PARAMS)
    num_ends = num_entries(llm)
    assert (num_ends == 0) is (family == "llama")
    assert llm.flush_tiers(SECONDS)
    assert num_entries(llm) == num_ends + 3
    forget_device(llm)
    requests, _ = serve(llm, PROMPTS, PARAMS)
    compare(requests, expected_of(family))
    assert loaded(requests) == FAMILIES[family]


def test_what_was_forgotten_is_not_stored_at_its_eviction(model: PreTrainedModel) -> None:
    llm = LLM(model, with_tiers(BEFORE_EVICTION))
    llm.generate(PROMPTS[:2], PARAMS)
    llm.forget(LONG)
    assert llm.flush_tiers(SECONDS)
    assert num_entries(llm) == 1
    llm.generate(PROMPTS[:2], PARAMS)
    llm.reset_prefix_cache()
    assert llm.flush_tiers(SECONDS)
    assert num_entries(llm) == 0


def test_each_of_several_answers_is_stored(model: PreTrainedModel) -> None:
    """They share the prompt's run, and each has one of its own behind it."""
    llm = LLM(model, with_tiers(HostTier("64MiB")))
    params = replace(PARAMS, max_tokens=45, ignore_eos=True, n=2, temperature=2.0, seed=3)
    (answer,) = llm.generate([LONG[:50]], params)
    first, second = (completion.token_ids for completion in answer.completions)
    assert first[:14] != second[:14]
    assert llm.core.flush_tiers(SECONDS)
    assert llm.core.tier_statistics()[0].store.num_entries == 3


def test_an_outage_is_one_line_in_the_log(
    model: PreTrainedModel, answers: list[Reference], body: TestBody, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(model, with_tiers(tier_over(body, settings={"breaker_failures": 1, "breaker_pause_s": 1000.0,
                                                          "breaker_longest_pause_s": 1000.0})))  # fmt: skip
    body.faults["write"].append("fail")
    with caplog.at_level(logging.WARNING, "pagedkv.tiers"):
        for _ in range(3):
            requests, _ = serve(llm, PROMPTS, PARAMS)
            compare(requests, answers)
            llm.core.flush_tiers(SECONDS)
            forget_device(llm)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("tier test is out of service")
    assert [str(note) for note in requests[3].tier_notes + requests[0].tier_notes] == ["tier test: out of service"]


def test_a_dead_server_is_one_line_and_one_when_it_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each probe of a dead server was a line that it is back, and one that it is out again."""
    seeds = count()
    settings = {"breaker_failures": 2, "breaker_pause_s": 0.01, "breaker_longest_pause_s": 0.02}
    with closing(RedisServer(tmp_path)) as server, caplog.at_level(logging.WARNING, "pagedkv.tiers"):
        tier = OpenTier(RedisTier(server.url, "1MiB", timeout_s=0.5, settings=settings), IDENTITY, 1000)

        def use_until(is_so: Callable[[StoreStatistics], bool]) -> None:
            until = time.monotonic() + SECONDS
            while not is_so(tier.store.statistics()) and time.monotonic() < until:
                more = some_runs(2, seed=next(seeds))
                tier.store.offer(more, [parts_of(run) for run in more])
                tier.store.load(more, 1.0).wait(SECONDS)
                tier.log_outage()
            assert is_so(tier.store.statistics())

        use_until(lambda seen: seen.num_entries > 0)
        server.kill()
        use_until(lambda seen: seen.times_opened >= 5)
        tier.log_outage()
        assert [record.getMessage()[:60] for record in caplog.records] == [f"tier {tier.name} is out of service"[:60]]
        server.start()
        use_until(lambda seen: str(seen.breaker) == "closed")
        tier.log_outage()
        assert [record.getMessage() for record in caplog.records[1:]] == [f"tier {tier.name} is in service again"]
        tier.store.close()


def test_a_flush_tells_whether_all_was_stored(model: PreTrainedModel, body: TestBody) -> None:
    """It told that all was, where every write had failed."""
    llm = LLM(model, with_tiers(tier_over(body)))
    body.faults["write"].extend(["fail"] * 2)
    llm.generate([LONG], PARAMS)
    assert not llm.core.flush_tiers(SECONDS)
    assert llm.core.flush_tiers(SECONDS), "nothing more was to be stored"
    llm.generate([PROMPTS[1]], PARAMS)
    assert llm.core.flush_tiers(SECONDS)
    body.faults["write"].extend(["fail"] * 5)
    llm.generate([[*range(60, 6, -1)]], PARAMS)
    assert not llm.core.close(SECONDS)


def test_what_is_dropped_while_a_tier_is_out_of_service_was_not_stored(model: PreTrainedModel, body: TestBody) -> None:
    settings = {"breaker_failures": 1, "breaker_pause_s": 1000.0, "breaker_longest_pause_s": 1000.0}
    llm = LLM(model, with_tiers(tier_over(body, settings=settings)))
    body.faults["write"].append("fail")
    for prompt in PROMPTS[:2]:
        llm.generate([prompt], PARAMS)
        assert not llm.core.flush_tiers(SECONDS)


def test_closing_waits_once_for_a_medium_that_hangs(model: PreTrainedModel, body: TestBody) -> None:
    """It waited for the writes, and then five seconds more for each tier."""
    llm = LLM(model, with_tiers(tier_over(body)))
    body.may_go_on.clear()
    llm.generate([LONG], PARAMS)
    begun_s = time.monotonic()
    assert not llm.core.close(0.1)
    assert time.monotonic() - begun_s < WAITED_BEFORE_S


def test_an_event_loop_is_served_from_tiers(model: PreTrainedModel, answers: list[Reference], tmp_path: Path) -> None:
    config = with_tiers(FolderTier(tmp_path, "64MiB", loads="always", deadline_s=SECONDS))
    stored(model, config)

    async def ask() -> list[int]:
        async with AsyncLLM(LLM(model, config)) as engine:
            streams = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
            outputs = [await stream.output() for stream in streams]
        assert [list(output.token_ids) for output in outputs] == [each.token_ids for each in answers]
        return [sum(output.num_loaded_tokens.values()) for output in outputs]

    assert sum(asyncio.run(ask())) == 96


def test_tiers_that_do_not_answer_are_refused_when_the_engine_is_built(model: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    refused = (
        (RedisTier("redis://localhost:1/0", timeout_s=0.2), "does not answer PING within 0.2 s: redis://localhost:1/0"),
        (ObjectTier("nonsense://bucket"), "object store of a tier"),
        (FolderTier(file, "1GiB"), "file"),
        (FolderTier(f"{tmp_path}/../x", "1GiB"), r"\.\."),
    )
    for tier, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            LLM(model, with_tiers(HostTier("1MiB"), tier))
    with pytest.raises(ConfigurationError, match="prefix_caching=True"):
        with_tiers(HostTier("1MiB"), config=replace(ROOMY, prefix_caching=False))
    with pytest.raises(ConfigurationError, match="a tier"):
        replace(ROOMY, tiers=("host:1GiB",))  # type: ignore[arg-type]
