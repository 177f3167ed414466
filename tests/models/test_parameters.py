"""Counts of weights: to the last one, against what the published checkpoints hold; otherwise none at all."""

import json
from pathlib import Path

import pytest

from pagedkv.models import read_model
from tests.models.configs import LLAMA, PUBLISHED

# Of the safetensors headers (OPT: of the model) in each repository on the Hugging Face hub.
PUBLISHED_PARAMETERS = {
    "opt-13b": 12_853_473_280,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gemma-2-27b": 27_227_128_320,
}


def read(tmp_path: Path, config: dict[str, object]) -> tuple[int | None, int | None, int | None]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    model = read_model(str(path))
    return model.num_parameters, model.num_active_parameters, model.weights_nbytes


@pytest.mark.parametrize(("name", "num_parameters"), PUBLISHED_PARAMETERS.items())
def test_counts_meet_the_published_ones(name: str, num_parameters: int) -> None:
    model = read_model(name)
    assert model.num_parameters == num_parameters
    assert model.weights_nbytes == 2 * num_parameters


def test_a_token_uses_two_of_mixtrals_eight_experts() -> None:
    model = read_model("mixtral-8x7b")
    assert model.num_parameters is not None
    assert model.num_active_parameters == model.num_parameters - 32 * 6 * 3 * 4096 * 14_336
    assert model.expert_share == 0.25


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    num_parameters = PUBLISHED_PARAMETERS["llama-3.1-8b"]
    assert read(tmp_path, LLAMA)[0] == num_parameters
    assert read(tmp_path, LLAMA | {"tie_word_embeddings": True})[0] == num_parameters - 128_256 * 4096


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"vocab_size": None},
        LLAMA | {"intermediate_size": None},
        LLAMA | {"attention_bias": True},
        PUBLISHED["mixtral"].config,
        PUBLISHED["qwen3_next"].config,
    ],
    ids=["no vocabulary", "no MLP", "biases", "no experts", "a hybrid"],
)
def test_what_cannot_be_counted_exactly_is_not_counted(config: dict[str, object], tmp_path: Path) -> None:
    assert read(tmp_path, config) == (None, None, None)


@pytest.mark.parametrize(("quantization", "nbytes"), [({}, 2), (None, 2), ({"quant_method": "fp8"}, 1)])
def test_quantised_weights_are_sized_where_that_is_known(quantization: object, nbytes: int, tmp_path: Path) -> None:
    num_parameters, _, weights_nbytes = read(tmp_path, LLAMA | {"quantization_config": quantization})
    assert num_parameters is not None
    assert weights_nbytes == nbytes * num_parameters


@pytest.mark.parametrize("quantization", [{"quant_method": "awq", "bits": 4}, {"quant_method": ["fp8"]}, "fp8"])
def test_other_quantisations_are_of_unknown_size(quantization: object, tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | {"quantization_config": quantization})[2] is None
