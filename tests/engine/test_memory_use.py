"""An engine reports what it takes of a device's memory, and refuses what does not fit when it is built."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from pagedkv.engine import LLM, EngineConfig, SamplingParams
from pagedkv.engine.memory_use import free_nbytes
from pagedkv.errors import ConfigurationError
from tests.engine.families import make_model, moved
from tests.engine.serving import CONFIG

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")


def test_weights_blocks_and_the_largest_step_are_told() -> None:
    model = moved(make_model("llama", tie_word_embeddings=True), DEVICE)
    core = LLM(model, replace(CONFIG, num_blocks=28)).core
    tensors = {each.data_ptr(): each.nbytes for each in (*model.parameters(), *model.buffers())}
    assert core.memory.weights_nbytes == sum(tensors.values())
    assert core.memory.kv_nbytes == core.executor.storage.device_nbytes == 28 * 4 * 3 * 2 * 2 * 8 * 4
    if DEVICE == "cuda":
        assert (core.memory.activations_nbytes or 0) > 0
        assert core.memory.graphs_nbytes > 0
        assert (core.memory.free_nbytes or 0) > 0
    else:
        assert core.memory[2:] == (None, 0, None)


def test_blocks_take_a_share_of_what_is_free_and_tell_it() -> None:
    free = free_nbytes(torch.device(DEVICE))
    config = replace(CONFIG, num_blocks=None, kv_share=0.001, self_test=False)
    core = LLM(moved(make_model("llama"), DEVICE), config).core
    assert core.config.kv_share is None
    assert 0.5 < core.config.kv_nbytes / (0.001 * free) < 2  # other programs run beside
    assert core.memory.kv_nbytes == pytest.approx(core.config.kv_nbytes, rel=0.05)
    assert "; keys and values have " in core.choices
    assert f"0% of what was free on {core.executor.storage.device}" in core.choices


def test_a_small_model_takes_no_more_blocks_than_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.engine.parts.MOST_BLOCKS", 100)
    core = LLM(moved(make_model("llama"), DEVICE), replace(CONFIG, num_blocks=None, kv_share=0.5, self_test=False)).core
    assert core.space.config.blocks_by_pool() == {"full": 100}


@on_gpu
def test_blocks_that_do_not_fit_are_refused_with_the_numbers() -> None:
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(ConfigurationError, match=r"blocks of [\d.]+ GiB do not fit: of [\d.]+ GiB on cuda.*weights"):
        LLM(moved(make_model("llama"), DEVICE), replace(CONFIG, num_blocks=None, kv_nbytes=total))


@on_gpu
def test_a_step_that_does_not_fit_is_refused_with_the_numbers() -> None:
    """The process may take no more than it has and a gigabyte; 2,048 rows of logits take more."""
    model = moved(make_model("llama", vocab_size=200_000), DEVICE)
    _, total = torch.cuda.mem_get_info()
    config = replace(CONFIG, num_blocks=28, max_batched_tokens=4096, max_sequences=2048)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**30) / total)
    try:
        with pytest.raises(ConfigurationError, match=r"a step of 4096 tokens does not fit beside weights and blocks"):
            LLM(model, config)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has the kernels")
def test_eight_bits_are_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigurationError, match="kv_dtype 'fp8' needs the kernels of a GPU"):
        LLM(make_model("llama"), replace(CONFIG, kv_dtype="fp8"))
    groups = LLM(make_model("deepseek_v32"), CONFIG).groups
    with pytest.raises(ConfigurationError, match="not for models whose indexers select keys"):
        replace(CONFIG, kv_dtype="fp8").stored(groups, torch.device("cuda"))


def test_another_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kv_dtype"):
        replace(CONFIG, kv_dtype=cast("Any", "int4"))


@on_gpu
@pytest.mark.parametrize("capture_steps", [True, False])
def test_eight_bits_hold_twice_as_many_tokens_as_bfloat16(
    capture_steps: bool,  # noqa: FBT001 - a parameter
    record_property: Callable[[str, object], None],
) -> None:
    """And cost little in log-probability: the mean difference of 10,000 tokens from a dense pass in 32 bits."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = moved(make_model("llama", **sizes, head_dim=64, vocab_size=2000), DEVICE)
    prompts = torch.randint(3, 2000, (20, 501), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    with torch.inference_mode():
        exact = torch.cat([model(prompt[None]).logits[0, :-1].float().log_softmax(1) for prompt in prompts])
    exact = exact.gather(1, prompts[:, 1:].reshape(-1, 1))[:, 0]
    model = cast("Any", model).bfloat16()
    config = EngineConfig(
        kv_nbytes=2**28, max_sequences=16, max_batched_tokens=768, max_tokens=512, capture_steps=capture_steps
    )
    off, blocks = {}, {}
    for kv_dtype in ("auto", "fp8"):
        llm = LLM(model, replace(config, kv_dtype=kv_dtype))
        answers = llm.generate([each.tolist() for each in prompts], SamplingParams(max_tokens=4, prompt_logprobs=0))
        logprobs = [each.logprob for answer in answers for each in answer.prompt_logprobs or () if each is not None]
        off[kv_dtype] = (torch.tensor(logprobs, device=DEVICE) - exact).abs().mean().item()
        blocks[kv_dtype] = sum(llm.core.space.config.blocks_by_pool().values())
    record_property("mean |log-probability - dense float32's|", off)
    assert blocks["fp8"] >= 2 * blocks["auto"] - 2
    assert off["auto"] < off["fp8"] < 0.5
