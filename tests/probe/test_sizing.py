"""Models of 2025 and 2026, sized by their own classes: against bytes worked out by hand, and against real passes."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pagedkv.errors import ConfigurationError, UnsupportedModelError
from pagedkv.models.config import ModelConfig
from pagedkv.models.families import FAMILIES
from pagedkv.models.reader import memory_by_table
from pagedkv.planner.models import read_model
from pagedkv.probe import compat, probing
from pagedkv.probe.layers import group_layers
from pagedkv.probe.probing import probe
from pagedkv.probe.sizing import memory_of
from tests.choosing import long_but
from tests.engine.families import CONFIGS
from tests.engine.family_matrix.tiny import make_tiny
from tests.models.configs import PUBLISHED
from tests.models.published import KEPT, UNKNOWN, Config

EACH_TIME = (
    *("DeepSeek-V3.2", "Falcon-H1-7B", "GLM-5", "Kimi-K2.5", "LFM2-1.2B", "Llama-4-Scout", "MiMo-V2-Flash"),
    *("MiniMax-M2", "Phi-4-mini", "Qwen3-VL-8B", "gemma-4-31b", "gpt-oss-20b"),
)


def sized(config: Config, kv_dtype: str | None = None) -> dict[str, int]:
    memory = memory_of("model", ModelConfig("config.json", config), kv_dtype)
    return {group.name: group.token_nbytes for group in memory.groups}


@pytest.mark.parametrize("name", long_but(EACH_TIME, KEPT))
def test_a_published_config_is_sized_as_worked_out_by_hand(name: str) -> None:
    config, token_nbytes, state_nbytes = KEPT[name]
    memory = memory_of(name, ModelConfig(name, config))
    assert {group.name: group.token_nbytes for group in memory.groups} == token_nbytes
    assert memory.state_nbytes == state_nbytes
    assert memory.num_parameters is not None


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_sized_is_refused_with_the_reason(name: str) -> None:
    config, reason = UNKNOWN[name]
    with pytest.raises(ConfigurationError, match=reason) as caught:
        memory_of(name, ModelConfig(name, config))
    assert str(caught.value).startswith(f"{name}: ")


def test_the_bar_of_52_in_55_is_met() -> None:
    assert len(KEPT) >= 52
    assert len(KEPT) / len({**KEPT, **UNKNOWN}) >= 52 / 55


# What following a hint of a like spelling led to, before types were asked for what they are.


@pytest.mark.long
def test_glm_5_is_not_sized_as_glm_4_moe() -> None:
    config = KEPT["GLM-5"][0]
    assert sized(config | {"model_type": "glm4_moe", "head_dim": 96}) == {"full": 1_916_928}
    assert sized(config) == {"full": 109_824}
    with pytest.raises(ConfigurationError, match="'glm_moe_dsa', a kind of model not known here without") as caught:
        memory_by_table("model", ModelConfig("config.json", config), None)
    assert "glm4_moe" not in str(caught.value)


def test_falcon_h1_is_not_sized_without_its_state() -> None:
    memory = memory_of("model", ModelConfig("config.json", KEPT["Falcon-H1-7B"][0]))
    assert [group.name for group in memory.groups] == ["full", "state"]
    assert memory.state_nbytes == KEPT["Falcon-H1-7B"][2]


def test_mimo_v2_flash_is_not_sized_with_every_layer_windowed() -> None:
    assert sized(KEPT["MiMo-V2-Flash"][0]).keys() == {"full", "window_129"}
    with pytest.raises(ConfigurationError, match="swa_num_key_value_heads is set"):
        memory_by_table("model", ModelConfig("config.json", KEPT["MiMo-V2-Flash"][0] | {"model_type": "mistral"}), None)


@pytest.mark.long
def test_a_chosen_type_counts_for_keys_and_not_for_states() -> None:
    config = KEPT["Kimi-Linear"][0]
    assert sized(config, "fp8") == {"full": 7 * 576, "state": 0}
    assert memory_of("model", ModelConfig("config.json", config), "fp8").state_nbytes == KEPT["Kimi-Linear"][2]
    assert sized(KEPT["GLM-5"][0], "fp8") == {"full": 109_824 // 2}


def test_the_weights_are_those_of_the_module_and_tied_ones_count_once() -> None:
    memory = memory_of("model", ModelConfig("config.json", KEPT["Qwen3-0.6B"][0]))
    assert memory.num_parameters == 596_049_920
    assert memory.weights_nbytes == 2 * 596_049_920
    experts = memory_of("model", ModelConfig("config.json", KEPT["gpt-oss-20b"][0]))
    assert experts.expert_share == 4 / 32
    assert experts.weights_nbytes is not None
    assert 12.7 < experts.weights_nbytes / 2**30 < 12.9  # as the model card says


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KEPT["Qwen3-8B"][0] | {"num_attention_heads": "many"}, "transformers .* makes no model of it: "),
        (KEPT["Qwen3-8B"][0] | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be"),
        (KEPT["Qwen3-8B"][0] | {"torch_dtype": None}, "dtype is missing"),
        ({"model_type": "t5", "torch_dtype": "bfloat16"}, "makes no model of it|encodes before it decodes"),
        (PUBLISHED["llama"].config | {"model_type": "bloom", "n_head": 32}, "layer 0 computes attention by itself"),
    ],
)
def test_a_config_that_no_class_takes_is_a_sentence(config: Config, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sized(config)


@pytest.mark.parametrize("name", long_but(("llama", "opt", "qwen3_next", "gpt_oss", "llama4"), PUBLISHED))
def test_the_table_for_those_without_torch_says_what_the_class_says(name: str) -> None:
    """Two readers of one truth drift apart, but for a test that holds them together."""
    config = ModelConfig("config.json", PUBLISHED[name].config)
    by_table, by_class = memory_by_table("model", config, None), memory_of("model", config)
    assert by_table.groups == by_class.groups
    if by_table.num_parameters is not None:
        assert by_table.expert_share == by_class.expert_share
        assert (by_table.num_parameters, by_table.num_active_parameters, by_table.weights_nbytes) == (
            by_class.num_parameters,
            by_class.num_active_parameters,
            by_class.weights_nbytes,
        )


def test_the_table_has_twenty_types() -> None:
    assert len(FAMILIES) == 20


def test_a_plan_asks_the_class_of_a_file_and_no_class_for_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KEPT["LFM2-1.2B"][0]))
    assert read_model(str(path)).state_nbytes == KEPT["LFM2-1.2B"][2]
    assert read_model("glm-5").token_nbytes == 109_824


def without_weights(model: compat.Model) -> compat.Model:
    given = json.loads(json.dumps(model.config.to_dict(), default=str))
    return compat.make_without_weights(model.config.from_dict(given), str(model.dtype).removeprefix("torch."))


MOST = ("bamba", "deepseek_v3", "falcon_h1", "gemma3n_text", "llama4_text", "mixtral", "zamba2")


@pytest.mark.parametrize("name", long_but(MOST, CONFIGS))
def test_without_weights_a_model_is_seen_as_with_them(name: str) -> None:
    model = make_tiny(name)
    assert probe(without_weights(model)) == probe(model)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "glm_moe_dsa", "longcat_flash", "mimo_v2_flash"])
def test_sparse_and_compressed_attention_is_seen_alike(name: str) -> None:
    model = make_tiny(name)
    without, with_weights = probe(without_weights(model)), probe(model)
    assert without == with_weights


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "DeepSeek-V4-Flash", "GLM-5"])
def test_an_engine_s_blocks_have_the_bytes_of_a_plan_with_what_is_kept_beside_keys(name: str) -> None:
    """Of published configs; tests/engine/test_probe.py compares those of all tiny families."""
    config, token_nbytes, _ = KEPT[name]
    model = compat.make_without_weights(compat.decoder_config(config), "bfloat16")
    groups = group_layers(probe(model), 16, 1024)
    assert groups.indexers or groups.compressed
    pairs = zip(groups.specs, groups.shapes, strict=True)
    assert {spec.pool: shape.block_nbytes(spec.block_size) / spec.block_size for spec, shape in pairs} == token_nbytes


def test_a_layer_that_selects_without_telling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attend: Any = probing._Recorder.attend

    def untold(recorder: Any, *given: Any) -> torch.Tensor:  # noqa: ANN401 - as models call it
        options = {name: value for name, value in given[-1].items() if name != "indices"}
        answer: torch.Tensor = attend(recorder, *given[:-1], options)
        return answer

    monkeypatch.setattr(probing._Recorder, "attend", untold)
    with pytest.raises(
        UnsupportedModelError, match="attention call 0 is not told which keys its layer's indexer selects"
    ):
        probe(make_tiny("deepseek_v32"))


@pytest.mark.long
def test_a_lost_window_is_noticed() -> None:
    """Negative control: a config without its pattern is sized otherwise."""
    config = KEPT["command-a"][0]
    assert sized(config) == KEPT["command-a"][1]
    assert sized(config | {"sliding_window_pattern": 2}) != KEPT["command-a"][1]


def test_a_mask_is_asked_without_the_contents_of_its_tensors() -> None:
    padding = torch.zeros(1, dtype=torch.long, device="meta")
    with compat.Zeros():
        assert int(cast("Any", padding)[torch.tensor(0)]) == 0
    with compat.Zeros(), pytest.raises(IndexError):
        padding[torch.tensor(5)]


def test_the_reason_names_no_other_type() -> None:
    for config, _ in UNKNOWN.values():
        with pytest.raises(ConfigurationError) as caught:
            sized(config)
        assert not re.search(r"such as|instead", str(caught.value))
