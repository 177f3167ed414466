"""Engines of one process that share memory: no request fails, and memory goes where requests are."""

import dataclasses
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.engine import LLM, EngineConfig, MemoryBroker, PoolSize, SamplingParams, share_by_demand
from pagedkv.errors import ConfigurationError, DeviceUnavailableError, EngineError
from tests.choosing import long_but
from tests.engine.serving import reference

CONFIG = EngineConfig(
    block_size=4,
    num_blocks=256,
    kv_at_first=0.5,
    max_sequences=8,
    max_batched_tokens=64,
    max_tokens=256,
    self_test=False,
)


def new_model(seed: int) -> LlamaForCausalLM:
    """Make a small model; a block of 4 tokens has 2 KiB, and two make a page of memory."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2,
        num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    return cast("LlamaForCausalLM", LlamaForCausalLM(config).eval())


def new_llm(seed: int = 0, config: EngineConfig = CONFIG, **changes: object) -> LLM:
    """Make an engine whose pool changes its size."""
    return LLM(new_model(seed), dataclasses.replace(config, **changes))  # type: ignore[arg-type]


def prompts_of(count: int, length: int, first: int) -> list[list[int]]:
    """Make prompts that share nothing."""
    generator = torch.Generator().manual_seed(first)
    return torch.randint(2, 100, (count, length), generator=generator).tolist()


def run(broker: MemoryBroker, most_steps: int = 5000) -> int:
    """Step until all is done; return the number of steps."""
    num_steps = 0
    while broker.has_work:
        broker.step()
        num_steps += 1
        assert num_steps < most_steps, "requests wait for memory that never comes"
    return num_steps


def test_an_engine_begins_with_a_share_of_its_blocks() -> None:
    llm = new_llm()
    size = llm.core.pool_size
    (pool,) = llm.core.executor.storage.pools.values()
    block_nbytes = pool.block_nbytes
    assert pool.run == 2
    assert size.most_nbytes == 256 * block_nbytes
    assert size.nbytes == 128 * block_nbytes == llm.core.executor.storage.device_nbytes
    assert llm.core.space.num_absent_blocks() == 128
    assert size.unit_nbytes % 4096 == 0
    assert llm.core.memory.kv_nbytes == size.nbytes


def test_answers_are_the_models_own_while_the_pool_changes_between_steps() -> None:
    model = new_model(0)
    llm = LLM(model, CONFIG)
    prompts = prompts_of(10, 30, first=1)
    requests = llm.submit(prompts, SamplingParams(max_tokens=24))
    num_steps = num_gone = 0
    while not all(request.is_finished for request in requests):
        llm.step()
        if num_steps % 2:
            num_gone += llm.core.shrink(1 + num_steps % 23)
        else:
            absent = llm.core.space.num_absent_blocks() // 2
            llm.core.grow(min(absent, num_steps % 17))
        llm.core.space.check()
        num_steps += 1
    assert num_gone > 20
    for request, expected in zip(requests, reference(model, prompts, 24), strict=True):
        answer = list(llm.output(request).token_ids)
        assert answer[: expected.num_certain] == expected.token_ids[: expected.num_certain]


def test_a_request_waits_for_blocks_that_may_come_back() -> None:
    llm = new_llm()
    (request,) = llm.submit(prompts_of(1, 30, first=2), SamplingParams(max_tokens=100))
    assert llm.core.shrink(1000) == 63
    for _ in range(5):
        llm.step()
    assert not request.is_finished
    llm.core.grow(8)  # too few for its end, which it reaches by waiting again
    for _ in range(60):
        llm.step()
    assert not request.is_finished
    llm.core.grow(60)
    while not request.is_finished:
        llm.step()
    assert len(llm.output(request).token_ids) == 100


def test_blocks_without_memory_are_not_in_use() -> None:
    llm = new_llm()
    llm.submit(prompts_of(1, 30, first=2), SamplingParams(max_tokens=4))
    assert llm.step().num_used_blocks == 8


def test_nothing_is_given_back_while_blocks_are_copied() -> None:
    class Copy:
        is_over = False

        def is_done(self) -> bool:
            return self.is_over

    llm, copy = new_llm(), Copy()
    llm.core.executor.storage.began(copy)
    assert llm.core.shrink(1) == 0
    assert llm.core.space.num_absent_blocks() == 128
    copy.is_over = True
    assert llm.core.shrink(1) == 1


def test_blocks_whose_memory_cannot_be_had_stay_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = new_llm()

    def fail(*_: object) -> None:
        raise DeviceUnavailableError("mine")

    monkeypatch.setattr(llm.core.executor.storage, "take", fail)
    with pytest.raises(DeviceUnavailableError, match="mine"):
        llm.core.grow(1)
    assert llm.core.space.num_absent_blocks() == 128
    llm.core.space.check()


def test_running_requests_keep_their_blocks() -> None:
    llm = new_llm()
    llm.submit(prompts_of(2, 30, first=3), SamplingParams(max_tokens=8))
    llm.step()
    live = llm.core.space.num_live_blocks()
    assert llm.core.shrink(1000) > 0
    assert llm.core.space.num_live_blocks() == live
    assert llm.core.shrink(1000) == 0


def test_sleep_and_wake_keep_what_is_absent() -> None:
    llm = new_llm()
    before = llm.core.pool_size.nbytes
    llm.core.sleep()
    with pytest.raises(EngineError, match="sleeps"):
        llm.core.grow(1)
    llm.core.wake()
    assert llm.core.pool_size.nbytes == before


def test_what_keeps_its_size_is_told() -> None:
    fixed = new_llm(kv_at_first=None)
    with pytest.raises(ConfigurationError, match="kv_at_first"):
        fixed.core.shrink(1)
    with pytest.raises(ConfigurationError, match="kv_at_first"):
        MemoryBroker([fixed.core, new_llm().core])


def test_an_engine_that_could_never_have_all_its_blocks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="engine 0 may come to"):
        MemoryBroker([new_llm(kv_at_first=0.4).core, new_llm(kv_at_first=0.4).core])


@pytest.mark.parametrize("busy", long_but((1,), (0, 1)))
def test_memory_goes_to_the_engine_that_has_requests(busy: int) -> None:
    llms = [new_llm(0, kv_at_first=0.52), new_llm(1, kv_at_first=0.52)]
    broker = MemoryBroker([llm.core for llm in llms])
    requests = llms[busy].submit(prompts_of(20, 100, first=4), SamplingParams(max_tokens=60))
    largest = 0
    while broker.has_work:
        broker.step()
        largest = max(largest, llms[busy].core.pool_size.nbytes)
        assert sum(llm.core.pool_size.nbytes for llm in llms) <= broker.total_nbytes
    assert all(len(llms[busy].output(request).token_ids) == 60 for request in requests)
    assert largest == llms[busy].core.pool_size.most_nbytes
    assert broker.num_moves > 20


def test_requests_of_both_that_need_almost_all_the_memory_take_turns() -> None:
    """Each engine's requests alone fit; neither starves the other, though new ones always wait."""
    llms = [new_llm(0, num_blocks=64, kv_at_first=0.55), new_llm(1, num_blocks=64, kv_at_first=0.55)]
    broker = MemoryBroker([llm.core for llm in llms])
    requests = [llm.submit(prompts_of(4, 150, first=5), SamplingParams(max_tokens=90)) for llm in llms]
    run(broker)
    for llm, own in zip(llms, requests, strict=True):
        assert [len(llm.output(request).token_ids) for request in own] == [90] * 4
        llm.core.space.check()


def test_a_rule_is_an_argument_and_is_held_to_what_is_possible() -> None:
    told: list[Sequence[PoolSize]] = []

    def all_to_the_second(sizes: Sequence[PoolSize], total_nbytes: int) -> list[int]:
        told.append(sizes)
        return [-5, 10 * total_nbytes]

    llms = [new_llm(0, kv_at_first=0.52), new_llm(1, kv_at_first=0.52)]
    broker = MemoryBroker([llm.core for llm in llms], rule=all_to_the_second)
    broker.balance()
    first, second = (llm.core.pool_size for llm in llms)
    assert second.nbytes == second.most_nbytes
    assert first.nbytes >= first.least_nbytes
    assert len(told) == 1
    with pytest.raises(ConfigurationError, match="among 1 engines"):
        MemoryBroker([llm.core for llm in llms], rule=lambda _sizes, _total: [1]).balance()


def size(nbytes: int, wanted: int, first: int = 0, arrived: float = 0.0) -> PoolSize:
    """Make the size of an engine with at least 4 and at most 96 bytes, in pieces of 4."""
    return PoolSize(4, nbytes, 4, 96, wanted, first, arrived)


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([size(50, 96), size(50, 0)], [96, 4]),
        ([size(50, 30), size(50, 30)], [50, 50]),
        ([size(50, 96), size(50, 96)], [50, 50]),
        ([size(50, 96), size(50, 20)], [80, 20]),
        ([size(90, 96), size(10, 96, first=90)], [7, 93]),
        ([size(50, 96, first=90, arrived=1.0), size(50, 96, first=90, arrived=2.0)], [93, 7]),
        ([size(50, 96, first=90, arrived=2.0), size(50, 96, first=90, arrived=1.0)], [7, 93]),
        ([size(50, 96, first=40, arrived=2.0), size(50, 96, first=50, arrived=1.0)], [45, 55]),
        ([size(30, 96), size(30, 96), size(40, 10)], [45, 45, 10]),
        ([size(96, 10), size(4, 10)], [90, 10]),
    ],
)
def test_the_rule_by_demand(sizes: list[PoolSize], shares: list[int]) -> None:
    assert share_by_demand(sizes, 100) == shares
