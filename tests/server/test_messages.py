"""Messages, asked by Anthropic's own client with strict types."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from tests.server.conftest import Running
from tests.server.serving import call_text

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    """Give the official client, which checks each answer's types."""
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(client: anthropic.Anthropic, text: object, **more: Any) -> Message:  # noqa: ANN401
    """Ask one question."""
    settings = {"model": "small", "max_tokens": 200, "messages": [{"role": "user", "content": text}], **more}
    message: Message = client.messages.create(**settings)
    return message


def cached(text: str, ttl: str = "5m") -> dict[str, Any]:
    """Make a block of text that is to stay cached."""
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}


def num_prompt_tokens(message: Message) -> int:
    """Add up the tokens of a prompt."""
    usage = message.usage
    assert usage.cache_creation is not None
    created = usage.cache_creation.ephemeral_5m_input_tokens + usage.cache_creation.ephemeral_1h_input_tokens
    assert created == usage.cache_creation_input_tokens
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + created


def test_an_answer_is_whole_and_ends(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("greet me", "Hello, wörld 🙂!")
    message = ask(client, "greet me")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": "Hello, wörld 🙂!"}
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens == len("Hello, wörld 🙂!".encode()) + 1
    count = client.messages.count_tokens(model="small", messages=[{"role": "user", "content": "greet me"}])
    assert num_prompt_tokens(message) == count.input_tokens


def test_a_stream_is_the_whole_answer_in_pieces(server: Running, client: anthropic.Anthropic) -> None:
    answer = "<think>hm</think>Sun. " + call_text("weather", {"city": "Ulm"}) + call_text("weather", {"city": "Bonn"})
    server.script.write("both cities", answer)
    settings: dict[str, Any] = {"model": "small", "max_tokens": 500, "tools": [WEATHER]}
    messages: Any = [{"role": "user", "content": "both cities"}]
    whole = client.messages.create(**settings, messages=messages)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in whole.content if block.type == "tool_use"] == [{"city": "Ulm"}, {"city": "Bonn"}]
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**settings, messages=messages) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    drop = {"id"}
    told = [[block.model_dump(exclude=drop) for block in each.content] for each in (whole, final)]
    for block in told[1]:
        block.pop("parsed_output", None)
    assert told[0] == told[1]
    assert final.stop_reason == "tool_use"
    assert num_prompt_tokens(whole) == sum(
        count or 0
        for count in (
            final.usage.input_tokens,
            final.usage.cache_read_input_tokens,
            final.usage.cache_creation_input_tokens,
        )
    )
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


def test_events_of_a_stream_have_names_and_an_order(server: Running) -> None:
    server.script.write("raw events", "ab")
    body = {"model": "small", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "raw events"}]}
    text = httpx.post(f"{server.url}/v1/messages", json=body).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert '"cache_read_input_tokens":null' not in text


def test_the_end_has_its_reason(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("ends how", "one STOP two")
    stopped = ask(client, "ends how", stop_sequences=["never", "STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert [block.text for block in stopped.content if block.type == "text"] == ["one "]
    greedy = {"temperature": 0, "top_p": 0.5, "top_k": 3}
    cut = ask(client, "ends how", max_tokens=3, metadata={"user_id": "x"}, extra_body=greedy)
    assert cut.stop_reason == "max_tokens"
    assert cut.usage.output_tokens == 3


def test_the_beginning_of_an_answer_is_continued(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("continue me", "fox")
    turns: Any = [{"role": "user", "content": "continue me"}, {"role": "assistant", "content": "The quick"}]
    message = client.messages.create(model="small", max_tokens=9, messages=turns)
    assert [block.text for block in message.content if block.type == "text"] == ["fox"]


def test_a_forced_call_is_one(client: anthropic.Anthropic) -> None:
    paint = {
        "name": "paint",
        "input_schema": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    }
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "paint"}):
        message = ask(client, "nothing is written here", tools=[paint], tool_choice=choice)
        (call,) = message.content
        assert call.type == "tool_use"
        assert call.input["colour"] in {"red", "green"}
        assert message.stop_reason == "tool_use"


def test_reasoning_is_told_apart_without_tools(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("think a bit", "<think>well</think>sure")
    message = ask(client, "think a bit", thinking={"type": "adaptive"})
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "thinking", "thinking": "well", "signature": ""},
        {"type": "text", "text": "sure"},
    ]


def test_the_next_turn_hits_through_the_last_answer(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("weather in Kiel", "<think>" + "so " * 8 + "</think>" + call_text("weather", {"city": "Kiel"}))
    first = ask(client, "weather in Kiel", tools=[WEATHER])
    calls = [block for block in first.content if block.type == "tool_use"]
    del server.script.answers["weather in Kiel"]
    server.script.write("snow snow", "Take a hat.")
    result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "snow " * 9}]}
    turns: Any = [
        {"role": "user", "content": "weather in Kiel"},
        first.to_param(),
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(model="small", max_tokens=200, tools=[WEATHER], messages=turns)  # type: ignore[list-item]
    assert [block.text for block in second.content if block.type == "text"] == ["Take a hat."]
    computed = num_prompt_tokens(first) + first.usage.output_tokens - 2
    assert second.usage.cache_read_input_tokens == computed // BLOCK_SIZE * BLOCK_SIZE


def test_what_is_written_is_plain_without_breakpoints(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("plain words", "yes")
    first, second = (ask(client, "plain words " * 20) for _ in range(2))
    assert first.usage.cache_creation_input_tokens == 0
    assert first.usage.cache_read_input_tokens == 0
    assert num_prompt_tokens(first) == num_prompt_tokens(second)
    assert second.usage.cache_read_input_tokens == (num_prompt_tokens(first) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_what_breakpoints_create_is_told_by_lifetime(server: Running, client: anthropic.Anthropic) -> None:
    """A place is the common prefix of the prompt up to it and of the whole prompt."""
    server.script.write("break here", "yes")
    system, early, late = "Be terse. " * 10, "early " * 30, "late " * 30
    content = [cached(early), {"type": "text", "text": late}]
    message = ask(client, [*content, cached("break here", "5m")], system=[cached(system, "1h")])
    num_prompt = num_prompt_tokens(message)
    usage = message.usage
    assert usage.cache_read_input_tokens == 0
    assert usage.cache_creation is not None
    head = len("<|im_start|>system\n") - len("<|im_start|>") + 1
    num_system = head + len(system.strip()) + 2  # the marker that ends it and a line break
    assert usage.cache_creation.ephemeral_1h_input_tokens - num_system in range(2)  # the next message's first marker
    assert usage.cache_creation_input_tokens == num_prompt // BLOCK_SIZE * BLOCK_SIZE
    again = ask(client, [*content, cached("break here", "5m")], system=[cached(system, "1h")])
    read = (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert again.usage.cache_read_input_tokens == read
    assert again.usage.cache_creation_input_tokens == num_prompt // BLOCK_SIZE * BLOCK_SIZE - read


def test_a_breakpoint_within_a_message_ends_there(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("inner place", "yes")
    first = ask(client, [cached("m" * 50), {"type": "text", "text": "inner place " * 9}])
    head = 1 + len("user\n")
    assert first.usage.cache_creation_input_tokens == head + 50


def test_tools_may_have_a_breakpoint(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("with cached tools", "yes")
    message = ask(client, "with cached tools", tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}}])
    created = message.usage.cache_creation_input_tokens
    assert created
    text = ask(client, "with cached tools", tools=[WEATHER])
    assert created < num_prompt_tokens(text)
    assert text.usage.cache_read_input_tokens == (num_prompt_tokens(text) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_request_may_mark_all_of_itself(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("mark it all", "yes")
    message = ask(client, "mark it all " * 5, cache_control={"type": "ephemeral", "ttl": "1h"})
    assert message.usage.cache_creation is not None
    created = message.usage.cache_creation.ephemeral_1h_input_tokens
    assert created == num_prompt_tokens(message) // BLOCK_SIZE * BLOCK_SIZE


def test_why_a_prompt_missed_is_told(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("diagnose", "yes")
    system, text = "Be brief. " * 10, "diagnose " * 20
    base: dict[str, Any] = {"system": system, "tools": [WEATHER]}
    first = ask(client, text, diagnostics={"previous_message_id": None}, **base)
    assert first.diagnostics is None
    num_left = num_prompt_tokens(first) // BLOCK_SIZE * BLOCK_SIZE

    def reason(text: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        message = ask(client, text, diagnostics={"previous_message_id": first.id}, **{**base, **more})
        if message.diagnostics is None:
            return {}
        assert message.diagnostics.cache_miss_reason is not None
        told = message.diagnostics.cache_miss_reason.model_dump()
        if "cache_missed_input_tokens" in told:
            assert told["cache_missed_input_tokens"] == num_left - (message.usage.cache_read_input_tokens or 0)
        return told

    changed = reason("Now " + text)
    assert changed["type"] == "messages_changed"
    assert changed["cause"] == "changed tokens"
    num_before = num_prompt_tokens(first) - len(text.strip()) - 1 - len("\nassistant\n") - 1
    assert abs(changed["position"] - num_before) <= 1
    assert reason(text, system="Be loud. " * 10)["type"] == "system_changed"
    assert reason(text, tools=[{**WEATHER, "description": "other"}])["type"] == "tools_changed"
    turns = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "diagnose more"},
    ]
    assert reason(text, messages=turns) == {}
    assert reason(text, tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}}]) == {}
    unknown = ask(client, text, diagnostics={"previous_message_id": "msg_none"})
    assert unknown.diagnostics is not None
    assert unknown.diagnostics.cache_miss_reason is not None
    assert unknown.diagnostics.cache_miss_reason.type == "previous_message_not_found"


def test_a_stream_tells_the_reason_at_its_end(server: Running, client: anthropic.Anthropic) -> None:
    server.script.write("streamed reason", "yes")
    first = ask(client, "streamed reason " * 10, diagnostics={"previous_message_id": None})
    events = list(
        client.messages.create(
            model="small",
            max_tokens=9,
            messages=[{"role": "user", "content": "A streamed reason " * 10}],
            diagnostics={"previous_message_id": first.id},
            stream=True,
        )
    )
    begin, end = events[0], events[-2]
    assert begin.type == "message_start"
    assert begin.message.diagnostics is not None
    assert begin.message.diagnostics.cache_miss_reason is None
    assert end.type == "message_delta"
    told = (end.model_extra or {})["diagnostics"]
    assert told["cache_miss_reason"]["type"] == "messages_changed"


@pytest.mark.parametrize(
    ("more", "kind", "told"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "other"),
        ({"extra_body": {"temperature": 1.5}}, anthropic.BadRequestError, "temperature"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "no tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, anthropic.BadRequestError, "name of a tool"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "does not run tools"),
        ({"messages": [{"role": "user", "content": [{"type": ["x"]}]}]}, anthropic.BadRequestError, "block of type"),
        ({"tools": [{"type": ["x"], "name": "x"}]}, anthropic.BadRequestError, "does not run tools"),
        ({"tools": [{"name": "x"}]}, anthropic.BadRequestError, "input_schema"),
        ({"system": [cached("x")] * 5}, anthropic.BadRequestError, "at most 4"),
        ({"system": [{**cached("x"), "cache_control": {"type": "x"}}]}, anthropic.BadRequestError, "ephemeral"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "images",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            anthropic.BadRequestError,
            "documents",
        ),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, anthropic.BadRequestError, "longest sequence"),
        ({"output_config": {"format": {"type": "yaml"}}}, anthropic.BadRequestError, "json_schema"),
    ],
)
def test_what_cannot_be_served_is_refused(
    more: dict[str, Any], kind: type[anthropic.APIStatusError], told: str, client: anthropic.Anthropic
) -> None:
    with pytest.raises(kind, match=told) as caught:
        ask(client, "x", **{"max_tokens": 1, **more})
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"model": "small", "max_tokens": 1, "messages": [{"role": "user", "content": [1]}]}'],
)
def test_a_body_that_is_none_is_refused(body: bytes, server: Running) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = httpx.post(f"{server.url}{path}", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_an_answer_keeps_to_a_schema(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    message = ask(client, "any number", output_config={"format": {"type": "json_schema", "schema": schema}})
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text)["n"] in {1, 2}
