"""The engine with a model on a GPU: families answer as the model does there by itself."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.attention import TritonBackend
from pagedkv.contract.plan import StepPlan
from pagedkv.engine import LLM, EngineConfig, EngineRequest, PromptLookup, SamplingParams
from pagedkv.engine.sampling import BatchSampler, Place, SampledSequence
from pagedkv.tiers import FolderTier, HostTier, Tier
from tests.engine.families import CONFIGS, MORE, make_model, moved
from tests.engine.guesses import guess
from tests.engine.serving import CONFIG, NUM_NEW, PROMPTS, compare, poison, reference, serve
from tests.engine.test_families import NUM_BLOCKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(autouse=True)
def _in_float32() -> Iterator[None]:
    """Compute convolutions in 32 bits, as everything else."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_answers_as_it_does_dense(name: str, preemption: str) -> None:
    model = moved(make_model(name), "cuda")
    num_blocks = NUM_BLOCKS.get(name, 28)
    config = replace(CONFIG, num_blocks=num_blocks, self_test=True)
    if preemption == "swap":
        config = replace(config, preemption="swap", num_host_blocks=40, min_partial_hit=1)
    llm = LLM(model, config)
    assert isinstance(llm.core._parts.runner._backend, TritonBackend)
    poison(llm)
    requests, records = serve(llm)
    compare(requests, reference(model, PROMPTS))
    assert sum(record.num_hit_tokens for record in records) > 0
    given_up = [record.num_swapped_out if preemption == "swap" else record.num_recomputed for record in records]
    assert sum(given_up) > 0
    assert llm.core.space.num_live_blocks() == 0


@pytest.mark.parametrize("name", MORE)
def test_further_families_do_so_as_well(name: str) -> None:
    model = moved(make_model(name), "cuda")
    llm = LLM(model, replace(CONFIG, self_test=True))
    poison(llm)
    requests, _ = serve(llm)
    compare(requests, reference(model, PROMPTS))


def test_in_bfloat16_it_is_as_near_to_float32_as_the_model_itself() -> None:
    """By the log-probabilities of 20,000 tokens, in chunks of prompts, against a dense pass in 32 bits."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = moved(make_model("llama", **sizes, head_dim=64, vocab_size=2000), "cuda")
    prompts = torch.randint(3, 2000, (40, 501), generator=torch.Generator().manual_seed(4)).cuda()

    def dense() -> torch.Tensor:
        with torch.inference_mode():
            logprobs = torch.cat([model(prompt[None]).logits[0, :-1].float().log_softmax(1) for prompt in prompts])
        return logprobs.gather(1, prompts[:, 1:].reshape(-1, 1))[:, 0]

    exact = dense()
    model = cast("PreTrainedModel", cast("Any", model).bfloat16())
    own = (dense() - exact).abs()
    limits = EngineConfig(kv_nbytes=2**30, max_sequences=16, max_batched_tokens=768, max_tokens=512)
    config = replace(limits, compile_model=False, overlap=False)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    answers = LLM(model, config).generate([prompt.tolist() for prompt in prompts], params)
    logprobs = [each.logprob for answer in answers for each in answer.prompt_logprobs or () if each is not None]
    paged = (torch.tensor(logprobs, device="cuda") - exact).abs()
    assert paged.mean() <= 1.1 * own.mean()
    assert paged.quantile(0.999) <= 1.1 * own.quantile(0.999)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "llama4_text", "deepseek_v3", "falcon_h1"])
def test_a_family_answers_so_with_guesses(name: str) -> None:
    model = moved(make_model(name), "cuda")
    references = reference(model, PROMPTS)
    llm = LLM(model, replace(CONFIG, num_blocks=60, speculation=PromptLookup()))
    poison(llm)

    def greet(request: EngineRequest) -> None:
        guess(request, references[request.number].token_ids, wrong_every=3)

    requests, records = serve(llm, greet=greet)
    compare(requests, references)
    assert 0 < sum(record.num_accepted for record in records) < sum(record.num_drafted for record in records)


TIERED: Final = (
    [*range(20, 90)],
    [*range(100, 150)],
    [*range(20, 70), 3, 4, 5],
    [7, 8, 9],
)


@pytest.mark.parametrize("medium", ["host", "folder"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral", "deepseek_v3", "lfm2"])
def test_tiers_serve_a_family(name: str, medium: str, tmp_path: Path) -> None:
    """What was computed is stored, forgotten on the device, and loaded beside other requests."""
    model = moved(make_model(name), "cuda")
    tier: Tier = (
        HostTier("64MiB", loads="always") if medium == "host" else FolderTier(tmp_path, "64MiB", loads="always")
    )
    config = replace(CONFIG, num_blocks=120, max_tokens=100, max_batched_tokens=64, tiers=(tier,))
    llm = LLM(model, config)
    params = SamplingParams(max_tokens=6)
    expected = reference(model, TIERED, 6)
    compare(serve(llm, TIERED, params)[0], expected)
    for _ in range(3):
        assert llm.flush_tiers(30.0)
        llm.core.space.reset_prefix_cache()
        poison(llm)
        requests, _ = serve(llm, TIERED, params)
        compare(requests, expected)
        assert sum(sum(request.num_loaded_tokens.values()) for request in requests) >= 96
    assert llm.close()


def test_forks_and_beams() -> None:
    """Answers of one prompt, and beams of another: as a CPU gives them."""
    model = make_model("llama")
    results = []
    for place in ("cpu", "cuda"):
        llm = LLM(moved(model, place), replace(CONFIG, num_blocks=120))
        params = [
            SamplingParams(max_tokens=12, n=3, temperature=0.7, seed=5),
            SamplingParams(max_tokens=8, num_beams=3),
        ]
        answers = llm.generate([PROMPTS[0], PROMPTS[3]], params)
        results.append([each.token_ids for answer in answers for each in answer.completions])
    assert results[0] == results[1]


KINDS: Final = (
    SamplingParams(max_tokens=24, temperature=1.0, seed=1),
    SamplingParams(max_tokens=24, temperature=0.7, top_k=20, repetition_penalty=1.3, seed=2, logprobs=2),
    SamplingParams(max_tokens=24, temperature=1.2, top_p=0.8, bad_words=[[5], [2, 9]], seed=3),
    SamplingParams(max_tokens=24, temperature=0.9, min_p=0.05, logit_bias={8: 2.0, 9: -3.0}, seed=4, n=2),
    SamplingParams(max_tokens=24, presence_penalty=1.0, frequency_penalty=0.5, min_tokens=9),
    SamplingParams(max_tokens=24, temperature=1.1, top_k=40, top_p=0.9, min_p=0.01, seed=6, logprobs=0),
)


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_the_device_draws_alone_are_answered_as_by_the_sampler(*, overlap: bool) -> None:
    """Every kind of row, with a graph for each step; log-probabilities to the rounding of their sums."""
    model = moved(make_model("llama"), "cuda")
    results = []
    for draws_ahead in (False, None):
        llm = LLM(model, replace(CONFIG, num_blocks=200, max_sequences=8, overlap=overlap))
        llm.core._loop._answering._sampler = BatchSampler(llm.core.vocabulary_size, draws_ahead=draws_ahead)
        results.append(llm.generate(PROMPTS, KINDS))
    for by_host, by_device in zip(*results, strict=True):
        for expected, found in zip(by_host.completions, by_device.completions, strict=True):
            assert found.token_ids == expected.token_ids
            for one, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
                assert (one.token_id, one.rank) == (other.token_id, other.rank)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def places_of_kinds(num_rows: int, vocab_size: int, kinds: Sequence[SamplingParams] = KINDS) -> list[Place]:
    """Make rows of every kind, no two of which draw with the same noise."""
    return [
        Place(
            SampledSequence(replace(kinds[row % len(kinds)], seed=row), [1, 2, 3], vocab_size=vocab_size),
            [4] * (row // len(kinds) % 3),
        )
        for row in range(num_rows)
    ]


def test_the_host_waits_for_nothing_when_rows_are_drawn() -> None:
    """Or torch would raise: no number is read, and no copy waits for the device. What comes of it is the sampler's."""
    vocab_size = 128_256
    logits = torch.randn(24, vocab_size, device="cuda") * 4
    places = places_of_kinds(24, vocab_size)
    sampler = BatchSampler(vocab_size)
    sampler.begin(logits, places).wait()  # compiles
    before = logits.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = sampler.begin(logits, places)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = pending.wait()
    assert torch.equal(logits, before)
    expected = sampler.sample(logits, places)
    assert found.token_ids.tolist() == expected.token_ids.tolist() == pending.token_ids.tolist()
    assert not found.failures
    assert {row: each.token_id for row, each in found.logprobs.items()} == {
        row: each.token_id for row, each in expected.logprobs.items()
    }


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_tokens_drawn_by_the_device_are_those_of_the_sampler(kind: int) -> None:
    """Thousands of rows of each kind, of few likely tokens and of many. Make GPU_DRAWS more for a long run."""
    num_draws = int(os.environ.get("GPU_DRAWS", "16384"))
    vocab_size, num_rows = 2048, min(num_draws, 8192)
    sampler = BatchSampler(vocab_size)
    generator = torch.Generator("cuda").manual_seed(kind)
    num_different = 0
    for start in range(0, num_draws, num_rows):
        spread = (0.5, 2.0, 6.0)[start // num_rows % 3]
        logits = torch.randn(num_rows, vocab_size, device="cuda", generator=generator) * spread
        params = replace(KINDS[kind], logprobs=None)
        places = [
            Place(SampledSequence(replace(params, seed=start + row), [1, 2, 3], vocab_size=vocab_size))
            for row in range(num_rows)
        ]
        expected, found = sampler.sample(logits, places), sampler.begin(logits, places).wait()
        assert not found.failures
        num_different += int((expected.token_ids.cpu() != found.token_ids).sum())
    assert num_different <= 1 + num_draws / 100_000, f"{num_different} of {num_draws} tokens differ"


@pytest.mark.parametrize("memory", ["room", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_fail_behind_their_kernels_change_no_answer(memory: str, *, overlap: bool) -> None:
    """By graphs, with kernels under way when they fail, and swaps where there are some; by a shortage of memory too."""
    model = moved(make_model("llama"), "cuda")
    config = replace(CONFIG, num_blocks=200)
    if memory == "swap":
        config = replace(CONFIG, num_blocks=20, preemption="swap", num_host_blocks=40, min_partial_hit=1)
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, seed=3)
    expected = [request.output().token_ids for request in serve(LLM(model, config), params=params)[0]]
    llm = LLM(model, replace(config, overlap=overlap))
    poison(llm)
    compute = llm.core._parts.runner.compute
    calls, failed = [0], [0]

    def fail(plan: StepPlan, *rest: Any) -> torch.Tensor:  # noqa: ANN401 - as they are
        calls[0] += 1
        logits = compute(plan, *rest)
        swaps = bool(plan.swaps_in or plan.swaps_out)
        if not (swaps if memory == "swap" else calls[0] % 4 == 0) or calls[0] == failed[-1] + 1:
            return logits  # no step and its retry fail
        failed.append(calls[0])
        if len(failed) % 2:
            raise ValueError("mine")
        return torch.empty(2**52, device="cuda")

    llm.core._parts.runner.compute = fail  # type: ignore[method-assign,assignment]
    requests, records = serve(llm, params=params, may_fail=True)
    assert [request.output().token_ids for request in requests] == expected
    reasons = [(record.failure or "").split(":")[0] for record in records]
    assert len(failed) - 1 == reasons.count("ValueError") + reasons.count("OutOfMemoryError") > 0
    assert memory == "room" or sum(record.num_swapped_out for record in records) > 0
    assert llm.core.space.num_live_blocks() == 0
