"""What an output contains beside its tokens: what was cached, computed, shared and computed again, why, and when."""

from dataclasses import replace
from itertools import count

import pytest
from transformers import PreTrainedModel

from pagedkv.contract.answers import MissCause
from pagedkv.engine import LLM, SamplingParams, TokensPrompt
from pagedkv.space import Receipt
from tests.engine.serving import CONFIG, PROMPTS, serve

ROOMY = replace(CONFIG, num_blocks=200)
PARAMS = SamplingParams(max_tokens=12)


@pytest.mark.parametrize("config", [ROOMY, CONFIG, replace(CONFIG, preemption="swap", num_host_blocks=60)])
@pytest.mark.parametrize("num_answers", [1, 2])
def test_promise_29_receipts_of_all_requests_add_up(model: PreTrainedModel, config: object, num_answers: int) -> None:
    llm = LLM(model, config)  # type: ignore[arg-type]
    params = replace(PARAMS, n=num_answers, temperature=float(num_answers > 1))
    requests, records = serve(llm, PROMPTS, params)
    outputs = [request.output() for request in requests]
    total = sum((output.receipt for output in outputs), Receipt())
    assert total == llm.core.space.statistics().receipts
    assert total.num_computed == sum(record.num_tokens for record in records)
    assert sum(output.num_computed_tokens for output in outputs) == total.num_computed
    preempted = sum(record.num_recomputed for record in records)
    assert (sum(output.num_recomputed_tokens for output in outputs) > 0) == (preempted > 0)
    assert (sum(output.num_shared_tokens for output in outputs) > 0) == (num_answers > 1)


def test_of_a_request_alone_the_numbers_are_known(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    first, second = (llm.generate(PROMPTS[:1], PARAMS)[0] for _ in range(2))
    assert (first.num_cached_tokens, first.num_computed_tokens, first.num_recomputed_tokens) == (0, 26 + 11, 0)
    assert (second.num_cached_tokens, second.num_computed_tokens) == (24, 2 + 11)
    three = LLM(model, ROOMY).generate(PROMPTS[:1], replace(PARAMS, n=3, temperature=1.0))[0]
    assert (three.num_shared_tokens, three.num_computed_tokens) == (2 * 26, 26 + 3 * 11)


def test_promise_26_an_output_tells_why_its_prompt_did_not_hit_further(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    first = llm.generate([PROMPTS[0]], PARAMS)[0].explanation
    assert first is not None
    assert (first.num_hit_tokens, first.cause) == (0, MissCause.NEVER_STORED)
    changed = [*PROMPTS[0][:14], 198, *PROMPTS[0][15:]]
    second = llm.generate([changed], PARAMS)[0].explanation
    assert second is not None
    assert (second.num_hit_tokens, second.cause, second.position) == (12, MissCause.CHANGED_TOKENS, 14)
    assert second.token_id == PROMPTS[0][14]


def test_times_begin_when_a_request_arrives(model: PreTrainedModel) -> None:
    llm = LLM(model, replace(ROOMY, max_sequences=1))
    ticks = count()
    llm.core._clock = lambda: float(next(ticks))
    for output in llm.generate(PROMPTS[:2], PARAMS):
        assert 0 < output.queue_seconds < output.first_token_seconds < output.total_seconds  # type: ignore[operator]
    waited = llm.submit(PROMPTS[:1], PARAMS)[0]
    llm.core.abort(waited)
    assert (waited.output().queue_seconds, waited.output().explanation) == (None, None)


def test_a_prompt_may_be_token_ids_with_room_for_more(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY)
    plain, wrapped = llm.generate([PROMPTS[0], TokensPrompt(PROMPTS[0])], PARAMS)
    assert plain.token_ids == wrapped.token_ids
