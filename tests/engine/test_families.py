"""Every family answers over blocks as it does by itself: prefixes, chunks, staggered arrival, preemption, poison."""

from dataclasses import replace

import pytest

from pagedkv.engine import LLM, EngineRequest, PromptLookup
from tests.engine.families import CONFIGS, MORE, make_model
from tests.engine.guesses import guess
from tests.engine.serving import CONFIG, PROMPTS, REPETITIVE, compare, poison, reference, serve

NUM_BLOCKS = {"mistral": 12, "phi3": 12}
"""Of families that keep windows alone, which need fewer."""

SPECULATED = {
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "llama4_text",
    "deepseek_v3",
    "bamba",
    "falcon_h1",
    "qwen3_next",
}
"""Families whose guesses are judged in every run of the tests; those of others in the long ones."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_answers_as_it_does_dense(name: str) -> None:
    model = make_model(name)
    references = reference(model, PROMPTS)
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


@pytest.mark.parametrize(
    "name", [name if name in SPECULATED else pytest.param(name, marks=pytest.mark.long) for name in CONFIGS]
)
def test_a_family_answers_so_with_guesses(name: str) -> None:
    """Every second request is guessed by lookup, the others by hand: two tokens of three are right."""
    model = make_model(name)
    prompts = PROMPTS if name in NUM_BLOCKS else REPETITIVE  # windows alone are preempted behind these
    references = reference(model, prompts)
    speculating = replace(CONFIG, num_blocks=13 if name in NUM_BLOCKS else 18, speculation=PromptLookup())
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
    compare(requests, reference(model, PROMPTS))
