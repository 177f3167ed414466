"""What a request is said to have written is what a later, longer prompt hits."""

from dataclasses import replace

import pytest

from pagedkv.engine import LLM, SamplingParams
from pagedkv.server.engines import EngineFacts
from pagedkv.server.generation import usage_of
from tests.engine.families import make_model
from tests.engine.serving import CONFIG

ONE = SamplingParams(max_tokens=1)


@pytest.mark.parametrize("name", ["gemma3_text", "bamba", "qwen3_next"])
def test_written_tokens_are_hit_by_a_longer_prompt(name: str) -> None:
    llm = LLM(make_model(name), replace(CONFIG, num_blocks=300, max_tokens=400))
    facts = EngineFacts.of(llm)
    num_written = 0
    for seed, length in enumerate((3, 33, 64, 150)):
        prompt = [(seed * 31 + 7 * place) % 190 + 3 for place in range(length)]
        (first,) = llm.generate([prompt], ONE)
        usage = usage_of([first], facts)
        (longer,) = llm.generate([[*prompt, 1, 2, 3]], ONE)
        at_the_end = longer.num_cached_tokens - usage.num_read - usage.num_written
        assert 0 <= at_the_end < facts.block_size, "the state where an answer ended, inside a block, is nobody's cost"
        num_written += usage.num_written
    assert num_written > 200


def test_without_caching_nothing_is_written() -> None:
    llm = LLM(make_model("llama"), replace(CONFIG, num_blocks=300, max_tokens=400, prefix_caching=False))
    (output,) = llm.generate([list(range(3, 60))], ONE)
    assert usage_of([output], EngineFacts.of(llm)).num_written == 0
