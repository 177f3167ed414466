"""What the official clients do beyond single calls: streams with state, parsed answers, runners of tools, retries."""

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import anthropic
import openai
import pytest
from anthropic import beta_tool
from openai.lib.responses_tool_runner import RegisteredFunction, ResponsesToolRunner
from pydantic import BaseModel

from pagedkv.errors import QueueFullError
from pagedkv.server.generation import Generation, GenerationRequest
from tests.server.conftest import Running
from tests.server.serving import call_text

Client: TypeAlias = Any
"""OpenAI's or Anthropic's, whose overloads know no dictionaries of fields."""


class Weather(BaseModel):
    """The weather of a city."""

    city: str


class Sum(BaseModel):
    """A number."""

    n: int


ANSWER = "<think>hm</think>I look. " + call_text("Weather", {"city": "Ulm"})
HELD = '{"n": 42}'


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Client]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Running) -> Iterator[Client]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(autouse=True)
def script(server: Running) -> None:
    server.script.answers.clear()
    server.script.write("weather it rains", "Take a coat.")
    server.script.write("helpers weather", ANSWER)
    server.script.write("helpers number", HELD)


def ask(text: str, **more: object) -> dict[str, Any]:
    """Make a request of one message."""
    return {"model": "small", "messages": [{"role": "user", "content": text}], **more}


def test_a_stream_of_chat_completions_gathers_its_answer(client: Client) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    asked = ask("helpers weather", tools=tools, stream_options={"include_usage": True})
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Ulm")
    assert final.choices[0].message.content == "I look. "
    assert final.choices[0].finish_reason == "tool_calls"
    kinds = [event.type for event in events]
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert {"chunk", "content.delta", "content.done", "tool_calls.function.arguments.delta"} <= set(kinds)
    whole = client.chat.completions.create(**ask("helpers weather", tools=tools))
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_chat_completions_are_parsed(client: Client) -> None:
    answer = client.chat.completions.parse(**ask("helpers number"), response_format=Sum)
    assert answer.choices[0].message.parsed == Sum(n=42)
    with client.chat.completions.stream(**ask("helpers number"), response_format=Sum) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Sum(n=42)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**ask("helpers number", max_tokens=3), response_format=Sum)
    called = client.chat.completions.parse(**ask("helpers weather", tools=[openai.pydantic_function_tool(Weather)]))
    assert called.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Ulm")


def test_responses_are_parsed_and_gathered(client: Client) -> None:
    asked = {"model": "small", "input": "helpers number", "text_format": Sum}
    assert client.responses.parse(**asked).output_parsed == Sum(n=42)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_parsed == Sum(n=42)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    tools = [openai.pydantic_function_tool(Weather)["function"]]
    called = client.responses.parse(
        model="small", input="helpers weather", tools=[{"type": "function", **each} for each in tools]
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Ulm"}


@pytest.mark.parametrize("streams", [False, True])
def test_a_runner_of_responses_calls_its_functions(client: Client, *, streams: bool) -> None:
    cities: list[str] = []

    def weather(arguments: Any) -> str:  # noqa: ANN401 - as the runner gives them
        cities.append(arguments["city"])
        return "weather it rains"

    tool: Any = {
        "type": "function",
        "name": "Weather",
        "description": "",
        "parameters": Weather.model_json_schema() | {"additionalProperties": False},
        "strict": True,
    }
    runner = ResponsesToolRunner(functions=[RegisteredFunction(tool, weather)])
    response = runner.run(client, {"model": "small", "input": "helpers weather"}, max_steps=3, stream=streams)
    assert cities == ["Ulm"]
    assert response.output_text == "Take a coat."


def test_a_stream_of_messages_gathers_its_answer(claude: Client) -> None:
    tool = {"name": "Weather", "input_schema": Weather.model_json_schema()}
    with claude.messages.stream(**ask("helpers weather", max_tokens=200, tools=[tool])) as stream:
        assert "".join(stream.text_stream) == "I look. " == stream.get_final_text()
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Ulm"}]


def test_messages_are_parsed(claude: Client) -> None:
    message = claude.messages.parse(**ask("helpers number", max_tokens=50), output_format=Sum)
    assert message.parsed_output == Sum(n=42)
    with claude.messages.stream(**ask("helpers number", max_tokens=50), output_format=Sum) as stream:
        assert stream.get_final_message().parsed_output == Sum(n=42)
    beta = claude.beta.messages.parse(**ask("helpers number", max_tokens=50), output_format=Sum)
    assert beta.parsed_output == Sum(n=42)


@pytest.mark.parametrize("streams", [False, True])
def test_a_runner_of_messages_calls_its_tools(claude: Client, *, streams: bool) -> None:
    cities: list[str] = []

    @beta_tool(name="Weather")
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        cities.append(city)
        return "weather it rains"

    runner = claude.beta.messages.tool_runner(
        **ask("helpers weather", max_tokens=200),
        tools=[weather],
        betas=["token-efficient-tools-2025-02-19"],
        stream=streams,
    )
    messages = [each.get_final_message() if streams else each for each in runner]
    assert cities == ["Ulm"]
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert messages[-1].content[0].text == "Take a coat."


def test_headers_of_betas_change_nothing(claude: Client) -> None:
    asked = ask("helpers weather", max_tokens=200)
    plain = claude.messages.create(**asked)
    beta = claude.beta.messages.create(**asked, betas=["prompt-caching-2024-07-31", "of-some-later-year"])
    assert [block.text for block in plain.content if block.type == "text"] == [
        block.text for block in beta.content if block.type == "text"
    ]
    count = claude.beta.messages.count_tokens(model="small", messages=asked["messages"], betas=["any"])
    assert count.input_tokens == claude.messages.count_tokens(model="small", messages=asked["messages"]).input_tokens


@pytest.fixture
def num_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the engine refuse requests of a full queue, as often as the number says."""
    left = [0]
    begin = server.service.begin

    async def begin_or_refuse(asked: GenerationRequest) -> Generation:
        if left[0]:
            left[0] -= 1
            raise QueueFullError("the queue is full")
        return await begin(asked)

    monkeypatch.setattr(server.service, "begin", begin_or_refuse)
    return left


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("module", [openai, anthropic])
def test_clients_ask_again_when_they_are_told_to(
    module: Any,  # noqa: ANN401 - a client's
    server: Running,
    num_refused: list[int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    streams: bool,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(f"{module.__name__}._base_client.time.sleep", waits.append)
    asked = ask("helpers number", max_tokens=50, stream=streams)
    if module is openai:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2)
        create: Any = client.chat.completions.create
    else:
        create = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=2).messages.create
    num_refused[0] = 2
    answer = create(**asked)
    assert list(answer) if streams else answer.id
    assert num_refused == [0]
    assert len(waits) == 2
    assert all(wait >= 1 for wait in waits)
    num_refused[0] = 3
    with pytest.raises(module.RateLimitError) as caught:
        create(**asked)
    assert caught.value.response.headers["retry-after"] == "1"
