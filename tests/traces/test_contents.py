"""The content of a log's prompts is understood or unknown, and fits the lengths beside it: it is never invented."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv.errors import TraceError
from pagedkv.planner.traces.formats.csv_rows import parse_columns
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request

BLOCK_SIZE = 16
NUM_PROMPTS, NUM_TOKENS = 10, 500
FIELDS = "arrival=ts,input=n_in,output=n_out,prompt=ask"

SHAPES: dict[str, Callable[[str, str], Any]] = {
    "OpenAI": lambda role, text: {"role": role, "content": text},
    "text": lambda role, text: {"role": role, "text": text},
    "value": lambda role, text: {"role": role, "value": text},
    "Cohere": lambda role, text: {"role": role.upper(), "message": text},
    "ShareGPT": lambda role, text: {"from": "human" if role == "user" else "gpt", "value": text},
    "LangChain": lambda role, text: {"type": "human" if role == "user" else "ai", "data": {"content": text}},
    "a LangChain constructor": lambda role, text: {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain", "schema", "messages", "HumanMessage" if role == "user" else "AIMessageChunk"],
        "kwargs": {"content": text},
    },
    "nested": lambda role, text: {"message": {"role": role, "content": [{"type": "text", "text": text}]}},
    "a role outside": lambda role, text: {"role": role, "message": {"content": text}},
    "OpenInference, flat": lambda role, text: {"message.role": role, "message.content": text},
    "OpenInference, nested": lambda role, text: {
        "message": {"role": role, "contents": [{"message_content": {"type": "text", "text": text}}]}
    },
    "OpenInference, flat contents": lambda role, text: {
        "message.role": role,
        "message.contents": [{"message_content.type": "text", "message_content.text": text}],
    },
    "Gemini": lambda role, text: {"role": "user" if role == "user" else "model", "parts": [{"text": text}]},
    "a pair": lambda role, text: [role, text],
}


def words(seed: int, num: int) -> str:
    return " ".join(f"w{number:05d}" for number in random.Random(seed).sample(range(99_999), num))


def read(path: Path, rows: list[Any], **options: Any) -> tuple[list[Request], str, list[str]]:  # noqa: ANN401 - as typed
    (path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with TraceReader(path / "log.jsonl", **options) as trace:
        requests = list(trace)
        return requests, trace.recognised, trace.notes


def num_blocks(requests: list[Request]) -> tuple[int, int]:
    """Count the full blocks of all prompts: those with distinct prefixes, and all."""
    prefixes = [
        request.prompt_token_ids[: BLOCK_SIZE * (place + 1)].tobytes()
        for request in requests
        if request.prompt_token_ids is not None
        for place in range(request.input_length // BLOCK_SIZE)
    ]
    return len(set(prefixes)), len(prefixes)


def row(number: int, messages: list[Any], num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    usage = {"prompt_tokens": num_tokens, "completion_tokens": 10}
    return {"timestamp": 1772355600 + number, "messages": messages, "usage": usage}


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_that_differ_share_nothing_whatever_their_keys(tmp_path: Path, shape: str) -> None:
    rows = [row(number, [SHAPES[shape]("user", words(number, 280))]) for number in range(NUM_PROMPTS)]
    requests, _, notes = read(tmp_path, rows)
    assert num_blocks(requests) == (310, 310)
    assert not notes


@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_is_the_same_whatever_its_keys(tmp_path: Path, shape: str) -> None:
    turns = [("user", words(1, 100)), ("assistant", words(2, 50)), ("user", words(3, 80))]
    expected, _, _ = read(tmp_path, [row(0, [SHAPES["OpenAI"](*turn) for turn in turns], 520)])
    found, _, _ = read(tmp_path, [row(0, [SHAPES[shape](*turn) for turn in turns], 520)])
    assert found[0].prompt_token_ids is not None
    assert expected[0].prompt_token_ids is not None
    assert found[0].prompt_token_ids.tolist() == expected[0].prompt_token_ids.tolist()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "body": "a text"}], "it has body, role"),
        ([{"role": "user", "content": "a text"}, {"role": "user", "utterance": "another"}], "it has role, utterance"),
        ([{"role": "user", "content": ""}], "its messages have a length and no text"),
        ([{"role": "user", "content": None}], "its messages have a length and no text"),
        ([], "its messages have a length and no text"),
        ([7], "a message is 7"),
    ],
)
def test_a_text_that_is_not_understood_is_unknown_and_told(tmp_path: Path, messages: list[Any], reason: str) -> None:
    requests, recognised, notes = read(tmp_path, [row(number, messages) for number in range(3)])
    assert [request.has_content for request in requests] == [False] * 3
    assert [request.input_length for request in requests] == [NUM_TOKENS] * 3
    assert "content unknown for 3 prompts" in recognised
    assert reason in recognised
    (note,) = notes
    assert note.startswith("the content of 3 of 3 prompts is unknown")


def test_a_text_that_is_not_understood_and_has_no_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"under none of content, .*: it has body, role"):
        read(tmp_path, [{"timestamp": 0, "messages": [{"role": "user", "body": "a text"}]}])


def test_equal_prompts_whose_lengths_differ_are_refused(tmp_path: Path) -> None:
    redacted = [{"role": "user", "content": "[REDACTED]"}]
    with pytest.raises(TraceError, match="what sets them apart was not read"):
        read(tmp_path, [row(number, redacted, 100 + number) for number in range(9)])
    same = [row(number, redacted, 100) for number in range(400)]
    requests, _, _ = read(tmp_path, [*same, row(500, redacted, 101)])
    assert len(requests) == 401, "one in four hundred is no more than a hundredth"


@pytest.mark.parametrize(
    "picture",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 20_000}},
        {"inlineData": {"mimeType": "image/png", "data": "A" * 20_000}},
        {"image": {"format": "png", "source": {"bytes": "A" * 20_000}}},
    ],
)
def test_a_picture_is_not_taken_for_a_long_text(tmp_path: Path, picture: dict[str, Any]) -> None:
    content = [{"text": words(1, 40), "type": "text"}, picture]
    requests, _, notes = read(
        tmp_path, [row(number, [{"role": "user", "content": content}], 900) for number in range(3)]
    )
    assert [request.input_length for request in requests] == [900] * 3
    assert not notes


def fields(number: int, text: object, num_tokens: int) -> dict[str, Any]:
    return {"ts": 1772355600 + number, "n_in": num_tokens, "n_out": 9, "ask": text}


@pytest.mark.parametrize(
    ("length_of", "reason"),
    [
        (lambda text: 100 * len(text) // 1600, "0.25 of the tokens of their texts: they count something else"),
        (len, "they are bytes or characters, not tokens"),
        (lambda text: len(json.dumps({"prompt": text})), "they are bytes or characters, not tokens"),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_lengths_that_are_not_those_of_the_texts_are_refused(
    tmp_path: Path, length_of: Callable[[str], int], reason: str, num_rows: int
) -> None:
    texts = [words(number, 230 + 7 * number) for number in range(num_rows)]
    rows = [fields(number, text, length_of(text)) for number, text in enumerate(texts)]
    with pytest.raises(TraceError, match=reason):
        read(tmp_path, rows, columns=parse_columns(FIELDS, "fields"))


def test_lengths_with_what_the_log_does_not_show_are_read(tmp_path: Path) -> None:
    draw = random.Random(3)
    texts = [words(number, draw.randrange(20, 400)) for number in range(40)]
    rows = [fields(number, text, len(text) // 4 + draw.randrange(9000)) for number, text in enumerate(texts)]
    requests, _, notes = read(tmp_path, rows, columns=parse_columns(FIELDS, "fields"))
    assert [request.input_length for request in requests] == [each["n_in"] for each in rows]
    assert not notes


def test_tokens_of_another_number_than_stated_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="100 tokens are stated for a prompt, and 400 are in the log"):
        read(tmp_path, [fields(0, list(range(400)), 100)], columns=parse_columns(FIELDS, "fields"))


def test_a_prompt_that_its_field_does_not_have_is_unknown(tmp_path: Path) -> None:
    rows = [fields(number, {"words": words(number, 9)}, 90) for number in range(3)]
    requests, recognised, _ = read(tmp_path, rows, columns=parse_columns(FIELDS, "fields"))
    assert [request.has_content for request in requests] == [False] * 3
    assert "content unknown for 3 prompts (ask is no text, messages or tokens" in recognised


@pytest.mark.parametrize(
    ("sums", "reason"),
    [
        ({"date": "2026-03-01", "input_tokens": 406_000, "output_tokens": 9000}, "a date without a time of day"),
        ({"ts": 1772323200, "n_requests": 350, "input_tokens": 406_000, "output_tokens": 9000}, "sum over as many"),
        (
            {"start_time": 1772323200, "end_time": 1772409600, "input_tokens": 406_000, "output_tokens": 9000},
            "a sum over the 86,400 s from start_time to end_time",
        ),
    ],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_sums_over_requests_are_no_requests(tmp_path: Path, sums: dict[str, Any], reason: str, is_named: bool) -> None:  # noqa: FBT001 - a case
    named = f"arrival={next(iter(sums))},input=input_tokens,output=output_tokens"
    options: dict[str, Any] = {"columns": parse_columns(named, "fields")} if is_named else {}
    with pytest.raises(TraceError, match=reason):
        read(tmp_path, [sums], **options)
    (tmp_path / "log.csv").write_text(",".join(sums) + "\n" + ",".join(map(str, sums.values())) + "\n")
    with pytest.raises(TraceError, match=reason), TraceReader(tmp_path / "log.csv", **options) as trace:
        list(trace)
