"""With a prediction every answer is what it is without, and guesses are counted as they were made."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given, strategies as st
from transformers import PreTrainedModel

from pagedkv.engine import LLM, EngineConfig, Intent, PromptLookup, RequestOutput, SamplingParams
from pagedkv.engine.guessing import NUM_MATCHED, PredictedText
from pagedkv.errors import RequestError
from tests.engine.families import make_model
from tests.engine.serving import CONFIG, NUM_NEW, PROMPTS, poison

PREDICTING: Final = replace(CONFIG, num_blocks=200, predicted_tokens=4)
WISHES: Final = (
    SamplingParams(max_tokens=NUM_NEW),
    SamplingParams(max_tokens=NUM_NEW, temperature=1.0, seed=5, presence_penalty=0.5, logprobs=1),
    SamplingParams(max_tokens=NUM_NEW, n=2, temperature=0.7, seed=1, stop_token_ids=list(range(0, 199, 9))),
)
LETTERS: Final = st.lists(st.integers(0, 2), max_size=12)


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> list[RequestOutput]:
    llm = LLM(model, replace(PREDICTING, predicted_tokens=0))
    return [llm.generate([PROMPTS[place]], wish)[0] for place, wish in enumerate(WISHES)]


def predictions_of(answer: Sequence[int]) -> dict[str, list[int]]:
    """Return predictions of an answer, right ones and wrong ones."""
    middle = len(answer) // 2
    changed = [(answer[middle] + 1) % 199]
    return {
        "right": list(answer),
        "too short": list(answer[:3]),
        "other": [(token + 1) % 199 for token in answer],
        "changed": [*answer[:middle], *changed, *answer[middle + 1 :]],
        "longer": [*answer[:middle], *changed * 5, *answer[middle:]],
        "shorter": [*answer[: middle - 2], *answer[middle:]],
    }


@pytest.mark.parametrize("place", range(len(WISHES)))
def test_answers_are_the_same_with_predictions(model: PreTrainedModel, plain: list[RequestOutput], place: int) -> None:
    llm = LLM(model, PREDICTING)
    poison(llm)
    expected = plain[place]
    counts: dict[str, tuple[int, int]] = {}
    for name, prediction in predictions_of(expected.completions[-1].token_ids).items():
        (request,) = llm.submit([PROMPTS[place]], WISHES[place], Intent(prediction=tuple(prediction)))
        records = []
        while llm.core.has_work:
            records.append(llm.step())
            llm.core.space.check()
        output = llm.output(request)
        assert [each.token_ids for each in output.completions] == [each.token_ids for each in expected.completions]
        assert [each.finish_reason for each in output.completions] == [
            each.finish_reason for each in expected.completions
        ]
        counts[name] = output.num_drafted_tokens, output.num_accepted_tokens
        assert sum(record.num_drafted for record in records) == output.num_drafted_tokens
        assert sum(record.num_accepted for record in records) == output.num_accepted_tokens
    if WISHES[place].n > 1:
        return
    drafted, accepted = counts["right"]
    assert drafted == accepted >= NUM_NEW * 3 // 4
    assert counts["other"] == (0, 0)
    edited = [counts[name] for name in ("changed", "longer", "shorter")]
    assert all(drafted >= accepted > NUM_NEW // 3 for drafted, accepted in edited)
    assert any(drafted > accepted for drafted, accepted in edited)


def test_requests_without_predictions_are_guessed_by_lookup(model: PreTrainedModel, plain: list[RequestOutput]) -> None:
    llm = LLM(model, replace(PREDICTING, speculation=PromptLookup(num_tokens=2)))
    prompt, wrong = [5, 9] * 12, Intent(prediction=(1,))
    with_prediction, without = llm.generate([prompt, prompt], WISHES[0], [wrong, Intent()])
    assert with_prediction.token_ids == without.token_ids
    assert with_prediction.num_drafted_tokens <= 1
    assert without.num_drafted_tokens > 1
    (unused,) = LLM(model, replace(PREDICTING, predicted_tokens=0)).generate(
        [PROMPTS[0]], WISHES[0], Intent(prediction=plain[0].token_ids)
    )
    assert (unused.token_ids, unused.num_drafted_tokens) == (plain[0].token_ids, 0)


@pytest.mark.parametrize(("speculation", "most"), [(None, 0), (PromptLookup(num_tokens=2), 2)])
def test_recurrent_layers_guess_no_more_than_they_have_states(speculation: PromptLookup | None, most: int) -> None:
    model = make_model("lfm2")
    config: EngineConfig = replace(PREDICTING, speculation=speculation)
    (plain,) = LLM(model, replace(config, predicted_tokens=0, speculation=None)).generate([PROMPTS[0]], WISHES[0])
    llm = LLM(model, config)
    (request,) = llm.submit([PROMPTS[0]], WISHES[0], Intent(prediction=plain.token_ids))
    drafted = []
    while llm.core.has_work:
        drafted.append(llm.step().num_drafted)
    assert llm.output(request).token_ids == plain.token_ids
    assert max(drafted) == most


@pytest.mark.parametrize("prediction", ["text", (1.5,), (2**40,), ((1,),), None])
def test_a_prediction_that_is_no_token_ids_is_refused(prediction: Any) -> None:  # noqa: ANN401 - whatever it is
    with pytest.raises(RequestError, match="prediction must be token ids"):
        Intent(prediction=prediction)


@pytest.mark.parametrize("token", [-1, 199])
def test_a_prediction_beyond_the_vocabulary_is_refused(model: PreTrainedModel, token: int) -> None:
    with pytest.raises(RequestError, match="0 to 198"):
        LLM(model, PREDICTING).submit([PROMPTS[0]], WISHES[0], Intent(prediction=(1, token)))


def test_a_fork_predicts_nothing() -> None:
    assert Intent(prediction=(1, 2), priority=3).for_fork(5) == Intent(priority=3)


def guessed(prediction: list[int], answer: list[int]) -> list[int] | None:
    """Return what follows an answer in a prediction; None where the place is lost. Written from the rule."""
    place: int | None = 0
    last = 0
    for num in range(1, len(answer) + 1):
        if place is not None and prediction[place : place + 1] == [answer[num - 1]]:
            place += 1
            continue
        last = last if place is None else place
        place = None
        tail = answer[:num][-NUM_MATCHED:]
        if len(tail) == NUM_MATCHED:
            ends = [
                end for end in range(NUM_MATCHED, len(prediction) + 1) if prediction[end - NUM_MATCHED : end] == tail
            ]
            place = next((end for end in ends if end > last), ends[0] if ends else None)
    return None if place is None else prediction[place:]


@given(LETTERS, LETTERS, st.integers(1, 5))
def test_a_place_follows_the_answer(prediction: list[int], answer: list[int], most: int) -> None:
    text = PredictedText(prediction)
    for num in range(len(answer) + 1):
        found = text.propose(answer[:num], most).tolist()
        assert found == (guessed(prediction, answer[:num]) or [])[:most]
    assert PredictedText(prediction).propose([], most).tolist() == text.propose([], most).tolist()
