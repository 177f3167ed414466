"""Predicted outputs of chat completions: the same answer, and usage that is the engine's own count."""

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import openai
import pytest
from openai.types import CompletionUsage

from pagedkv.engine import StepRecord
from pagedkv.server.service import Served
from tests.server.conftest import Running

Client: TypeAlias = Any
"""OpenAI's, whose overloads know no dictionaries of fields."""

CODE: Final = "def area(width, height):\n    return width * height\n"
EDITED: Final = "def area(width, depth):\n    return width * depth\n"


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Client]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture
def counts(server: Running) -> Iterator[list[tuple[int, int]]]:
    """Count the guesses of steps, and of requests as their outputs have them: pairs of all and of right ones."""
    told = [(0, 0), (0, 0)]

    def stepped(record: StepRecord) -> None:
        told[0] = told[0][0] + record.num_drafted, told[0][1] + record.num_accepted

    def served(request: Served) -> None:
        for output in request.outputs:
            told[1] = told[1][0] + output.num_drafted_tokens, told[1][1] + output.num_accepted_tokens

    server.service.on_step.append(stepped)
    server.service.on_served.append(served)
    yield told
    server.service.on_step.remove(stepped)
    server.service.on_served.remove(served)


def predicting(content: object, **more: object) -> dict[str, Any]:
    """Make a request with a prediction."""
    return {
        "model": "small",
        "messages": [{"role": "user", "content": "rename the height"}],
        "prediction": {"type": "content", "content": content},
        **more,
    }


def guesses(usage: CompletionUsage) -> tuple[int, int]:
    """Return the guesses that usage has: all and right ones."""
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None
    return details.accepted_prediction_tokens + details.rejected_prediction_tokens, details.accepted_prediction_tokens


@pytest.mark.parametrize("content", [CODE, [{"type": "text", "text": CODE}]], ids=["text", "parts"])
def test_a_predicted_answer_is_the_same_and_its_guesses_are_counted(
    content: object, server: Running, client: Client, counts: list[tuple[int, int]]
) -> None:
    server.script.write("rename the height", EDITED)
    asked = predicting(content)
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == EDITED
    assert answer.usage.completion_tokens == len(EDITED) + 1
    num_drafted, num_accepted = guesses(answer.usage)
    assert num_drafted > num_accepted > len(EDITED) // 2
    *_, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert guesses(last.usage) == (num_drafted, num_accepted)
    assert counts == [(2 * num_drafted, 2 * num_accepted)] * 2


def test_drawn_answers_are_the_same_with_a_prediction(client: Client, counts: list[tuple[int, int]]) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "nothing is written"}], "seed": 3, "n": 2}
    plain = client.chat.completions.create(**body, max_tokens=30)
    assert plain.usage.completion_tokens_details is None
    assert counts == [(0, 0)] * 2
    text = plain.choices[1].message.content
    asked = {**body, "max_tokens": 30, "prediction": {"type": "content", "content": text}}
    predicted = client.chat.completions.create(**asked)
    assert [each.message.content for each in predicted.choices] == [each.message.content for each in plain.choices]
    assert counts == [guesses(predicted.usage)] * 2
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in plain.choices:
        deltas = [each.delta.content or "" for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(deltas) == choice.message.content


def test_nothing_is_guessed_while_several_answers_go_on(
    server: Running, client: Client, counts: list[tuple[int, int]]
) -> None:
    server.script.write("rename the height", EDITED)
    answer = client.chat.completions.create(**predicting(CODE, n=3))
    assert [each.message.content for each in answer.choices] == [EDITED] * 3
    assert counts == [guesses(answer.usage)] * 2 == [(0, 0)] * 2


@pytest.mark.parametrize(
    "prediction",
    [
        {},
        {"type": "content"},
        {"type": "content", "content": None},
        {"type": "content", "content": [1]},
        {"type": "content", "content": [{"type": "image_url"}]},
        {"type": "other", "content": "x"},
        {"type": "content", "content": "x" * 100_000},
    ],
)
def test_a_prediction_that_is_none_is_refused(prediction: object, client: Client) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**{**predicting(""), "prediction": prediction})


def test_an_empty_prediction_is_none(server: Running, client: Client) -> None:
    server.script.write("rename the height", EDITED)
    answer = client.chat.completions.create(**predicting(""))
    assert answer.choices[0].message.content == EDITED
    assert answer.usage.completion_tokens_details is None
