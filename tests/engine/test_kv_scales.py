"""Scales of keys and values of eight bits: what is measured, what is refused, and what they are for."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, KVScales, SamplingParams, measure_kv_scales
from pagedkv.errors import ConfigurationError
from pagedkv.tiers import FolderTier
from tests.engine.families import make_model, moved
from tests.engine.serving import CONFIG

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="eight bits need the kernels of a GPU")
PROMPTS = [torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(3)]


def llama(**sizes: int) -> PreTrainedModel:
    """A Llama with keys of different magnitudes by head: those of the second head are 4,096 times as great.

    Queries of these keys are as much smaller, so that a dense pass is of the same kind as before.
    """
    model = make_model("llama", **sizes)
    with torch.no_grad():
        for layer in cast("Any", model).model.layers:
            attention = layer.self_attn
            dim, num_groups = attention.head_dim, attention.num_key_value_groups
            attention.k_proj.weight[dim : 2 * dim] *= 4096
            attention.q_proj.weight[num_groups * dim : 2 * num_groups * dim] /= 4096
            attention.v_proj.weight[:dim] *= 2**-12
    return moved(model, DEVICE)


def test_each_head_of_each_layer_has_the_scale_of_its_greatest_magnitude() -> None:
    model = llama()
    scales = measure_kv_scales(model, PROMPTS)
    assert sorted(scales.keys) == list(range(model.config.num_hidden_layers))
    greatest: dict[tuple[int, int], torch.Tensor] = {}
    for prompt in PROMPTS:
        with torch.inference_mode():
            cache = model(torch.tensor([prompt], device=DEVICE), use_cache=True).past_key_values
        for layer_idx, layer in enumerate(cache.layers):
            for side, kept in enumerate((layer.keys, layer.values)):
                found = kept[0].abs().amax(dim=(1, 2))
                greatest[layer_idx, side] = torch.maximum(greatest.get((layer_idx, side), found), found)
    for (layer_idx, side), expected in greatest.items():
        found = torch.tensor((scales.keys, scales.values)[side][layer_idx])
        torch.testing.assert_close(found * 448, expected.cpu(), rtol=1e-5, atol=0)
    assert all(each[1] > 100 * each[0] for each in scales.keys.values())


def test_a_margin_makes_scales_greater() -> None:
    model = llama()
    one, two = (measure_kv_scales(model, PROMPTS[:1], margin=margin) for margin in (1.0, 2.0))
    for layer_idx, scales in one.keys.items():
        assert two.keys[layer_idx] == pytest.approx([2 * scale for scale in scales])


def test_layers_that_keep_no_keys_of_their_own_have_no_scales() -> None:
    scales = measure_kv_scales(moved(make_model("gemma3n_text"), DEVICE), PROMPTS)
    assert 0 < len(scales.keys) < make_model("gemma3n_text").config.num_hidden_layers


@given(st.dictionaries(st.integers(0, 99), st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=2), max_size=4))
def test_scales_survive_a_file(drawn: dict[int, list[float]]) -> None:
    keys = {layer_idx: tuple(each) for layer_idx, each in drawn.items()}
    scales = KVScales(keys, {layer_idx: each[::-1] for layer_idx, each in keys.items()})
    assert KVScales.from_json(scales.to_json()) == scales


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": {"0": [1.0]}}', '{"keys": {"a": [1]}, "values": {}}'])
def test_what_is_no_file_of_scales_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no JSON of KVScales"):
        KVScales.from_json(text)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_above_0_and_finite(scale: float) -> None:
    with pytest.raises(ConfigurationError, match="scales of layer 3 must be above 0 and finite"):
        KVScales({3: (1.0, scale)}, {3: (1.0, 1.0)})


def test_scales_of_other_layers_for_values_than_for_keys_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="keys have scales of"):
        KVScales({3: (1.0, 1.0)}, {3: (1.0,)})


def test_scales_are_refused_for_keys_of_the_models_own_type() -> None:
    with pytest.raises(ConfigurationError, match="kv_scales are for keys of eight bits"):
        EngineConfig(kv_scales=KVScales({}, {}))


def test_there_must_be_a_prompt_and_a_margin_of_1_or_more() -> None:
    model = llama()
    with pytest.raises(ConfigurationError, match="there is none"):
        measure_kv_scales(model, [])
    with pytest.raises(ConfigurationError, match="margin must be 1 or more"):
        measure_kv_scales(model, PROMPTS, margin=0.5)


@on_gpu
def test_scales_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="layer 0 keeps keys of 2 heads, and kv_scales has 0 for it"):
        LLM(llama(), replace(CONFIG, kv_dtype="fp8", kv_scales=KVScales({}, {})))


@on_gpu
def test_keys_that_eight_bits_cannot_represent_are_kept_by_their_scales() -> None:
    """Keys above 448, and values below 2**-9, are lost without scales."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = llama(**sizes, head_dim=64, vocab_size=2000)
    prompts = torch.randint(3, 2000, (10, 301), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    with torch.inference_mode():
        exact = torch.cat([model(prompt[None]).logits[0, :-1].float().log_softmax(1) for prompt in prompts])
    exact = exact.gather(1, prompts[:, 1:].reshape(-1, 1))[:, 0]
    model = cast("Any", model).bfloat16()
    texts = [each.tolist() for each in prompts]
    scales = measure_kv_scales(model, texts[:3], margin=1.1)
    limits = EngineConfig(kv_nbytes=2**28, max_sequences=16, max_batched_tokens=768, max_tokens=512)
    config = replace(limits, compile_model=False, overlap=False)
    off = {}
    for name, asked in (
        ("bf16", config),
        ("ones", replace(config, kv_dtype="fp8")),
        ("measured", replace(config, kv_dtype="fp8", kv_scales=scales)),
    ):
        answers = LLM(model, asked).generate(texts, SamplingParams(max_tokens=4, prompt_logprobs=0))
        found = [each.logprob for answer in answers for each in answer.prompt_logprobs or () if each is not None]
        off[name] = (torch.tensor(found, device=DEVICE) - exact).abs().mean().item()
    assert off["bf16"] < off["measured"] < 0.25 * off["ones"]


@on_gpu
def test_content_of_other_scales_is_not_loaded_from_a_tier(tmp_path: Path) -> None:
    model = llama()
    scales = measure_kv_scales(model, PROMPTS)
    config = replace(
        CONFIG, kv_dtype="fp8", kv_scales=scales, tiers=(FolderTier(str(tmp_path), "1GiB", loads="always"),)
    )
    prompt = [token % 80 for token in range(60)]
    loaded = []
    for each in (scales, measure_kv_scales(model, PROMPTS, margin=2.0), scales):
        llm = LLM(model, replace(config, kv_scales=each))
        loaded.append(sum(dict(llm.generate([prompt], SamplingParams(max_tokens=4))[0].num_loaded_tokens).values()))
        assert llm.close()
    assert loaded[:2] == [0, 0]
    assert loaded[2] > 0
