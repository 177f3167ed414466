"""What the probe sees: the groups that models/ derives from the config, and what is refused by name and reason."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pagedkv.device import StateShape
from pagedkv.engine import LLM, EngineConfig
from pagedkv.engine.self_test import self_test
from pagedkv.errors import UnsupportedModelError
from pagedkv.models.config import ModelConfig
from pagedkv.probe.layers import Rule, group_layers
from pagedkv.probe.probing import probe, require_supported, rule_of_mask
from pagedkv.probe.sizing import memory_of
from tests.choosing import long_but
from tests.engine.families import BASE, CONFIGS, make_model
from tests.engine.family_matrix.tiny import make_tiny
from tests.engine.test_families import EACH_TIME

BLOCK_SIZE = 4


@pytest.mark.parametrize("name", long_but(EACH_TIME, CONFIGS))
def test_groups_are_those_that_a_plan_has_of_the_config(name: str) -> None:
    model = make_model(name)
    config = json.loads(json.dumps({**model.config.to_dict(), "dtype": "float32"}, default=str))
    memory = memory_of(name, ModelConfig("config.json", config))
    groups = group_layers(probe(model), BLOCK_SIZE, 1024)
    nbytes: Counter[str] = Counter()
    for spec, shape in zip(groups.specs, groups.shapes, strict=True):
        assert spec.pool is not None
        num_blocks = 1 if isinstance(shape, StateShape) else spec.block_size // BLOCK_SIZE  # entries have longer ones
        nbytes[spec.pool.partition(":")[0]] += shape.block_nbytes(spec.block_size) // num_blocks
    assert nbytes == {group.name: group.block_nbytes(BLOCK_SIZE) for group in memory.groups}


def test_what_a_layer_asks_for_is_seen() -> None:
    calls = probe(make_model("gemma2")).calls
    assert [call.rule for call in calls] == [Rule("window", 12), Rule("full"), Rule("window", 12)]
    assert {call.soft_cap for call in calls} == {5.0}
    assert all(call.has_sinks for call in probe(make_model("gpt_oss")).calls)
    assert next(call.rule for call in probe(make_model("llama4_text")).calls) == Rule("chunk", 16)
    assert {call.scale for call in probe(make_model("granite")).calls} == {0.2}


def test_layers_that_share_keys_read_one_source() -> None:
    layers = probe(make_model("gemma3n_text"))
    assert [call.source for call in layers.calls] == [0, 1, 0, 1]
    assert [call.is_sharing for call in layers.calls] == [False, False, True, True]


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    probe(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    "rule", [Rule("full"), Rule("window", 1), Rule("window", 12), Rule("chunk", 16), Rule("chunk", 7)]
)
def test_a_mask_tells_its_rule(rule: Rule) -> None:
    def mask(_: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        causal = key <= query
        if rule.kind == "window":
            return causal & (key > query - rule.extent)
        return causal & (key // rule.extent == query // rule.extent) if rule.extent else causal

    assert rule_of_mask(mask, 1024) == rule


@pytest.mark.parametrize(
    "mask",
    [
        lambda _, __, query, key: key >= 0 * query,  # bidirectional
        lambda _, __, query, key: (key <= query) & (key % 2 == 0),
        lambda _, __, query, key: (key <= query) & (key != 5),
        lambda _, __, query, key: (key <= query) & (key > query // 2),
        lambda _, __, query, key: (key <= query) | torch.ones(2)[key].bool(),  # of the pass's own tokens
    ],
)
def test_other_masks_have_no_rule(mask: object) -> None:
    assert rule_of_mask(mask, 1024) is None  # type: ignore[arg-type]


def tiny(model_type: str, **own: object) -> PreTrainedModel:
    """Make a model of a kind that is refused."""
    torch.manual_seed(0)
    base = {key: value for key, value in BASE.items() if key != "head_dim"}
    config = AutoConfig.for_model(model_type, **{**base, **own})
    return cast("PreTrainedModel", cast("Any", AutoModelForCausalLM).from_config(config).eval())


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "bloom": (lambda: tiny("bloom", n_layer=2, n_head=4), "BloomForCausalLM"),
    "mpt": (lambda: tiny("mpt", d_model=32, n_heads=4, n_layers=2), "MptForCausalLM"),
    "falcon alibi": (lambda: tiny("falcon", alibi=True), "FalconForCausalLM"),
    "dynamic NTK": (
        lambda: tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "rope_type is 'dynamic'",
    ),
    "longrope": (
        lambda: tiny(
            "phi3",
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
            },
        ),
        "rope_type is 'longrope'",
    ),
    "a window of one token": (
        lambda: make_model("mistral", sliding_window=1),
        r"attention call 0 sees one token alone \(window of 1\), for which transformers' own cache keeps all tokens",
    ),
    "a chunk of one token": (
        lambda: make_model("llama4_text", attention_chunk_size=1),
        r"sees one token alone \(window of 1\).* attention_chunk_size",
    ),
    "bart": (
        lambda: make_tiny("bart"),
        "BartForCausalLM answers otherwise over blocks.* It takes no notice of position_ids",
    ),
    "recurrent_gemma": (
        lambda: make_tiny("recurrent_gemma"),
        "Its layers keep what they need of earlier tokens in themselves .*, not in the cache",
    ),
    "moshi": (
        lambda: make_tiny("moshi"),
        "MoshiForCausalLM answers otherwise over blocks.* Its own cache keeps 12 tokens, where its masks show all",
    ),
    "a mask of its tokens": (lambda: make_tiny("gemma4_unified"), "attention call 0 needs a mask of its own"),
    "training": (lambda: cast("Any", make_model("llama")).train(), "training mode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_answer_wrongly_is_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        LLM(make(), EngineConfig(num_blocks=20))


def test_layers_with_a_state_and_a_window_of_keys_are_served() -> None:
    """Zaya's layers keep both."""
    llm = LLM(make_tiny("zaya"), EngineConfig(num_blocks=20))
    assert [spec.pool for spec in llm.groups.specs] == ["full", "window_12", "state"]


def test_a_wrapper_that_hands_its_arguments_on_is_no_reason() -> None:
    """GOT-OCR 2 gives logits_to_keep to attention, which does nothing with it."""
    llm = LLM(make_tiny("got_ocr2"), EngineConfig(num_blocks=20))
    assert llm.self_test is not None
    assert llm.self_test.difference < 1e-4


def test_an_encoder_is_refused() -> None:
    model = make_model("llama")
    model.config.is_encoder_decoder = True
    with pytest.raises(UnsupportedModelError, match="cross-attention"):
        require_supported(model)


def test_the_self_test_finds_what_the_probe_misread() -> None:
    """Negative control: a layer that lost its window answers otherwise, and is refused."""
    model = make_model("gemma2")
    groups = group_layers(probe(model), BLOCK_SIZE, 1024)
    assert self_test(model, groups).difference < 1e-4
    for change in ({"window": 0}, {"soft_cap": 0.0}, {"scale": 0.3}):
        broken = replace(groups, attention=tuple(replace(layer, **change) for layer in groups.attention))
        with pytest.raises(UnsupportedModelError, match="answers otherwise over blocks"):
            self_test(model, broken)


def test_whether_decoding_answers_otherwise_than_a_prompt_is_found_out() -> None:
    """Zamba2 and Nemotron-H bound the time steps of prompts alone; then what was decoded is replayed step by step."""
    found = {}
    for name in ("llama", "bamba", "zamba2", "nemotron_h"):
        model = make_model(name)
        found[name] = self_test(model, group_layers(probe(model), BLOCK_SIZE, 8)).replays_steps
    assert found == {"llama": False, "bamba": False, "zamba2": True, "nemotron_h": True}
