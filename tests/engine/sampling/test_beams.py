"""Beam search: the very beams and scores of transformers' own, on a model that is there."""

from typing import Literal

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.engine.sampling import BeamSearch, BeamStep, Place, SampledSequence, SamplingParams, beam_logprobs
from pagedkv.errors import ConfigurationError, TensorError

VOCAB = 40
MAX_TOKENS = 8
PROMPT = [1, 5, 9]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(8)  # a fresh model's logits are all alike
    return model


def search(model: LlamaForCausalLM, beams: BeamSearch, params: SamplingParams) -> None:
    """Run a search, the whole text of each beam forwarded anew."""
    sequence = SampledSequence(params, PROMPT, vocab_size=VOCAB)
    for _ in range(MAX_TOKENS + 1):
        running = beams.running
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *tokens] for tokens in running])).logits[:, -1].float()
        step = beams.step(beam_logprobs(logits, [Place(sequence, tokens) for tokens in running]))
        if step.is_over:
            return
        for place, (parent, token) in enumerate(zip(step.parents, step.token_ids, strict=True)):
            assert beams.running[place] == (*running[parent], token)
    raise AssertionError("the search continues beyond its length")


@pytest.mark.parametrize(
    ("num_beams", "end_ids", "length_penalty", "early_stopping"),
    [
        (2, (), 1.0, False),
        (3, (3,), 1.0, False),
        (4, (3, 8), 0.0, True),
        (2, (3, 8), 2.5, "never"),
        (4, (3,), -1.0, "never"),
        (3, (3, 8), 2.5, True),
        (2, (3,), -1.0, False),
    ],
)
def test_beams_and_scores_are_those_of_transformers(
    model: LlamaForCausalLM,
    num_beams: int,
    end_ids: tuple[int, ...],
    length_penalty: float,
    early_stopping: bool | Literal["never"],  # noqa: FBT001 - a word of transformers
) -> None:
    assert_as_theirs(model, num_beams, end_ids, length_penalty, early_stopping)


@pytest.mark.long
@pytest.mark.parametrize("num_beams", [2, 4])
@pytest.mark.parametrize("end_ids", [(), (3,), (3, 8)])
def test_all_kinds_of_searches(model: LlamaForCausalLM, num_beams: int, end_ids: tuple[int, ...]) -> None:
    for length_penalty in (0.0, 1.0, -1.0, 2.5):
        for early_stopping in (False, True, "never"):
            assert_as_theirs(model, num_beams, end_ids, length_penalty, early_stopping)


def assert_as_theirs(  # noqa: PLR0913, PLR0917 - what a search has
    model: LlamaForCausalLM,
    num_beams: int,
    end_ids: tuple[int, ...],
    length_penalty: float,
    early_stopping: bool | Literal["never"],  # noqa: FBT001 - a word of transformers
    repetition_penalty: float = 1.0,
) -> None:
    theirs = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=list(end_ids) or None,
        pad_token_id=0,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        repetition_penalty=repetition_penalty,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = BeamSearch(num_beams, MAX_TOKENS, end_ids, length_penalty=length_penalty, early_stopping=early_stopping)
    search(model, beams, SamplingParams(repetition_penalty=repetition_penalty))
    for ours, tokens, score in zip(beams.finished, theirs.sequences, theirs.sequences_scores, strict=True):
        answer = tokens[len(PROMPT) :].tolist()
        assert list(ours.token_ids) + [0] * (len(answer) - len(ours.token_ids)) == answer
        assert ours.score == pytest.approx(float(score), rel=1e-4)


def test_beams_are_penalised_as_by_transformers(model: LlamaForCausalLM) -> None:
    """Their penalties see log-probabilities, not logits."""
    assert_as_theirs(model, 3, (3,), 1.0, early_stopping=False, repetition_penalty=1.5)


def test_the_estimate_decides_when_it_is_over() -> None:
    """With three tokens of probability 0.5, 0.3 and 0.2, the last of which ends."""
    logprobs = torch.tensor([0.5, 0.3, 0.2]).log().repeat(2, 1)
    lengths = {}
    for early_stopping in (True, False, "never"):
        beams = BeamSearch(2, 30, [2], length_penalty=1.0, early_stopping=early_stopping)
        for number in range(1, 31):
            if beams.step(logprobs).is_over:
                lengths[early_stopping] = number
                break
    assert lengths[True] <= lengths[False] <= lengths["never"]


def test_the_first_step_continues_one_beam() -> None:
    beams = BeamSearch(2, 10)
    step = beams.step(torch.tensor([[0.1, 0.2, 0.7]]).log().repeat(2, 1))
    assert step == BeamStep(parents=(0, 0), token_ids=(2, 1), is_over=False)
    assert beams.running == ((2,), (1,))


def test_what_is_no_search_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_beams must be at least 2"):
        BeamSearch(1, 5)
    with pytest.raises(ConfigurationError, match="early_stopping must be True, False or 'never', got 'soon'"):
        BeamSearch(2, 5, early_stopping="soon")  # type: ignore[arg-type] # that is the point
    with pytest.raises(TensorError, match=r"2 beams need log-probabilities \[beams, vocabulary\], got \[3, 4\]"):
        BeamSearch(2, 5).step(torch.zeros(3, 4))
