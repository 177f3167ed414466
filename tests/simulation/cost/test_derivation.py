"""Derived costs: by hand for one model, against published measurements, and for sane magnitudes."""

from dataclasses import replace
from math import isclose

import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.models import read_model
from pagedkv.simulation.cost import (
    Assumptions,
    cost_model_names,
    derive_cost_model,
    find_gpu,
    gpu_names,
    kv_budget_nbytes,
    read_cost_model,
)

LLAMA = read_model("llama-3.1-8b")
H100 = find_gpu("h100")

# gpt-fast's README (pytorch-labs/gpt-fast): tokens a second of one sequence, BF16, A100-80GB, hybrid cube mesh,
# a prompt of 5 tokens and 200 generated ones: 105 tokens of context in the mean.
GPT_FAST_TOKENS_PER_S = {
    ("llama-2-7b", 1): 104.9,
    ("llama-2-7b", 2): 168.84,
    ("llama-2-7b", 4): 254.02,
    ("llama-2-7b", 8): 328.43,
    ("llama-2-70b", 2): 21.32,
    ("llama-2-70b", 4): 38.01,
    ("llama-2-70b", 8): 62.50,
}


@pytest.mark.parametrize(("model", "num_gpus"), GPT_FAST_TOKENS_PER_S)
def test_decoding_is_within_a_tenth_of_published_measurements(model: str, num_gpus: int) -> None:
    cost = derive_cost_model(read_model(model), find_gpu("a100-80"), num_gpus)
    assert 1 / cost.step_s(1, 105, 105, 1) == pytest.approx(GPT_FAST_TOKENS_PER_S[model, num_gpus], rel=0.1)


@pytest.mark.parametrize(("model", "num_gpus", "num_slots"), [("opt-13b", 1, 15_700), ("opt-66b", 4, 9_700)])
def test_as_many_tokens_fit_as_the_paged_attention_paper_says(model: str, num_gpus: int, num_slots: int) -> None:
    """Kwon et al., SOSP 2023, table 1: "Max. # KV Cache slots"."""
    memory = read_model(model)
    budget_nbytes = kv_budget_nbytes(memory, find_gpu("a100-40"), num_gpus)
    assert budget_nbytes / memory.token_nbytes == pytest.approx(num_slots, rel=0.02)


def test_every_field_by_hand() -> None:
    cost = derive_cost_model(LLAMA, H100, 2, Assumptions(0.5, 0.8, 0.5, 1e-3, 1e-5, 1e-6, 2e-5))
    flops, read, link = 2 * 0.5 * 989e12, 2 * 0.8 * 3.35e12, 2 * 0.5 * 64e9
    assert cost.as_dict() == pytest.approx(
        {
            "fixed_s": 1e-3 + 64 * 1e-5,
            "token_compute_s": 2 * 8_030_261_248 / flops,
            "pair_compute_s": 32 * 32 * 4 * 128 / flops,
            "weights_s": 2 * 8_030_261_248 / read,
            "experts_s": 0,
            "expert_share": 1,
            "context_token_s": 131_072 / read,
            "window": 0,
            "window_pair_compute_s": 0,
            "window_token_s": 0,
            "sequence_state_s": 0,
            "sequence_s": 1e-6,
            "several_s": 0,
            "chunk_s": 0,
            "swap_fixed_s": 2e-5,
            "swap_token_s": 131_072 / link,
        }
    )


def test_windowed_layers_are_charged_apart() -> None:
    cost = derive_cost_model(read_model("gemma-3-27b"), H100)
    assert cost.window == 1024
    assert isclose(cost.window_token_s / cost.context_token_s, 5.2)
    assert isclose(cost.window_pair_compute_s / cost.pair_compute_s, 5.2)


def test_a_state_is_read_and_written_and_moved_whole() -> None:
    jamba = read_model("jamba-v0.1")
    cost = derive_cost_model(jamba, H100)
    assert isclose(cost.sequence_state_s, 2 * 16_515_072 / (0.8 * 3.35e12))
    assert cost.swap_s(1) > 16_515_072 / 64e9


def test_a_token_reads_the_active_weights_and_many_tokens_all() -> None:
    mixtral = read_model("mixtral-8x7b")
    cost = derive_cost_model(mixtral, H100, 2)
    assert mixtral.num_parameters is not None
    assert mixtral.num_active_parameters is not None
    parameter_s = 2 / (2 * 0.8 * 3.35e12)
    assert isclose(cost.step_s(1, 0, 0, 0) - cost.fixed_s, mixtral.num_active_parameters * parameter_s)
    assert isclose(cost.weights_s + cost.experts_s, mixtral.num_parameters * parameter_s)


def test_quantised_keys_are_read_in_half_the_time() -> None:
    halved = derive_cost_model(read_model("llama-3.1-8b", "fp8"), H100)
    assert isclose(halved.context_token_s * 2, derive_cost_model(LLAMA, H100).context_token_s)
    assert halved.weights_s == derive_cost_model(LLAMA, H100).weights_s


def test_magnitudes_are_sane() -> None:
    big = read_cost_model("llama-3.1-70b/8xh100")
    assert 5e-3 < big.step_s(1, 2048, 2048, 1) < big.step_s(64, 64 * 2048, 64 * 2048, 64) < 30e-3
    small = read_cost_model("llama-3.1-8b/h100")
    assert 0.1 < small.step_s(8192, 8192 * 8193 // 2, 8192, 1) < 0.6


@pytest.mark.parametrize("name", [name for name in cost_model_names() if "/" in name])
def test_every_pair_is_sane_and_has_room(name: str) -> None:
    cost = read_cost_model(name)
    assert 1e-3 < cost.step_s(1, 1024, 1024, 1) < 0.1
    assert 0.01 < cost.step_s(8192, 8192 * 8193 // 2, 8192, 1) < 3
    assert 1e-5 < cost.swap_s(1024) < 0.1


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_is_balanced_as_gpus_are(name: str) -> None:
    gpu = find_gpu(name)
    assert 100 < gpu.flops / gpu.memory_nbytes_per_s < 500
    assert 4 < gpu.memory_nbytes_per_s / gpu.link_nbytes_per_s < 150
    assert 20e9 < gpu.memory_nbytes < 200e9
    assert find_gpu(name.upper()) == gpu


def test_an_unknown_gpu_is_refused_with_those_known() -> None:
    with pytest.raises(
        ConfigurationError, match=r"unknown GPU 'a100': nearest is .*; known are a100-40, a100-80, h100"
    ):
        find_gpu("a100")


def test_weights_that_do_not_fit_are_refused_with_the_gpus_needed() -> None:
    model = read_model("llama-3.1-70b")
    with pytest.raises(
        ConfigurationError, match=r"llama-3.1-70b take 141,107,412,992 bytes, 1 x h100 at 90%.*at least 2"
    ):
        kv_budget_nbytes(model, H100)
    assert kv_budget_nbytes(model, H100, 2) > 0


@pytest.mark.parametrize("num_gpus", [0, -1, 10**9, 1.5])
def test_a_number_of_gpus_that_cannot_be_is_refused(num_gpus: int) -> None:
    with pytest.raises(ConfigurationError, match="the number of GPUs must be"):
        derive_cost_model(LLAMA, H100, num_gpus)
    with pytest.raises(ConfigurationError, match="the number of GPUs must be"):
        kv_budget_nbytes(LLAMA, H100, num_gpus)


@pytest.mark.parametrize("utilization", [0.0, -0.5, 1.01, float("nan")])
def test_a_utilization_that_cannot_be_is_refused(utilization: float) -> None:
    with pytest.raises(ConfigurationError, match="memory utilization must be over 0"):
        kv_budget_nbytes(LLAMA, H100, utilization=utilization)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
@pytest.mark.parametrize("name", ["compute", "memory", "link"])
def test_a_share_that_cannot_be_is_refused(name: str, share: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is a share of a peak"):
        Assumptions(**{name: share})


def test_unknown_weights_are_refused_with_a_way_out() -> None:
    unknown = replace(LLAMA, num_parameters=None, num_active_parameters=None, weights_nbytes=None)
    with pytest.raises(ConfigurationError, match=r"cannot be counted from its config\. Set num_parameters"):
        derive_cost_model(unknown, H100)
    quantised = replace(LLAMA, weights_nbytes=None)
    with pytest.raises(ConfigurationError, match=r"quantised weights are not known\. Set weights_nbytes"):
        kv_budget_nbytes(quantised, H100)
    assert derive_cost_model(replace(quantised, weights_nbytes=10**9), H100).weights_s > 0
