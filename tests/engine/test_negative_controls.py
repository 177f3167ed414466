"""What is broken must show: each capability left out, blocks with other content, poison where something is read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedkv.attention import CPUBackend
from pagedkv.engine import LLM, SamplingParams
from pagedkv.engine.forward_pass import ForwardPass
from pagedkv.errors import EngineError
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS, compare, reference, reference_of, serve

ROOMY = replace(CONFIG, num_blocks=200)


def break_layers(llm: LLM, **changes: object) -> None:
    """Change the rule of every layer in the back end."""
    backend = llm.core._parts.runner._backend
    assert isinstance(backend, CPUBackend)
    storage = llm.core.executor.storage
    layers = [replace(layer, **changes) for layer in llm.groups.attention]  # type: ignore[arg-type]
    llm.core._parts.runner._backend = CPUBackend(storage, layers)


def forget_sinks(llm: LLM) -> None:
    """Leave the sinks out in the back end."""
    backend = llm.core._parts.runner._backend
    attend: Callable[..., torch.Tensor] = backend.attend

    def without(*given: object, sinks: object = None) -> torch.Tensor:
        del sinks
        return attend(*given)

    backend.attend = without  # type: ignore[assignment,method-assign]


def select_all(llm: LLM) -> None:
    """Let an indexer select every key."""
    new_pass = llm.core._parts.runner._forward_pass

    def without(*given: Any) -> ForwardPass:  # noqa: ANN401 - as a pass is made
        made = new_pass(*given)
        rows: Any = made.rows
        rows.selected = lambda _: rows.mask
        return made

    llm.core._parts.runner._forward_pass = without  # type: ignore[method-assign,assignment]


BROKEN: dict[str, tuple[str, Callable[[LLM], Any]]] = {
    "no window": ("mistral", lambda llm: break_layers(llm, window=0)),
    "a window that is too short": ("mistral", lambda llm: break_layers(llm, window=11)),
    "no chunk": ("llama4_text", lambda llm: break_layers(llm, chunk=0)),
    "no soft cap": ("gemma2", lambda llm: break_layers(llm, soft_cap=0.0)),
    "no sinks": ("gpt_oss", forget_sinks),
    "no selection": ("deepseek_v32", select_all),
    "another scale": ("llama", lambda llm: break_layers(llm, scale=0.3)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_capability_left_out_is_noticed(what: str) -> None:
    name, break_it = BROKEN[what]
    model = make_model(name)
    llm = LLM(model, ROOMY)
    break_it(llm)
    with pytest.raises((AssertionError, EngineError)):
        compare(serve(llm)[0], reference_of(name))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "bamba"])
def test_a_hit_on_other_content_is_noticed(name: str) -> None:
    model, shared = make_model(name), PROMPTS[:2]
    llm = LLM(model, ROOMY)
    params = SamplingParams(max_tokens=20)
    compare(serve(llm, shared[:1], params)[0], reference_of(name, shared[:1]))
    for pool in llm.core.executor.storage.pools.values():
        content = pool.device_bytes[pool.block_nbytes :].view(torch.float32)
        content[~content.isnan()] *= 1.5
    requests, records = serve(llm, shared[1:], params)
    assert sum(record.num_hit_tokens for record in records) >= 16
    with pytest.raises(AssertionError):
        compare(requests, reference_of(name, shared[1:]))


@pytest.mark.parametrize("kept", ["entries", "raw"])
def test_a_hit_on_other_entries_or_on_other_vectors_of_tokens_is_noticed(kept: str) -> None:
    """The hit is 24 tokens; entries of 4 tokens overlap, so that the first new one has vectors of tokens 20 to 23."""
    model, shared = make_model("deepseek_v4"), PROMPTS[:2]
    llm = LLM(model, ROOMY)
    params = SamplingParams(max_tokens=20)
    compare(serve(llm, shared[:1], params)[0], reference_of("deepseek_v4", shared[:1]))
    storage = llm.core.executor.storage
    for places in llm.groups.compressed.values():
        for each in places.values():
            place = getattr(each, kept)
            if place.name is None:
                blocks = storage.latents(place.group, place.index)
            else:
                blocks = storage.companion(place.group, place.name, place.index)
            blocks[1:] = blocks[1:].flip(1, 2)
    requests, records = serve(llm, shared[1:], params)
    assert sum(record.num_hit_tokens for record in records) >= 16
    with pytest.raises(AssertionError):
        compare(requests, reference_of("deepseek_v4", shared[1:]))


@pytest.mark.parametrize("name", ["deepseek_v32", "qwen4_exp_text"])
def test_a_hit_on_other_keys_of_an_indexer_is_noticed(name: str) -> None:
    """As where something that moves blocks leaves their companions out."""
    model, shared = make_model(name), PROMPTS[:2]
    llm = LLM(model, ROOMY)
    params = SamplingParams(max_tokens=20)
    compare(serve(llm, shared[:1], params)[0], reference_of(name, shared[:1]))
    for place in llm.groups.indexers.values():
        assert place.name is not None
        keys = llm.core.executor.storage.companion(place.group, place.name, place.index)
        keys[1:] = keys[1:].flip(1)
    requests, records = serve(llm, shared[1:], params)
    assert sum(record.num_hit_tokens for record in records) >= 16
    with pytest.raises(AssertionError):
        compare(requests, reference_of(name, shared[1:]))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "bamba"])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_hit_on_content_of_older_weights_is_noticed(name: str, is_told: bool) -> None:  # noqa: FBT001 - a parameter
    """A stale epoch: weights change, and the space's epoch is set, or not."""
    model, shared = make_model(name), PROMPTS[:2]
    llm = LLM(model, ROOMY)
    params = SamplingParams(max_tokens=20)
    compare(serve(llm, shared[:1], params)[0], reference_of(name, shared[:1]))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.add_(0.3 * weights.std() * torch.randn(weights.shape, generator=generator))
    if is_told:
        llm.core.space.set_weights_epoch("a step later")
    requests, records = serve(llm, shared[1:], params)
    num_hit_tokens = sum(record.num_hit_tokens for record in records)
    expected = reference(model, shared[1:])
    if is_told:
        assert num_hit_tokens == 0
        compare(requests, expected)
    else:
        assert num_hit_tokens >= 16
        with pytest.raises(AssertionError):
            compare(requests, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # NumPy's, where loops are plain Python
def test_poison_that_is_read_is_noticed() -> None:
    model = make_model("llama")
    llm = LLM(model, ROOMY)
    llm.submit(PROMPTS[:1], SamplingParams(max_tokens=20))
    for _ in range(4):
        llm.step()
    used = llm.core.space.block_ids(0)[2]
    pool = next(iter(llm.core.executor.storage.pools.values()))
    pool.device_bytes.view(pool.num_blocks, pool.block_nbytes)[used] = 255
    requests = list(llm.core._live.by_schedule.values())
    while llm.core.has_work:
        llm.step()
    with pytest.raises(AssertionError):
        compare(requests, reference_of("llama", PROMPTS[:1]))
