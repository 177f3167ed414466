"""Every family answers over blocks as it does by itself: prefixes, chunks, staggered arrival, preemption, poison."""

from dataclasses import replace

import pytest

from pagedkv.engine import LLM
from tests.engine.families import CONFIGS, MORE, make_model
from tests.engine.serving import CONFIG, PROMPTS, compare, poison, reference, serve

NUM_BLOCKS = {"mistral": 12, "phi3": 12}
"""Of families that keep windows alone, which need fewer."""


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


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_further_families_do_so_as_well(name: str) -> None:
    model = make_model(name)
    llm = LLM(model, replace(CONFIG, self_test=True))
    poison(llm)
    requests, _ = serve(llm)
    compare(requests, reference(model, PROMPTS))
