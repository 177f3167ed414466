"""Conversations with recurrent layers: each turn goes on from the state where the last answer ended."""

from dataclasses import replace

import numpy as np
import pytest

from pagedkv.engine import LLM, EngineConfig, SamplingParams, TokensPrompt
from pagedkv.probe import compat
from tests.choosing import long_but
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, poison

ROOMY = replace(CONFIG, num_blocks=200, checkpoint_interval=64, max_tokens=300)
NUM_TURNS = 4
NUM_NEW = 13


def questions() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, 190, length).tolist() for length in (9, 7, 5, 11)[:NUM_TURNS]]


@pytest.mark.parametrize(
    ("name", "config"),
    long_but(
        (("bamba", ROOMY), ("qwen3_next", ROOMY), ("lfm2", ROOMY)),
        [
            ("bamba", ROOMY),
            ("qwen3_next", ROOMY),
            ("lfm2", ROOMY),
            ("falcon_h1", ROOMY),
            ("bamba", replace(ROOMY, checkpoint_interval=4)),
            ("qwen3_next", replace(ROOMY, max_batched_tokens=5)),
        ],
    ),
)
def test_a_turn_goes_on_from_the_end_of_the_last_answer(name: str, config: EngineConfig) -> None:
    model = make_model(name)
    llm = LLM(model, config)
    poison(llm)
    conversation: list[int] = []
    for number, question in enumerate(questions()):
        prompt = [*conversation, *question]
        (output,) = llm.generate([TokensPrompt(prompt)], SamplingParams(max_tokens=NUM_NEW))
        answer = list(output.token_ids)
        assert answer == compat.dense_generate(model, prompt, NUM_NEW)[0]
        assert output.num_cached_tokens == max(len(conversation) - 1, 0), f"turn {number}"
        conversation = [*prompt, *answer]
        llm.core.space.check()


def test_where_decoding_differs_from_prompts_no_answers_end_is_hit() -> None:
    """Zamba2 bounds the time steps of prompts alone: what it decoded serves no prompt."""
    model = make_model("zamba2")
    llm = LLM(model, replace(ROOMY, self_test=True))
    first = questions()[0]
    (output,) = llm.generate([TokensPrompt(first)], SamplingParams(max_tokens=NUM_NEW))
    longer = [*first, *output.token_ids, *questions()[1]]
    (output,) = llm.generate([TokensPrompt(longer)], SamplingParams(max_tokens=NUM_NEW))
    assert output.num_cached_tokens <= len(first)
    assert list(output.token_ids) == compat.dense_generate(model, longer, NUM_NEW)[0]
