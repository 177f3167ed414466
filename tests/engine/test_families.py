"""Every family answers over blocks as it does by itself: prefixes, chunks, staggered arrival, preemption, poison."""

from dataclasses import replace

import pytest

from pagedkv.engine import LLM, EngineRequest, PromptLookup, RequestOutput, SamplingParams, TokenLogprobs
from tests.choosing import long_but
from tests.engine.families import CONFIGS, MORE, make_model
from tests.engine.guesses import guess
from tests.engine.serving import CONFIG, PROMPTS, REPETITIVE, compare, poison, reference_of, serve

NUM_BLOCKS = {"mistral": 12, "phi3": 12, "deepseek_v4": 14}
"""Of families that keep windows alone, or few blocks of many tokens, which need fewer."""

SPECULATED = {"llama", "mistral", "gemma2", "deepseek_v3", "bamba", "deepseek_v32"}
"""Families whose guesses are judged in every run of the tests, one for each kind of layers: all attention, windows
alone, both, latents, states, indexers. Those of others are judged in the long tests.
"""
EACH_TIME = SPECULATED | {"llama4_text", "gpt_oss", "falcon_h1", "qwen3_next", "qwen4_exp_text", "deepseek_v4"}
"""Families whose answers are judged in every run: also chunks, sinks, other states, an indexer beside states, and
compressed entries.
"""


@pytest.mark.parametrize("name", long_but(EACH_TIME, CONFIGS))
def test_a_family_answers_as_it_does_dense(name: str) -> None:
    model = make_model(name)
    references = reference_of(name)
    num_blocks = NUM_BLOCKS.get(name, 28)
    for config in (
        replace(CONFIG, num_blocks=num_blocks, self_test=True),
        replace(CONFIG, num_blocks=num_blocks, preemption="swap", num_host_blocks=40, min_partial_hit=1),
    ):
        llm = LLM(model, config)
        poison(llm)
        requests, records = serve(llm)
        compare(requests, references)
        assert sum(record.num_hit_tokens for record in records) > 0
        if config.preemption == "swap":
            assert sum(record.num_swapped_out for record in records) > 0
        else:
            assert sum(record.num_recomputed for record in records) > 0
        assert llm.core.space.num_live_blocks() == 0


@pytest.mark.parametrize("name", long_but(SPECULATED, CONFIGS))
def test_a_family_answers_so_with_guesses(name: str) -> None:
    """Every second request is guessed by lookup, the others by hand: two tokens of three are right."""
    model = make_model(name)
    prompts = PROMPTS if name in NUM_BLOCKS else REPETITIVE  # windows alone are preempted behind these
    references = reference_of(name, prompts)
    speculating = replace(CONFIG, num_blocks=10 if name in NUM_BLOCKS else 18, speculation=PromptLookup())
    for config in (speculating, replace(speculating, preemption="swap", num_host_blocks=60, min_partial_hit=1)):
        llm = LLM(model, config)
        poison(llm)

        def greet(request: EngineRequest) -> None:
            if request.number % 2:
                guess(request, references[request.number].token_ids, wrong_every=3)

        requests, records = serve(llm, prompts, greet=greet)
        compare(requests, references)
        assert 0 < sum(record.num_accepted for record in records) < sum(record.num_drafted for record in records)
        assert sum(record.num_hit_tokens for record in records) > 0
        if config.preemption == "swap":
            assert sum(record.num_swapped_out for record in records) > 0
        else:
            assert sum(record.num_recomputed for record in records) > 0
        assert llm.core.space.num_live_blocks() == 0


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_further_families_do_so_as_well(name: str) -> None:
    model = make_model(name)
    llm = LLM(model, replace(CONFIG, self_test=True))
    poison(llm)
    requests, _ = serve(llm)
    compare(requests, reference_of(name))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_a_prompt_hits_what_another_one_computes_in_the_same_step(name: str) -> None:
    """The one that hits has the lower row: rows are handed out anew, the last one first."""
    model = make_model(name)
    llm = LLM(model, replace(CONFIG, num_blocks=60, max_batched_tokens=64))
    params = SamplingParams(max_tokens=6)
    llm.generate([[3, 4], [5, 6]], SamplingParams(max_tokens=1))
    poison(llm)
    prompts = [PROMPTS[0], PROMPTS[4]]
    requests = llm.submit(prompts, params)
    record = llm.step()
    assert (record.num_prefilled, record.num_hit_tokens) == (len(PROMPTS[0]) + 5, 24), "both are in one step"
    while llm.core.has_work:
        llm.step()
    compare(requests, reference_of(name, prompts, 6))


HITS_ANSWERS = {"bamba": True, "zamba2": False, "nemotron_h": False}


@pytest.mark.parametrize("name", long_but(["bamba", "zamba2"], HITS_ANSWERS))
def test_a_prompt_that_repeats_an_answer_is_answered_as_if_it_were_new(name: str) -> None:
    """Where decoding rounds otherwise than a prompt does, what was decoded is no prefix for others."""
    model = make_model(name)
    config = replace(CONFIG, num_blocks=60)
    params = SamplingParams(max_tokens=20, logprobs=0)
    served, fresh = LLM(model, config), LLM(model, config)
    (first,) = served.generate([PROMPTS[0]], params)
    prompt = [*PROMPTS[0], *first.completions[0].token_ids, 5]
    (answer,), (expected,) = served.generate([prompt], params), fresh.generate([prompt], params)
    assert answer.num_cached_tokens > 0
    assert (answer.num_cached_tokens > len(PROMPTS[0])) == HITS_ANSWERS[name]
    assert answer.completions[0].token_ids == expected.completions[0].token_ids
    pairs = zip(_logprobs(answer), _logprobs(expected), strict=True)
    assert max(abs(one.logprob - other.logprob) for one, other in pairs) < 1e-4


def _logprobs(output: RequestOutput) -> tuple[TokenLogprobs, ...]:
    logprobs = output.completions[0].logprobs
    assert logprobs is not None
    return logprobs
