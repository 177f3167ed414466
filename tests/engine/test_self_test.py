"""The judge at load: right models pass in 32 and 16 bits, wrong ones are refused in both, by generate's answers too."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from pagedkv.engine import LLM, SamplingParams, self_test as self_testing
from pagedkv.engine.runner import ModelRunner
from pagedkv.engine.self_test import ask_dense, self_test
from pagedkv.errors import UnsupportedModelError
from pagedkv.probe.layers import EngineGroups, group_layers
from pagedkv.probe.probing import probe
from tests.choosing import long_but
from tests.engine.families import make_model, shake
from tests.engine.serving import CONFIG

BLOCK_SIZE = 4
CONFIG_TESTED = replace(CONFIG, self_test=True)


def groups_of(model: PreTrainedModel) -> EngineGroups:
    return group_layers(probe(model), BLOCK_SIZE, 16)


def with_layers(groups: EngineGroups, change: Callable[[Any], Any]) -> EngineGroups:
    return replace(groups, attention=tuple(map(change, groups.attention)))


def narrower(layer: Any) -> Any:  # noqa: ANN401 - of attention
    """Lose a position of a window, half of a chunk, or nearly everything of full attention."""
    if layer.window:
        return replace(layer, window=layer.window - 1)
    return replace(layer, chunk=layer.chunk // 2) if layer.chunk else replace(layer, window=6)


def unmasked(layer: Any) -> Any:  # noqa: ANN401 - as above
    return replace(layer, window=0, chunk=0) if layer.window or layer.chunk else replace(layer, chunk=4)


WRONG: dict[str, Callable[[Any], Any]] = {
    "window": narrower,
    "scale": lambda layer: replace(layer, scale=layer.scale * 0.7),
    "mask": unmasked,
}
IN_16_BITS = ("gpt_oss", "mistral", "gemma2", "mixtral", "llama4_text", "qwen3_next", "olmoe", "qwen2_moe")


@pytest.mark.parametrize("name", long_but({"gpt_oss"}, IN_16_BITS))
def test_in_16_bits_the_right_model_is_served_and_every_wrong_one_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that rounding chooses otherwise change a few positions by any amount; a fault changes most of a part."""
    model = make_model(name).bfloat16()
    groups = groups_of(model)
    assert self_test(model, groups).refusal is None
    for change in WRONG.values():
        with pytest.raises(UnsupportedModelError, match="answers otherwise over blocks"):
            self_test(model, with_layers(groups, change))
    call = ModelRunner._call_model

    def misplaced(runner: ModelRunner, ids: torch.Tensor, where: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return call(runner, ids, where + 2 * (where > 5), wanted)

    monkeypatch.setattr(ModelRunner, "_call_model", misplaced)
    with pytest.raises(UnsupportedModelError, match="answers otherwise over blocks"):
        self_test(model, groups)


def test_a_models_own_rounding_bounds_what_is_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tolerance below the rounding of bfloat16 stands for a deep model, whose rounding exceeds the one given.

    On a CPU the dense model rounds alike in every way, so that its own rounding is planted.
    """
    model = make_model("llama").bfloat16()
    groups = groups_of(model)
    monkeypatch.setitem(self_testing.TOLERANCES, torch.bfloat16, 1e-9)
    found = self_test(model, groups, refuses=False)
    assert found.difference > 0
    monkeypatch.setitem(self_testing.TOLERANCES, torch.bfloat16, found.difference / 1.5)
    for own, is_right in ((0.0, False), (found.difference / 2.1, False), (found.difference / 1.9, True)):
        for one, other in ((own, 0.0), (0.0, own)):
            monkeypatch.setattr(self_testing, "_of_explicit_attention", lambda *_, own=one: own)
            monkeypatch.setattr(self_testing, "_of_single_steps", lambda *_, own=other: own)
            assert (self_test(model, groups, refuses=False).refusal is None) == is_right
    monkeypatch.setitem(self_testing.TOLERANCES, torch.bfloat16, found.difference / 5)  # more than rounding can be
    assert self_test(model, groups, refuses=False).refusal is not None


def made(model_type: str, sizes: dict[str, Any], text: dict[str, Any], vision: dict[str, Any]) -> PreTrainedModel:
    """Make a tiny model of images and text, or skip the test where this transformers has none of its type."""
    try:
        config = AutoConfig.for_model(model_type)
    except ValueError as problem:
        pytest.skip(str(problem))
    for part, settings in ((config, sizes), (config.text_config, text), (config.vision_config, vision)):
        for name, value in settings.items():
            setattr(part, name, value)
    torch.manual_seed(0)
    model = cast("Any", AutoModelForImageTextToText).from_config(config, dtype=torch.float32).eval()
    shake(model, torch.Generator().manual_seed(1))
    return cast("PreTrainedModel", model)


def kosmos() -> PreTrainedModel:
    """Its positions begin at 2, and its ``generate`` drops position_ids."""
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return made(
        "kosmos-2.5",
        {},
        {"vocab_size": 199, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4, "eos_token_id": None},
        {**vision, "num_attention_heads": 4, "head_dim": 8},
    )


def ovis() -> PreTrainedModel:
    """Its head states 250 outputs, and has the 199 rows of the table that it is tied to."""
    return made(
        "ovis2",
        {"hidden_size": 32, "vocab_size": 250, "visual_indicator_token_ids": [191, 192, 193, 194, 195]},
        {
            "vocab_size": 199,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["full_attention"] * 2,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "vocab_size": 32,
            "image_size": 28,
            "patch_size": 14,
        },
    )


def test_a_model_that_places_tokens_otherwise_by_generate_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"by its own generate.* counts positions otherwise than from 0"):
        LLM(kosmos(), CONFIG_TESTED)


def test_differences_can_be_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(kosmos(), replace(CONFIG_TESTED, accept_differences=True))
    assert "by its own generate" in caplog.text
    assert llm.self_test is not None
    assert llm.self_test.own_difference > llm.self_test.tolerance > llm.self_test.difference
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))[0].completions[0].token_ids) == 3


def test_a_head_that_states_a_stale_size_is_served() -> None:
    model, prompt = ovis(), list(range(20, 40))
    llm = LLM(model, CONFIG_TESTED)
    assert llm.core.vocabulary_size == 199
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=8))
    dense = cast("Any", model).generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 20:].tolist()
    assert list(output.completions[0].token_ids) == dense


def test_what_answers_are_verified_against_has_soft_caps_whatever_the_model_selects() -> None:
    """SDPA of transformers 5.16 and 5.17 ignores soft caps without an error."""
    model, prompt = make_model("gemma2"), list(range(20, 50))
    llm = LLM(model, CONFIG_TESTED)
    capped = ask_dense(model, llm.groups, prompt, 12)
    model.config._attn_implementation_internal = "sdpa"
    assert ask_dense(model, llm.groups, prompt, 12) == capped


def test_a_model_whose_generate_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")

    def fails(**_: object) -> None:
        raise ValueError("images are missing")

    monkeypatch.setattr(model, "prepare_inputs_for_generation", fails)
    with pytest.raises(UnsupportedModelError, match="its own generate fails for token ids alone"):
        self_test(model, groups_of(model))
