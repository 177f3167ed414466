"""Responses, asked by OpenAI's own client with strict types."""

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import openai
import pytest
from openai.types.responses import Response

from pagedkv.server import ApiError, Caller, Served
from pagedkv.server.openai.response_items import ResponseTools
from pagedkv.server.openai.responses import StoredResponses
from tests.server.conftest import Running
from tests.server.serving import call_text

Client: TypeAlias = Any
"""OpenAI's, whose overloads know no dictionaries of fields."""

BLOCK_SIZE = 16
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
ANSWER = "<think>hm</think>Sun. " + call_text("weather", {"city": "Ulm"})


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Client]:
    """Give the official client, which checks each answer's types."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(client: Client, given: object, **more: Any) -> Response:  # noqa: ANN401
    """Ask for a whole response."""
    response: Response = client.responses.create(model="small", input=given, **more)
    return response


def without_ids(response: Response) -> list[dict[str, Any]]:
    """Return the output without what is new in each answer."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]


def test_an_answer_is_whole_and_ends(server: Running, client: Client) -> None:
    server.script.write("respond to me", "Hello, wörld 🙂!")
    response = ask(client, "respond to me", instructions="Be kind.", metadata={"a": "b"})
    assert response.output_text == "Hello, wörld 🙂!"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.id.startswith("resp_")
    assert response.usage is not None
    assert response.usage.output_tokens == len("Hello, wörld 🙂!".encode()) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert (
        response.usage.input_tokens_details.cache_write_tokens == response.usage.input_tokens // BLOCK_SIZE * BLOCK_SIZE
    )
    again = ask(
        client,
        [{"role": "user", "content": [{"type": "input_text", "text": "respond to me"}]}],
        instructions="Be kind.",
    )
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == (again.usage.input_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_the_length_ends_an_answer(server: Running, client: Client) -> None:
    server.script.write("respond at length", "abcdefgh")
    response = ask(client, "respond at length", max_output_tokens=3)
    assert (response.output_text, response.status) == ("abc", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    events: list[Any] = list(
        client.responses.create(model="small", input="respond at length", max_output_tokens=3, stream=True)
    )
    assert events[-1].type == "response.incomplete"


def test_a_stream_is_the_whole_answer_in_pieces(server: Running, client: Client) -> None:
    server.script.write("respond with all", ANSWER)
    whole = ask(client, "respond with all", tools=[WEATHER])
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Ulm"}]
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == len("hm")
    events: list[Any] = list(
        client.responses.create(model="small", input="respond with all", tools=[WEATHER], stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    runs = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert runs == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call,
        "completed",
    ]
    last = events[-1]
    assert last.type == "response.completed"
    assert without_ids(last.response) == without_ids(whole)
    assert last.response.usage is not None
    assert last.response.usage.input_tokens == whole.usage.input_tokens
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in last.response.output]


def test_the_client_puts_a_stream_together(server: Running, client: Client) -> None:
    server.script.write("respond in pieces", "Some words.")
    with client.responses.stream(model="small", input="respond in pieces") as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == "Some words."


def test_a_stored_response_is_continued_and_hits(server: Running, client: Client) -> None:
    server.script.write("respond for Kiel", "<think>" + "so " * 8 + "</think>" + call_text("weather", {"city": "Kiel"}))
    first = ask(client, "respond for Kiel", tools=[WEATHER], instructions="Be brief.")
    (call,) = (item for item in first.output if item.type == "function_call")
    del server.script.answers["respond for Kiel"]
    server.script.write("hail hail", "Stay in.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "hail " * 9}
    settings: dict[str, Any] = {"tools": [WEATHER], "instructions": "Be brief."}
    stored = ask(client, [result], previous_response_id=first.id, **settings)
    items = [{"role": "user", "content": "respond for Kiel"}, *(item.to_dict() for item in first.output), result]
    sent = ask(client, items, store=False, **settings)
    assert first.usage is not None
    computed = first.usage.total_tokens - 2
    for second in (stored, sent):
        assert second.output_text == "Stay in."
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens >= computed // BLOCK_SIZE * BLOCK_SIZE
    assert stored.usage is not None
    assert sent.usage is not None
    assert stored.usage.input_tokens == sent.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match=sent.id):
        ask(client, "more", previous_response_id=sent.id)


def test_text_around_a_call_is_one_answer(server: Running, client: Client) -> None:
    server.script.write("respond around", "Before. " + call_text("weather", {"city": "Ulm"}) + "After.")
    first = ask(client, "respond around", tools=[WEATHER])
    assert [item.type for item in first.output] == ["message", "function_call", "message"]
    second = ask(client, "and then", previous_response_id=first.id, tools=[WEATHER], max_output_tokens=2)
    assert second.previous_response_id == first.id


def test_an_answer_keeps_to_a_schema(client: Client) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response = ask(client, "any number at all", text=text, max_output_tokens=200)
    assert json.loads(response.output_text)["n"] in {1, 2}


def test_a_forced_call_is_one(client: Client) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    paint = {**WEATHER, "name": "paint", "parameters": parameters}
    response = ask(client, "unwritten", tools=[paint], tool_choice={"type": "function", "name": "paint"})
    (item,) = response.output
    assert item.type == "function_call"
    assert (item.name, json.loads(item.arguments)) == ("paint", {"a": 1})


SEARCH: dict[str, Any] = {"type": "web_search"}
GROUP: dict[str, Any] = {"type": "namespace", "name": "sky", "description": "", "tools": [WEATHER]}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
PATCHED = 'line "one"\nline é𝄞\\n'


def test_calls_of_grouped_and_custom_tools_are_told_as_the_client_names_them(server: Running, client: Client) -> None:
    calls = call_text("sky__weather", {"city": "Ulm"}) + call_text("apply_patch", {"input": PATCHED})
    server.script.write("change the files", calls)
    given = {"tools": [SEARCH, GROUP, PATCH]}
    response = ask(client, "change the files", **given)
    calls_made: list[Any] = list(response.output)  # the client's type is a union of dozens
    grouped, custom = calls_made
    assert grouped.type == "function_call"
    assert (grouped.name, grouped.to_dict()["namespace"]) == ("weather", "sky")
    assert json.loads(grouped.arguments) == {"city": "Ulm"}
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", PATCHED)
    events = list(client.responses.create(model="small", input="change the files", stream=True, **given))
    texts = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert len(texts) > 3
    assert "".join(texts) == PATCHED
    assert [event.input for event in events if event.type == "response.custom_tool_call_input.done"] == [PATCHED]
    again = [{"role": "user", "content": "change the files"}, *(each.to_dict() for each in response.output)]
    outputs = [
        {"type": "function_call_output", "call_id": grouped.call_id, "output": "sun"},
        {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "done"},
    ]
    next_turn = ask(client, [*again, *outputs], **given)
    assert next_turn.usage is not None
    assert response.usage is not None
    first = response.usage.input_tokens + response.usage.output_tokens
    assert next_turn.usage.input_tokens_details.cached_tokens >= first // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE


def test_the_model_sees_functions_and_the_grammar(client: Client) -> None:
    tools = ResponseTools([SEARCH, WEATHER, GROUP, PATCH])
    assert [each["function"]["name"] for each in tools.functions] == ["weather", "sky__weather", "apply_patch"]
    assert "The text follows this lark grammar:\nstart: /.+/" in tools.functions[-1]["function"]["description"]
    assert tools.choice({"type": "custom", "name": "apply_patch"}) == {"type": "function", "name": "apply_patch"}
    assert tools.choice({"type": "function", "name": "weather"}) == {"type": "function", "name": "weather"}
    assert ResponseTools([GROUP]).choice({"type": "function", "name": "weather"}) == {
        "type": "function",
        "name": "sky__weather",
    }
    response = ask(
        client, "forced", tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"}, max_output_tokens=200
    )
    assert response.output[0].type == "custom_tool_call"


def test_a_stored_response_is_read_and_deleted_by_its_tenant(client: Client, server: Running) -> None:
    server.script.write("keep this", "kept")
    response = ask(client, "keep this")
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    with pytest.raises(openai.BadRequestError, match="in the background can be cancelled"):
        client.responses.cancel(response.id)
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            call(response.id)
    stored, ours, others = StoredResponses(), Caller("a"), Caller("b")
    stored.keep(ours, [], {"id": "resp_1"})
    with pytest.raises(ApiError, match="there is no response"):
        stored.find(others, "resp_1")
    with pytest.raises(ApiError, match="there is no response"):
        stored.delete(others, "resp_1")
    assert stored.find(ours, "resp_1").response == {"id": "resp_1"}


def test_stored_responses_are_bounded() -> None:
    stored, caller = StoredResponses(1000), Caller(None)
    for number in range(50):
        stored.keep(caller, [{"role": "user", "content": "x" * 100}], {"id": f"resp_{number}"})
    assert stored.find(caller, "resp_49").messages
    with pytest.raises(ApiError):
        stored.find(caller, "resp_40")
    stored.delete(caller, "resp_49")
    stored.keep(caller, [], {"id": "resp_x"})
    assert stored.find(caller, "resp_48").messages


def test_the_input_is_counted(client: Client) -> None:
    given = {"model": "small", "input": "count me", "instructions": "Be brief.", "tools": [WEATHER, GROUP]}
    counted = client.responses.input_tokens.count(**given)
    response = ask(client, "count me", instructions="Be brief.", tools=[WEATHER, GROUP], max_output_tokens=1)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens > 20


def test_log_probabilities_are_those_of_the_text(server: Running, client: Client) -> None:
    server.script.write("think of é", "<think>é é</think>é x" + call_text("weather", {"city": "é x"}))
    given = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [WEATHER]}
    response = ask(client, "think of é", **given)
    assert response.top_logprobs == 2
    parts: list[Any] = [part for item in response.output if item.type == "message" for part in item.content]
    (part,) = parts
    assert b"".join(bytes(each.bytes) for each in part.logprobs) == "é x".encode()
    assert [len(each.top_logprobs) for each in part.logprobs] == [2] * 4
    events = list(client.responses.create(model="small", input="think of é", stream=True, **given))
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [each.model_dump() for delta in deltas for each in delta.logprobs]
    assert streamed == [each.model_dump() for each in done.logprobs]
    for delta in deltas:
        assert b"".join(bytes(each.bytes) for each in delta.logprobs) == delta.delta.encode()
    assert [each.logprob for each in done.logprobs] == pytest.approx([each.logprob for each in part.logprobs], abs=1e-4)


def test_breakpoints_become_leases(server: Running, client: Client) -> None:
    server.script.write("respond and keep", "yes")
    head, text = 1 + len("user\n"), "respond and keep " * 9
    marked = {"type": "input_text", "text": "q" * 50, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    seen: list[Served] = []
    server.service.on_served.append(seen.append)
    try:
        items = [{"role": "user", "content": [marked, {"type": "input_text", "text": text}]}]
        explicit = ask(client, items, prompt_cache_options={"mode": "explicit"}, prompt_cache_key="k")
        implicit = ask(client, items, prompt_cache_options={"ttl": "30m"})
        plain = ask(client, text)
        chat = [{"role": "user", "content": [{**marked, "type": "text"}, {"type": "text", "text": text}]}]
        client.chat.completions.create(model="small", messages=chat, max_tokens=1)
    finally:
        server.service.on_served.remove(seen.append)
    assert explicit.prompt_cache_options is not None
    assert explicit.prompt_cache_options.to_dict() == {"mode": "explicit", "ttl": "30m"}
    assert explicit.prompt_cache_key == "k"
    assert plain.prompt_cache_options is None
    assert implicit.usage is not None
    num_prompt = implicit.usage.input_tokens
    places = [[(each.num_tokens, each.keep_for_s) for each in served.request.hints.breakpoints] for served in seen]
    inner = (head + 50, 43_200.0)
    assert places == [[inner], [inner, (num_prompt, 1800.0)], [], [inner]]
    leased = [served.outputs[0].breakpoint_tokens for served in seen]
    whole = inner[0] // BLOCK_SIZE * BLOCK_SIZE
    assert [tokens[:1] for tokens in leased] == [(whole,), (whole,), (), (whole,)]
    with pytest.raises(openai.BadRequestError, match="prompt_cache_breakpoint"):
        ask(client, [{"role": "user", "content": [{**marked, "prompt_cache_breakpoint": {"mode": "x"}}]}])


@pytest.mark.parametrize(
    ("more", "kind", "told"),
    [
        ({"model": "other"}, openai.NotFoundError, "other"),
        ({"input": []}, openai.BadRequestError, "input is empty"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, openai.BadRequestError, "input is empty"),
        ({"input": [{"role": "robot", "content": "x"}]}, openai.BadRequestError, "role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, openai.BadRequestError, "item_reference"),
        ({"input": [{"type": "function_call", "call_id": "x", "arguments": ""}]}, openai.BadRequestError, "name"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            openai.BadRequestError,
            "images",
        ),
        ({"input": [{"role": ["user"], "content": "x"}]}, openai.BadRequestError, "role"),
        ({"input": [{"role": "user", "content": [{"type": ["x"]}]}]}, openai.BadRequestError, "input_text"),
        ({"tools": [{"type": "function", "name": "x", "parameters": [1]}]}, openai.BadRequestError, "schema"),
        ({"tools": [{"type": "crystal_ball"}]}, openai.BadRequestError, "crystal_ball"),
        ({"tools": [{"type": "custom"}]}, openai.BadRequestError, "must have a name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, openai.BadRequestError, "no tools"),
        ({"tool_choice": {"type": "web_search"}}, openai.BadRequestError, "of type function or custom"),
        ({"background": True}, openai.BadRequestError, "background"),
        ({"conversation": "conv_1"}, openai.BadRequestError, "conversations"),
        ({"prompt": {"id": "x"}}, openai.BadRequestError, "prompts"),
        ({"previous_response_id": "resp_none"}, openai.NotFoundError, "resp_none"),
        ({"tool_choice": "required"}, openai.BadRequestError, "no tools"),
        ({"text": {"format": {"type": "yaml"}}}, openai.BadRequestError, "format"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"top_logprobs": 21}, openai.BadRequestError, "top_logprobs"),
    ],
)
def test_what_cannot_be_served_is_refused(
    more: dict[str, Any], kind: type[Exception], told: str, client: Client
) -> None:
    with pytest.raises(kind, match=told):
        client.responses.create(**{"model": "small", "input": "x", "max_output_tokens": 1, **more})
