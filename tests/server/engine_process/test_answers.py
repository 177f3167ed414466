"""A server answers alike, wherever its engine runs: every field that reaches the engine crosses to its process."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedkv.contract.spec import GroupSpec
from pagedkv.events import EventFollower, follow
from pagedkv.routing import IndexState, ReplicaIndex
from pagedkv.server.engines import build_engine
from tests.server.engine_process.conftest import CONFIG, Served
from tests.server.test_metrics import numbers

PROMPTS = [
    f"What does the {place} of all the people say of the weather in the places that we have asked for?"
    for place in ("first", "second", "third", "fourth", "fifth", "last")
]
PATIENCE_S = 60.0


def chat(prompt: str, **more: object) -> dict[str, object]:
    return {"model": "small", "messages": [{"role": "user", "content": prompt}], "max_tokens": 12, **more}


KEPT = {
    "token_range_retention_configs": [{"token_end": 32, "priority": 80, "duration_ms": 9000.0}],
    "decode_retention_priority": 90,
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/chat/completions", chat(PROMPTS[0], temperature=0)),
    "streamed": (
        "/v1/chat/completions",
        chat(PROMPTS[1], temperature=0, stream=True, stream_options={"include_usage": True}),
    ),
    "several": ("/v1/chat/completions", chat(PROMPTS[2], n=3, seed=5, temperature=1.0, ignore_eos=True)),
    "scored": ("/v1/chat/completions", chat(PROMPTS[3], logprobs=True, top_logprobs=3, temperature=0)),
    "biased": ("/v1/chat/completions", chat(PROMPTS[3], logit_bias={"9": 100}, frequency_penalty=1.5, temperature=0)),
    "formatted": (
        "/v1/chat/completions",
        chat(PROMPTS[4], temperature=0, response_format={"type": "regex", "regex": "(the|a)( [a-z]+){2}"}),
    ),
    "stopped": ("/v1/completions", {"model": "small", "prompt": PROMPTS[5], "max_tokens": 30, "stop": ["e", "q"]}),
    "prompts": ("/v1/completions", {"model": "small", "prompt": PROMPTS[:3], "max_tokens": 4, "temperature": 0}),
    "messages": (
        "/v1/messages",
        {
            "model": "small",
            "max_tokens": 8,
            "temperature": 0,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": PROMPTS[0], "cache_control": {"type": "ephemeral"}}],
                }
            ],
        },
    ),
    "hinted": ("/v1/chat/completions", chat(PROMPTS[1], temperature=0, kv_cache_retention_config=KEPT)),
    "too long": ("/v1/completions", {"model": "small", "prompt": [5] * 100_000, "max_tokens": 4}),
    "no token": ("/v1/completions", {"model": "small", "prompt": [5, 10**6], "max_tokens": 4}),
    "no schema": ("/v1/chat/completions", chat(PROMPTS[0], response_format={"type": "json_schema"})),
}


def groups_of(folder: Path) -> Sequence[GroupSpec]:
    """Return the KV-cache groups of the model."""
    return build_engine(str(folder), "float32", CONFIG, None)[0].core.space.config.groups


def without_identity(text: str) -> str:
    """Take out what differs from answer to answer: identities and times."""
    text = re.sub(r'"(id|request_id)":"[^"]*"', "", text)
    return re.sub(r'"created":\d+', "", text)


def joined(text: str) -> str:
    """Put the pieces of a stream together: how tokens fall into chunks depends on time."""
    return "".join(re.findall(r'"content":"([^"]*)"', text)) + text[text.rfind('"usage"') :]


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_an_engine_in_the_servers_process(name: str, served: Served, local: str) -> None:
    path, body = REQUESTS[name]
    ours, others = (httpx.post(url + path, json=body, timeout=PATIENCE_S) for url in (served.url, local))
    assert ours.status_code == others.status_code
    assert (ours.status_code == 200) == (" " not in name)
    texts = [without_identity(each.text) for each in (ours, others)]
    if name == "streamed":
        assert "[DONE]" in texts[0]
        texts = [joined(each) for each in texts]
    assert texts[0] == texts[1]


def test_the_next_turn_hits_and_metrics_count_steps(served: Served) -> None:
    before = numbers(httpx.get(f"{served.url}/metrics").text)
    body = chat(PROMPTS[0] + " the", temperature=0)
    for hit in (False, True):
        usage = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()["usage"]
        assert not hit or usage["prompt_tokens_details"]["cached_tokens"] > 60
    after = numbers(httpx.get(f"{served.url}/metrics").text)
    assert after["pagedkv:steps_total"] >= before["pagedkv:steps_total"] + 4
    assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0


def test_a_client_that_leaves_frees_its_blocks(served: Served) -> None:
    body = chat(PROMPTS[0], max_tokens=1500, ignore_eos=True, stream=True)
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
        next(answer.iter_lines())
    until = time.monotonic() + PATIENCE_S
    while numbers(httpx.get(f"{served.url}/metrics").text)["vllm:kv_cache_usage_perc"] > 0:
        assert time.monotonic() < until, "the blocks of a request whose client left are not free"


def test_a_deadline_ends_a_request(served: Served) -> None:
    body = chat(PROMPTS[0], max_tokens=1500, ignore_eos=True, deadline_s=0.05)
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 504


def test_events_of_its_blocks_are_published(served: Served, folder: Path) -> None:
    prompt = PROMPTS[1] + " and this part is in no other prompt"
    tokens = httpx.post(f"{served.url}/tokenize", json={"prompt": prompt}).json()["tokens"]
    body = {"model": "small", "prompt": tokens, "max_tokens": 2}
    assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
    events = served.engine.built.events
    assert events is not None
    assert events.replay_endpoint is not None
    groups = groups_of(folder)
    with EventFollower(events.endpoint, events.replay_endpoint, groups, topic="kv") as follower:
        index = ReplicaIndex(groups)
        index.add_replica("a")
        until = time.monotonic() + PATIENCE_S
        while index.hits(index.hash(tokens)).get("a", 0) < len(tokens) // 16 * 16 - 16:
            assert time.monotonic() < until, index.view("a")
            for message in follower.poll(0.1):
                follow(index, "a", message, time.monotonic())
        assert index.state("a") is IndexState.EXACT


def test_a_closed_session_frees_its_blocks_wherever_the_engine_runs(served: Served, local: str) -> None:
    for url in (served.url, local):
        body = {"prompt": [7] * 100, "max_tokens": 2, "session_id": "s"}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
        closed = httpx.post(f"{url}/close_session", json={"session_id": "s"}, timeout=PATIENCE_S).json()
        assert closed == {"session_id": "s", "num_branches": 1, "num_freed_blocks": 6}


def test_an_engine_in_its_own_process_sleeps_and_wakes(served: Served) -> None:
    body = {"prompt": [9] * 40, "max_tokens": 4, "temperature": 0}
    before = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    long = {**body, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=long) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        assert httpx.post(f"{served.url}/sleep", timeout=PATIENCE_S).json()["released_bytes"] > 0
        assert "the server ended the request" in "".join(lines)
    assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 503
    assert httpx.post(f"{served.url}/wake_up", timeout=PATIENCE_S).json()["status"] == "awake"
    again = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    assert again["choices"] == before["choices"]
