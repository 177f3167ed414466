"""The door: requests good and bad, streaming, several answers, records, failures."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, SamplingParams, TokensPrompt
from pagedkv.errors import ConfigurationError, EngineError, RequestError
from tests.choosing import long_but
from tests.engine.drawn_plainly import draw_plainly
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, NUM_NEW, PROMPTS, compare, reference, reference_of, serve

ROOMY = replace(CONFIG, num_blocks=200)
PARAMS = SamplingParams(max_tokens=NUM_NEW)


@pytest.fixture
def llm(model: PreTrainedModel) -> LLM:
    return LLM(model, ROOMY)


def answers(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    return [each.token_ids for each in reference_of("llama", prompts)]


def test_outputs_are_in_the_order_of_prompts(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [list(output.token_ids) for output in outputs] == answers()
    assert [list(output.prompt_token_ids) for output in outputs] == [list(prompt) for prompt in PROMPTS]
    assert {output.completions[0].finish_reason for output in outputs} == {"length"}
    assert all(0 < output.first_token_seconds <= output.total_seconds for output in outputs)  # type: ignore[operator]


def test_a_second_call_hits_what_the_first_left(llm: LLM) -> None:
    first, second = (llm.generate(PROMPTS[:1], PARAMS)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 24
    assert first.token_ids == second.token_ids


def test_tokens_stream_as_they_come(llm: LLM) -> None:
    streamed: dict[int, list[int]] = {place: [] for place in range(len(PROMPTS))}
    ends = []
    for update in llm.stream(PROMPTS, PARAMS):
        streamed[update.prompt] += update.token_ids
        ends += [update.finish_reason] * (update.finish_reason is not None)
    assert list(streamed.values()) == answers()
    assert ends == ["length"] * len(PROMPTS)


def test_who_stops_listening_ends_the_requests(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, PARAMS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.core.has_work
    assert llm.core.space.num_live_blocks() == 0


def test_a_stop_token_ends_an_answer_and_is_part_of_it(llm: LLM, model: PreTrainedModel) -> None:
    expected = answers()[0]
    stop = expected[5]
    first = expected.index(stop) + 1
    output = llm.generate(PROMPTS[:1], replace(PARAMS, stop_token_ids=(stop,)))[0]
    assert list(output.token_ids) == expected[:first]
    assert output.completions[0].finish_reason == "stop"
    late = llm.generate(PROMPTS[:1], replace(PARAMS, stop_token_ids=(stop,), min_tokens=8))[0]
    theirs = reference(model, PROMPTS[:1], min_new_tokens=8, eos_token_id=stop)[0].token_ids
    assert list(late.token_ids) == theirs
    assert len(theirs) >= 8


def test_the_models_own_end_is_heeded_unless_ignored(model: PreTrainedModel) -> None:
    expected = answers()[0]
    model.generation_config.eos_token_id = [expected[3]]
    try:
        llm = LLM(model, ROOMY)
    finally:
        model.generation_config.eos_token_id = None
    assert len(llm.generate(PROMPTS[:1], PARAMS)[0].token_ids) == expected.index(expected[3]) + 1
    assert list(llm.generate(PROMPTS[:1], replace(PARAMS, ignore_eos=True))[0].token_ids) == expected


SHARED = [(name, num_blocks) for name in ("llama", "mistral", "deepseek_v3", "falcon_h1") for num_blocks in (100, 26)]


@pytest.mark.parametrize(
    ("name", "num_blocks"), long_but([("llama", 100), ("llama", 26), ("mistral", 26), ("falcon_h1", 26)], SHARED)
)
def test_several_answers_share_a_prompt(name: str, num_blocks: int) -> None:
    model = make_model(name)
    llm = LLM(model, replace(CONFIG, num_blocks=num_blocks))
    requests, _ = serve(llm, PROMPTS[:4], replace(PARAMS, n=3, temperature=1.0, top_k=1))
    compare(requests, reference_of(name, PROMPTS[:4]))
    assert all(len(request.samples) == 3 for request in requests)


def test_answers_that_part_are_continued_from_their_own_tokens(model: PreTrainedModel) -> None:
    drawn = replace(PARAMS, n=3, temperature=1.0, seed=3)
    requests, _ = serve(LLM(model, ROOMY), PROMPTS[:2], drawn)
    for prompt, request in zip(PROMPTS, requests, strict=False):
        assert len({tuple(sample.token_ids) for sample in request.samples}) == 3
        for sample in request.samples:
            expected = draw_plainly(model, prompt, drawn, seed=3, sample=sample.index)
            assert sample.token_ids[: expected.num_certain] == expected.token_ids[: expected.num_certain]


def test_one_answer_that_stops_leaves_the_others(model: PreTrainedModel) -> None:
    drawn = replace(PARAMS, n=3, temperature=1.0, seed=3)
    expected = LLM(model, ROOMY).generate(PROMPTS[:1], drawn)[0].completions
    stop = expected[1].token_ids[4]
    found = LLM(model, ROOMY).generate(PROMPTS[:1], replace(drawn, stop_token_ids=(stop,)))[0].completions
    for one, other in zip(expected, found, strict=True):
        end = one.token_ids.index(stop) + 1 if stop in one.token_ids else NUM_NEW
        assert other.token_ids == one.token_ids[:end]
        assert (other.finish_reason, other.stop) == (("stop", stop) if stop in one.token_ids else ("length", None))


def test_records_add_up(llm: LLM) -> None:
    requests, records = serve(llm)
    assert sum(record.num_sampled for record in records) == NUM_NEW * len(PROMPTS)
    num_computed = sum(record.num_prefilled for record in records)
    assert num_computed == sum(len(prompt) for prompt in PROMPTS) - sum(record.num_hit_tokens for record in records)
    assert sum(record.num_admitted for record in records) == sum(record.num_finished for record in records) == 6
    assert sum(request.num_cached_tokens or 0 for request in requests) == sum(each.num_hit_tokens for each in records)
    assert [record.step_id for record in records] == list(range(records[0].step_id, records[-1].step_id + 1))
    assert records[-1].num_running == records[-1].num_used_blocks == 0
    assert max(record.num_used_blocks for record in records) > 20


BAD: dict[str, tuple[object, SamplingParams, str]] = {
    "empty": ([], PARAMS, "prompt 1: .* empty"),
    "too long": ([1] * 70, PARAMS, "prompt 1: .* 70 tokens and 20 new ones are more than the 80"),
    "unknown token": ([1, 199], PARAMS, "prompt 1: token ids must be from 0 to 198, got 199"),
    "negative token": ([-1], PARAMS, "got -1"),
    "text without a tokenizer": ("hello", PARAMS, "prompt 1 is text, but the engine has no tokenizer"),
    "no numbers": ([0.5], PARAMS, "prompt 1 must be a text or a list of token ids"),
    "too many answers": ([1], replace(PARAMS, n=6, temperature=1.0), "does not fit"),
    "no room for the fewest tokens": ([1] * 70, SamplingParams(min_tokens=20), "70 tokens and 20 new ones"),
    "embeddings": (TokensPrompt([1], inputs_embeds=torch.zeros(1, 32)), PARAMS, "inputs_embeds is not served"),
    "media": (TokensPrompt([1], media_positions=[(0, 1)]), PARAMS, "media_positions is not served"),
    "no room at all": ([1] * 80, SamplingParams(), "80 tokens and 1 new ones are more than the 80"),
    "a stop text without a tokenizer": ([1], replace(PARAMS, stop="end"), "need a tokenizer"),
    "a bad word without a tokenizer": ([1], replace(PARAMS, bad_words=["end"]), "bad_words are text"),
    "a bias for a token that is not": ([1], replace(PARAMS, logit_bias={199: 1.0}), "logit_bias names tokens 199"),
}


def test_answers_beyond_the_context_end_there_where_that_is_asked_for(model: PreTrainedModel) -> None:
    """As in vLLM; by default the engine refuses them."""
    llm = LLM(model, replace(CONFIG, beyond_context="clip"))
    prompts = [PROMPTS[0], PROMPTS[2]]
    asked = [replace(PARAMS, max_tokens=10_000), replace(PARAMS, max_tokens=80)]
    room = [CONFIG.max_tokens - len(prompt) for prompt in prompts if CONFIG.max_tokens is not None]
    for output, prompt, num_new in zip(llm.generate(prompts, asked), prompts, room, strict=True):
        (completion,) = output.completions
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == num_new
        certain = reference(model, [prompt], num_new)[0]
        assert list(completion.token_ids)[: certain.num_certain] == certain.token_ids[: certain.num_certain]
    request = llm.submit(PROMPTS[:1], PARAMS)[0]
    while not request.samples[0].token_ids:
        llm.step()
    child = request.fork(params=asked[0])
    assert child.spec.max_tokens == 80 - len(child.prompt_token_ids)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([1] * 80, PARAMS, "80 tokens and 1 new ones are more than the 80"),
        ([1] * 70, SamplingParams(min_tokens=11, max_tokens=20), "70 tokens and 11 new ones are more than the 80"),
    ],
)
def test_what_has_no_room_at_all_is_refused_all_the_same(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(model, replace(CONFIG, beyond_context="clip")).generate([prompt], params)


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_disturbs_nobody(llm: LLM, what: str) -> None:
    prompt, params, message = BAD[what]
    under_way = llm.submit(PROMPTS[:1], PARAMS)
    llm.step()
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPTS[1], prompt], [PARAMS, params])  # type: ignore[list-item]
    while llm.core.has_work:
        llm.step()
    assert [under_way[0].samples[0].token_ids] == answers(PROMPTS[:1])


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"n": 0},
        {"n": 2, "num_beams": 1.5},
        {"min_tokens": 30, "max_tokens": 20},
        {"temperature": -1.0},
        {"top_p": 0.5},
    ],
)
def test_contradictory_wishes_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**bad)  # type: ignore[arg-type]


def test_wishes_must_be_as_many_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts need as many SamplingParams, got 1"):
        llm.generate(PROMPTS[:2], [PARAMS])
    with pytest.raises(RequestError, match="give a list"):
        llm.generate("text")


@pytest.mark.parametrize(
    "bad", [{"num_blocks": 1}, {"preemption": "swap"}, {"kv_nbytes": 10}, {"max_batched_tokens": 1}]
)
def test_memory_that_cannot_work_is_refused(model: PreTrainedModel, bad: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        LLM(model, EngineConfig(self_test=False, **bad))  # type: ignore[arg-type]


def test_memory_is_split_by_bytes(model: PreTrainedModel) -> None:
    llm = LLM(model, EngineConfig(self_test=False, kv_nbytes=2**20))
    assert 2**20 - 8192 <= llm.core.executor.storage.device_nbytes <= 2**20
    assert list(llm.generate(PROMPTS[:1], PARAMS)[0].token_ids) == answers()[0]


def test_a_broken_invariant_ends_the_engine(llm: LLM, model: PreTrainedModel) -> None:
    llm.submit(PROMPTS[:1], PARAMS)
    llm.step()
    handle = model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(AssertionError("a fault of ours")))
    try:
        with pytest.raises(EngineError, match="AssertionError: a fault of ours"):
            llm.step()
    finally:
        handle.remove()
    with pytest.raises(EngineError, match="has failed before: AssertionError: a fault of ours"):
        llm.generate(PROMPTS[:1], PARAMS)


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text: str) -> list[int]:
        """Number letters."""
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Write numbers as letters."""
        return "".join(map(chr, token_ids))


def test_an_answer_goes_on_to_the_longest_sequence_unless_told(llm: LLM) -> None:
    assert len(llm.generate(PROMPTS[:1], SamplingParams())[0].token_ids) == 80 - len(PROMPTS[0])
    assert len(llm.generate(PROMPTS[:1])[0].token_ids) == 16


def test_text_goes_in_and_out(model: PreTrainedModel) -> None:
    llm = LLM(model, ROOMY, tokenizer=Letters())
    output = llm.generate(["abc"], PARAMS)[0]
    assert output.prompt_token_ids == (97, 98, 99)
    assert output.completions[0].text == Letters().decode(output.token_ids)


@pytest.fixture(autouse=True)
def _as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Let every test leave the model as it found it."""
    before = model.config._attn_implementation
    yield
    assert model.config._attn_implementation == before
