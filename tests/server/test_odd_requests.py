"""Requests that only an attacker or a broken client sends: each is refused, quickly, and leaves nothing behind."""

from typing import Any, Final

import httpx
import pytest

from tests.server.conftest import Running
from tests.server.serving import call_text, local_engine, tool

USER: Final = {"role": "user", "content": "hello"}
LOOP: Final = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DEEP: Final = '{"a":' + "[" * 1500


def calling(arguments: str) -> list[dict[str, Any]]:
    """Make a conversation with a call of these arguments."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x", "tool_call_id": "1"}]


def many(mark: str, count: int) -> list[dict[str, Any]]:
    """Make a message of many marked parts."""
    value = {"type": "ephemeral"} if mark == "cache_control" else {"mode": "explicit"}
    return [{"role": "user", "content": [{"type": "text", "text": "a", mark: value} for _ in range(count)]}]


CASES: Final[list[tuple[str, dict[str, Any], int]]] = [
    ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"chat_template": LOOP}}, 400),
    ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"chat_template": LOOP}}, 400),
    ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, 400),
    ("/v1/chat/completions", {"messages": [USER], "add_generation_prompt": False}, 200),
    ("/v1/chat/completions", {"messages": calling(DEEP)}, 200),
    ("/v1/chat/completions", {"messages": calling('{"a": "\\ud800"}')}, 200),
    ("/v1/chat/completions", {"messages": [1] * 100_000}, 400),
    ("/v1/completions", {"prompt": [-1] * 100_000}, 400),
    ("/v1/completions", {"prompt": "x" * 10_000_000}, 400),
    ("/tokenize", {"prompt": "x" * 10_000_000}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 10_000_000}]}, 400),
    ("/v1/chat/completions", {"messages": many("prompt_cache_breakpoint", 2000)}, 400),
    ("/v1/messages", {"messages": many("cache_control", 30_000)}, 400),
    ("/v1/messages", {"messages": [USER], "tools": [{"name": "f", "input_schema": {}, "content": [1]}]}, 200),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "content": [{"type": []}]}]}]},
        200,
    ),
]


@pytest.mark.parametrize(("path", "body", "status"), CASES)
def test_no_body_is_a_fault_of_the_server(path: str, body: dict[str, Any], status: int, server: Running) -> None:
    answer = httpx.post(f"{server.url}{path}", json={"model": "small", "max_tokens": 4, **body}, timeout=60)
    assert answer.status_code == status, answer.text[:500]
    assert local_engine(server.service).llm.core.space.num_live_blocks() == 0


def test_a_developer_is_a_system_to_templates(server: Running) -> None:
    def count(role: str) -> int:
        body = {"messages": [{"role": role, "content": "Answer in French."}, USER]}
        return int(httpx.post(f"{server.url}/tokenize", json=body).json()["count"])

    assert count("developer") == count("system")


def test_text_behind_a_stop_text_is_not_in_the_next_turn(server: Running) -> None:
    server.script.write("stop here please", "Hello.\nUser: and so on")
    ask = [{"role": "user", "content": "stop here please"}]
    body: dict[str, Any] = {"model": "small", "messages": ask, "stop": ["User:"]}
    first = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert first["content"] == "Hello.\n"
    tokens = httpx.post(f"{server.url}/tokenize", json={"messages": [*ask, first, USER]}).json()["tokens"]
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "User:" not in text


def test_gauges_fall_when_clients_leave(server: Running) -> None:
    body = {"model": "small", "messages": [USER], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(6)]
        assert "vllm:num_requests_running" in httpx.get(f"{server.url}/metrics").text
    while local_engine(server.service).llm.core.has_work:
        httpx.get(f"{server.url}/health")
    text = httpx.get(f"{server.url}/metrics").text
    running = [
        line
        for line in text.splitlines()
        if line.startswith(("vllm:num_requests_running{", "vllm:kv_cache_usage_perc{"))
    ]
    assert [float(line.rpartition(" ")[2]) for line in running] == [0.0, 0.0]


def test_what_clients_would_meet_again_is_not_asked_again(server: Running) -> None:
    body = {"model": "small", "messages": [USER], "deadline_s": 1e-6}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 504
    assert answer.headers["x-should-retry"] == "false"


def test_an_explanation_is_streamed_without_usage(server: Running) -> None:
    server.script.write("explain in a stream", call_text("f", {}))
    ask = [{"role": "user", "content": "explain in a stream"}]
    body = {"model": "small", "messages": ask, "stream": True, "explain": True, "tools": [tool("f")]}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert "cache_explanation" in lines[-1]
    assert '"usage"' not in lines[-1]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", {"messages": [USER], "stop": ["a"] * 17}, "at most 16 items"),
        ("/v1/chat/completions", {"messages": [USER], "stop": 5}, "stop"),
        ("/v1/completions", {"prompt": [-1]}, "greater than or equal to 0"),
        ("/v1/completions", {"prompt": [1, 2**31]}, "less than 2147483648"),
    ],
)
def test_a_field_of_several_types_is_refused_for_what_is_wrong_with_the_one_sent(
    path: str, body: dict[str, Any], told: str, server: Running
) -> None:
    answer = httpx.post(f"{server.url}{path}", json={"model": "small", "max_tokens": 4, **body}, timeout=60)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
