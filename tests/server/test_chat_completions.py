"""Chat and text completions, asked by OpenAI's own client with strict types."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from pagedkv.server.generation import GenerationRequest
from pagedkv.server.service import Served
from tests.server.conftest import Running
from tests.server.serving import call_text, tool

Client: TypeAlias = Any
"""OpenAI's, whose overloads know no dictionaries of fields."""

WEATHER = tool("weather", city={"type": "string"})


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Client]:
    """Give the official client, which checks each answer's types."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(text: str) -> list[dict[str, str]]:
    """Make a conversation of one message."""
    return [{"role": "user", "content": text}]


def contents(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    """Put the text of one answer together."""
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_an_answer_is_whole_and_ends(server: Running, client: Client) -> None:
    server.script.write("say hello", "Hello, wörld 🙂!")
    answer = client.chat.completions.create(model="small", messages=ask("say hello"))
    (choice,) = answer.choices
    assert choice.message.content == "Hello, wörld 🙂!"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Hello, wörld 🙂!".encode()) + 1


def test_a_stream_is_the_whole_answer_in_pieces(server: Running, client: Client) -> None:
    server.script.write("stream hello", "Hello, wörld 🙂!")
    chunks = list(
        client.chat.completions.create(
            model="small", messages=ask("stream hello"), n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    assert contents(chunks, 0) == contents(chunks, 1) == "Hello, wörld 🙂!"
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    assert with_usage == chunks[-1:]
    assert not chunks[-1].choices
    ends = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted((choice.index, choice.finish_reason) for choice in ends) == [(0, "stop"), (1, "stop")]
    roles = [choice.delta.role for chunk in chunks for choice in chunk.choices if choice.delta.role]
    assert roles == ["assistant", "assistant"]


def test_usage_comes_only_where_it_is_asked_for(server: Running, client: Client) -> None:
    server.script.write("no usage", "yes")
    chunks = client.chat.completions.create(model="small", messages=ask("no usage"), stream=True)
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stop_text_does_not_reach_the_client(server: Running, client: Client) -> None:
    server.script.write("stop there", "one two STOP three")
    whole = client.chat.completions.create(model="small", messages=ask("stop there"), stop=["STOP", "nothing"])
    assert whole.choices[0].message.content == "one two "
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(model="small", messages=ask("stop there"), stop="STOP", stream=True))
    assert contents(chunks) == "one two "


def test_the_length_ends_an_answer(server: Running, client: Client) -> None:
    server.script.write("long one", "abcdefgh")
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        answer = client.chat.completions.create(model="small", messages=ask("long one"), **limit)
        assert answer.choices[0].message.content == "abc"
        assert answer.choices[0].finish_reason == "length"


def test_log_probabilities_belong_to_tokens(server: Running, client: Client) -> None:
    server.script.write("with logprobs", "abc")
    answer = client.chat.completions.create(
        model="small", messages=ask("with logprobs"), max_tokens=3, logprobs=True, top_logprobs=2
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [each.token for each in told.content] == ["a", "b", "c"]
    assert all(len(each.top_logprobs) == 2 for each in told.content)
    without_top = client.chat.completions.create(
        model="small", messages=ask("with logprobs"), max_tokens=3, logprobs=True
    )
    assert without_top.choices[0].logprobs is not None


def test_a_call_is_read_whole_and_streamed(server: Running, client: Client) -> None:
    server.script.write("weather in Ulm", "I look. " + call_text("weather", {"city": "Ulm"}))
    whole = client.chat.completions.create(model="small", messages=ask("weather in Ulm"), tools=[WEATHER])
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Ulm"}
    chunks = list(
        client.chat.completions.create(model="small", messages=ask("weather in Ulm"), tools=[WEATHER], stream=True)
    )
    deltas = [delta for chunk in chunks for choice in chunk.choices for delta in choice.delta.tool_calls or ()]
    assert deltas[0].index == 0
    assert deltas[0].type == "function"
    assert deltas[0].id
    assert [delta.function.name for delta in deltas if delta.function.name] == ["weather"]
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == {"city": "Ulm"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tools_that_may_not_be_called_are_not(server: Running, client: Client) -> None:
    text = call_text("weather", {"city": "Bonn"})  # the template has thoughts, so markers are read
    server.script.write("weather in Bonn", text)
    answer = client.chat.completions.create(
        model="small",
        messages=ask("weather in Bonn"),
        tools=[WEATHER],
        tool_choice="none",
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == text


def test_a_forced_call_is_one(client: Client) -> None:
    answer = client.chat.completions.create(
        model="small",
        messages=ask("nothing is written for this"),
        tools=[tool("paint", colour={"enum": ["red", "green"]})],
        tool_choice={"type": "function", "function": {"name": "paint"}},
        max_tokens=200,
        seed=1,
    )
    (call,) = answer.choices[0].message.tool_calls or [None]
    assert call.type == "function"
    assert json.loads(call.function.arguments)["colour"] in {"red", "green"}


def test_an_answer_keeps_to_a_schema(client: Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model="small",
        messages=ask("any number"),
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        max_tokens=200,
    )
    assert json.loads(answer.choices[0].message.content or "")["n"] in {1, 2}


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"choice": ["C#", "a-b", "x y"]}, r"C#|a-b|x y"),
        ({"regex": r"[ab]{3}\.c", "json": None}, r"[ab]{3}\.c"),
        ({"json": {"enum": [1, 2]}}, r"[12]"),
    ],
)
def test_structured_outputs_are_formats(structured: dict[str, object], pattern: str, client: Client) -> None:
    answer = client.chat.completions.create(
        model="small",
        messages=ask("nothing is written for this"),
        max_tokens=20,
        extra_body={"structured_outputs": structured},
    )
    assert re.fullmatch(pattern, answer.choices[0].message.content)


def test_reasoning_is_told_apart(server: Running, client: Client) -> None:
    server.script.write("think first", "<think>well</think>\n\nsure")
    answer = client.chat.completions.create(model="small", messages=ask("think first"))
    message = answer.choices[0].message
    assert (message.content or "").strip() == "sure"
    assert message.model_extra == {"reasoning": "well"}


def test_the_next_turn_hits_through_the_last_answer(server: Running, client: Client) -> None:
    """Stripped thoughts, and calls that the client writes anew, end a hit elsewhere."""
    answer = "<think>" + "so " * 20 + "</think>" + call_text("weather", {"city": "Köln"})
    server.script.write("weather in Köln", answer)
    first = client.chat.completions.create(model="small", messages=ask("weather in Köln"), tools=[WEATHER])
    (call,) = first.choices[0].message.tool_calls
    arguments = json.dumps(json.loads(call.function.arguments), indent=4)
    message = {
        "role": "assistant",
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
        ],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain " * 10}
    server.script.write("rain rain", "Take a coat.")
    del server.script.answers["weather in Köln"]
    messages = [*ask("weather in Köln"), message, result]
    second = client.chat.completions.create(model="small", messages=messages, tools=[WEATHER])
    assert second.choices[0].message.content == "Take a coat."
    computed = first.usage.prompt_tokens + first.usage.completion_tokens - 1  # the last token is never computed
    assert second.usage.prompt_tokens_details.cached_tokens == computed // 16 * 16


def test_usage_adds_up_to_the_receipts(server: Running, client: Client) -> None:
    server.script.write("count this", "abc")
    text = "count this " * 30
    first, second = (client.chat.completions.create(model="small", messages=ask(text), n=2) for _ in range(2))
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details is not None
    num_prompt = first.usage.prompt_tokens
    assert num_prompt == second.usage.prompt_tokens
    assert first.usage.prompt_tokens_details.model_dump(exclude_none=True) == {
        "cached_tokens": 0,
        "cache_write_tokens": num_prompt // 16 * 16,
    }
    assert second.usage.prompt_tokens_details.cached_tokens == (num_prompt - 1) // 16 * 16
    assert second.usage.prompt_tokens_details.model_dump()["cache_write_tokens"] in {0, 16}


def test_why_a_prompt_missed_is_told(server: Running, client: Client) -> None:
    server.script.write("explain", "a")
    text = "explain " * 20
    client.chat.completions.create(model="small", messages=ask(text))
    changed = text + "and more " * 5
    answer = client.chat.completions.create(model="small", messages=ask(changed), extra_body={"explain": True})
    told = (answer.model_extra or {})["cache_explanation"]
    assert told["num_hit_tokens"] >= len(text) // 16 * 16
    assert told["cause"]


@pytest.mark.parametrize(
    ("more", "kind", "told"),
    [
        ({"model": "other"}, openai.NotFoundError, "other"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"n": 1000}, openai.BadRequestError, "1000 answers"),
        ({"extra_body": {"cache_salt": "x"}}, openai.BadRequestError, "API key"),
        ({"tool_choice": "required"}, openai.BadRequestError, "no tools"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, openai.BadRequestError, "longest sequence"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            openai.BadRequestError,
            "images",
        ),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
        ({"stream_options": {"include_usage": None}, "stream": False}, openai.BadRequestError, "stream_options"),
        ({"extra_body": {"structured_outputs": {"regex": {"1": "x"}}}}, openai.BadRequestError, "a pattern"),
        ({"extra_body": {"structured_outputs": {"grammar": "x"}}}, openai.BadRequestError, "grammar"),
        ({"extra_body": {"structured_outputs": {"json_object": False}}}, openai.BadRequestError, "json_object"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, openai.BadRequestError, "choice"),
        ({"extra_body": {"structured_outputs": {"choice": ["a"], "regex": "a"}}}, openai.BadRequestError, "one"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a"}}, "response_format": {"type": "json_object"}},
            openai.BadRequestError,
            "contradicts",
        ),
        ({"response_format": {"type": "yaml"}}, openai.BadRequestError, "response_format"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, openai.BadRequestError, "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_refused(
    more: dict[str, object], kind: type[Exception], told: str, client: Client
) -> None:
    with pytest.raises(kind, match=told):
        client.chat.completions.create(**{"model": "small", "messages": ask("x"), "max_tokens": 1, **more})


def test_text_is_continued(server: Running, client: Client) -> None:
    server.script.write("once upon", " a time")
    whole = client.completions.create(model="small", prompt=["once upon", "once upon"], n=2, max_tokens=20, logprobs=1)
    assert [choice.text for choice in whole.choices] == [" a time"] * 4
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    # OpenAI's own streams have null for a reason that is not known yet, which its client's types do not allow.
    with openai.OpenAI(base_url=str(client.base_url), api_key="none") as lenient:
        chunks = list(
            lenient.completions.create(model="small", prompt="once upon", stream=True, max_tokens=20, echo=True)
        )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "once upon a time"
    ids = [ord(letter) for letter in "abc"]
    assert client.completions.create(model="small", prompt=ids, max_tokens=1).usage.prompt_tokens == 3


def test_models_are_listed(client: Client) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "pagedkv"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_tokens_and_back(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        told = http.post("/tokenize", json={"model": "small", "prompt": "häuser", "return_token_strs": True}).json()
        assert told["count"] == len("häuser".encode()) == len(told["tokens"]) == len(told["token_strs"])
        assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "häuser"}
        chat = http.post("/tokenize", json={"messages": ask("x")}).json()
        assert chat["count"] > 1
        assert http.post("/tokenize", json={"prompt": "x", "messages": ask("x")}).status_code == 400
        assert http.post("/detokenize", json={"tokens": [100_000]}).status_code == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"messages": "\\ud800"}', b"\xff", b"null"])
def test_a_body_that_is_none_is_refused(body: bytes, server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"


def test_paths_of_health(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        assert [http.get(path).status_code for path in ("/health", "/ready", "/version")] == [200] * 3
        assert http.get("/nothing").status_code == 404
        assert http.get("/v1/completions").status_code == 405


BATCH = "/v1/chat/completions/batch"


def test_several_conversations_are_answered_as_each_by_itself(server: Running) -> None:
    server.script.write("batch of one", "<think>hm</think>first")
    server.script.write("batch of two", "second")
    conversations = [ask("batch of one"), ask("batch of two")]
    wish = {"model": "small", "logprobs": True, "return_token_ids": True}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        alone = [http.post("/v1/chat/completions", json={**wish, "messages": each}).json() for each in conversations]
        answer = http.post(BATCH, json={**wish, "messages": conversations}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, each in zip(answer["choices"], alone, strict=True):
        assert {**choice, "index": 0} == each["choices"][0]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(each["usage"][name] for each in alone)
    thoughts = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thoughts == alone[0]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_turn_after_several_conversations_hits_its_own(server: Running) -> None:
    server.script.write("batched turn one", "an answer that is longer than one block of sixteen tokens")
    server.script.write("batched turn two", "another answer, of which the next turn hits every whole block")
    conversations = [ask("batched turn one"), ask("batched turn two")]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        choices = http.post(BATCH, json={"model": "small", "messages": conversations}).json()["choices"]
        for choice, asked in zip(choices, conversations, strict=True):
            said = {"role": "assistant", "content": choice["message"]["content"]}
            turn = {"model": "small", "messages": [*asked, said, *ask("and?")], "max_tokens": 1}
            usage = http.post("/v1/chat/completions", json=turn).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > len(asked[0]["content"]) + 32


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"stream": True}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 2}, "n"),
        ({"tools": [WEATHER]}, "tools"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": [ask("x")] * 129}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [ask("x"), []]}, "messages.1"),
        ({"messages": [ask("x"), ask("y" * 4000)]}, "messages"),
    ],
)
def test_several_conversations_are_refused_as_one(server: Running, wish: dict[str, object], param: str) -> None:
    body = {"model": "small", "max_tokens": 1, "messages": [ask("x"), ask("y")], **wish}
    refused = httpx.post(f"{server.url}{BATCH}", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    until_s = time.monotonic() + 30
    while server.service.under_way and time.monotonic() < until_s:  # what was accepted ends within a step
        time.sleep(0.05)
    assert not server.service.under_way


def test_several_conversations_end_with_their_client(server: Running) -> None:
    body = {"model": "small", "max_tokens": 1800, "ignore_eos": True, "messages": [ask("left"), ask("alone")]}
    arrived: list[GenerationRequest] = []
    left: list[Served] = []
    server.service.on_arrived.append(arrived.append)
    server.service.on_served.append(left.append)
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}{BATCH}", json=body, timeout=1)
        until_s = time.monotonic() + 30
        while len(left) < 2 and time.monotonic() < until_s:
            time.sleep(0.05)
    finally:
        server.service.on_arrived.remove(arrived.append)
        server.service.on_served.remove(left.append)
    assert len(arrived) == 2
    assert [each.has_left for each in left] == [True, True]
