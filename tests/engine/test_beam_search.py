"""Beam search over forks of rows: as transformers finds them, whatever stands beside it, however short memory is."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, PromptLookup, SamplingParams
from pagedkv.errors import RequestError
from pagedkv.scheduling import PreemptionKind
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, PROMPTS, poison, reference_of, serve

ROOMY = replace(CONFIG, num_blocks=200)
NUM_NEW = 12


def theirs(model: PreTrainedModel, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """Search by transformers; what follows an end token is padding."""
    ends = list(params.stop_token_ids)
    with torch.inference_mode():
        found = cast("Any", model).generate(
            torch.tensor([prompt]),
            max_new_tokens=params.max_tokens,
            do_sample=False,
            num_beams=params.num_beams,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=ends or None,
            repetition_penalty=params.repetition_penalty,
        )
    answers = [row[len(prompt) :].tolist() for row in found]
    for answer in answers:
        first = min((answer.index(end) for end in ends if end in answer), default=len(answer) - 1)
        del answer[first + 1 :]
    return answers


WISHES = [
    SamplingParams(max_tokens=NUM_NEW, num_beams=2),
    SamplingParams(max_tokens=NUM_NEW, num_beams=3, n=3, length_penalty=0.5),
    SamplingParams(max_tokens=NUM_NEW, num_beams=4, n=2, early_stopping=True, repetition_penalty=1.3),
    SamplingParams(max_tokens=NUM_NEW, num_beams=3, length_penalty=2.0, early_stopping="never"),
    SamplingParams(max_tokens=NUM_NEW, num_beams=4, n=4, length_penalty=-1.0),
]


@pytest.mark.parametrize("params", WISHES, ids=lambda each: f"{each.num_beams} {each.early_stopping}")
@pytest.mark.parametrize("has_ends", [False, True])
def test_a_search_finds_what_transformers_finds(model: PreTrainedModel, params: SamplingParams, has_ends: bool) -> None:  # noqa: FBT001 - a parameter
    llm = LLM(model, ROOMY)
    poison(llm)
    for prompt in PROMPTS[:4]:
        # Ends that a search meets: tokens of the answer without them.
        ends = theirs(model, list(prompt), params)[0][3:6:2] if has_ends else []
        wish = replace(params, stop_token_ids=ends)
        output = llm.generate([prompt], wish)[0]
        assert [list(each.token_ids) for each in output.completions] == theirs(model, list(prompt), wish)
        scores = [each.score or 0.0 for each in output.completions]
        assert scores == sorted(scores, reverse=True)
    assert llm.core.space.num_live_blocks() == 0


@pytest.mark.parametrize("name", ["mistral", "gemma2", "deepseek_v3", "bamba", "falcon_h1"])
def test_it_does_so_with_windows_latents_and_states(name: str) -> None:
    model = make_model(name)
    llm = LLM(model, ROOMY)
    poison(llm)
    for prompt in PROMPTS[:2]:
        output = llm.generate([prompt], WISHES[1])[0]
        assert [list(each.token_ids) for each in output.completions] == theirs(model, list(prompt), WISHES[1])


@pytest.mark.parametrize(
    "config",
    [ROOMY, replace(CONFIG, num_blocks=20), replace(CONFIG, num_blocks=20, preemption="swap", num_host_blocks=60)],
)
def test_beams_and_others_do_not_notice_each_other(model: PreTrainedModel, config: EngineConfig) -> None:
    llm = LLM(model, config)
    requests, _ = serve(llm, PROMPTS[:1], SamplingParams(max_tokens=4))  # something to hit
    wishes = [WISHES[1], SamplingParams(max_tokens=NUM_NEW), WISHES[0], SamplingParams(max_tokens=NUM_NEW)]
    requests = []
    while len(requests) < 4 or llm.core.has_work:
        if len(requests) < 4:
            requests += llm.submit([PROMPTS[len(requests)]], wishes[len(requests)])
        llm.step()
        llm.core.space.check()
    for prompt, params, request in zip(PROMPTS, wishes, requests, strict=False):
        if params.num_beams > 1:
            assert [sample.token_ids for sample in request.samples] == theirs(model, list(prompt), params)
        else:
            assert request.samples[0].token_ids == reference_of("llama", [prompt], NUM_NEW)[0].token_ids
    assert llm.core.space.num_live_blocks() == 0


@pytest.mark.parametrize("kind", ["recompute", "swap"])
@pytest.mark.parametrize(("params", "speculation"), [(WISHES[1], None), (WISHES[2], PromptLookup())])
def test_beams_that_are_preempted_find_what_others_find(
    model: PreTrainedModel, kind: PreemptionKind, params: SamplingParams, speculation: PromptLookup | None
) -> None:
    """A long answer comes first, so the beams are the ones to give their blocks up, and begin again or come back."""
    short = replace(CONFIG, num_blocks=24, preemption=kind, num_host_blocks=60 * (kind == "swap"))
    llm = LLM(model, replace(short, speculation=speculation))
    poison(llm)
    (long,) = llm.submit([PROMPTS[5]], SamplingParams(max_tokens=60))
    while len(long.samples[0].token_ids) < 36:
        llm.step()
    (beams,) = llm.submit([PROMPTS[0]], params)
    records = []
    while llm.core.has_work:
        records.append(llm.step())
        llm.core.space.check()
    assert (long.num_preemptions, beams.num_preemptions > 0) == (0, True)
    assert (sum(record.num_swapped_out for record in records) > 0) == (kind == "swap")
    found = [list(each.token_ids) for each in beams.output().completions]
    assert found == theirs(model, list(PROMPTS[0]), params)
    assert long.samples[0].token_ids == reference_of("llama", [PROMPTS[5]], 60)[0].token_ids
    assert (long.num_drafted > 0, beams.num_drafted) == (speculation is not None, 0)
    assert llm.core.space.num_live_blocks() == 0


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"num_beams": 0}, "num_beams must be at least 1"),
        ({"num_beams": 2, "n": 3}, "n=3 answers are more than num_beams=2"),
        ({"num_beams": 2, "temperature": 0.5}, "temperature is not served together with num_beams=2"),
        ({"num_beams": 2, "stop": "a"}, "stop is not served together"),
        ({"num_beams": 2, "logprobs": 1}, "logprobs are not served together"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping must be True, False or 'never'"),
        ({"length_penalty": 2.0}, "of a beam search: set num_beams"),
    ],
)
def test_contradictions_are_refused(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(**bad)


def test_too_many_beams_for_the_engine_are_refused_at_once(model: PreTrainedModel) -> None:
    with pytest.raises(RequestError, match=r"with 6 answers of 12 does not fit .* 5 sequences"):
        LLM(model, ROOMY).submit(PROMPTS[:1], SamplingParams(max_tokens=NUM_NEW, num_beams=6))


def test_logits_that_are_no_numbers_end_a_search_and_nobody_else(model: PreTrainedModel) -> None:
    nothing = replace(WISHES[0], logit_bias=dict.fromkeys(range(199), -float("inf")))
    outputs = LLM(model, ROOMY).generate(PROMPTS[:2], [nothing, SamplingParams(max_tokens=NUM_NEW)])
    assert "no beam can go on" in (outputs[0].error or "")
    assert list(outputs[1].token_ids) == reference_of("llama", PROMPTS[1:2], NUM_NEW)[0].token_ids
