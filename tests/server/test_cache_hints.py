"""Agents' words about the cache: what each does to blocks, that it is told, and that other forms are refused."""

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st

from pagedkv.contract.keys import RequestKeys
from pagedkv.server import ApiKeys, Caller, Service
from pagedkv.server.chat_prompts import Sessions
from tests.server.conftest import Running
from tests.server.serving import Script, local_engine, make_service, running, tokens_of

PATIENCE_S = 60.0
PROMPT = "0123456789abcdef" * 6
PIN = {"action_id": "p", "action_type": "pin", "action_version": "1", "payload": {"ttl_seconds": 60}}


@pytest.fixture
def fresh() -> Iterator[Running]:
    """Run a server whose cache is empty."""
    script = Script()
    service = make_service(script)
    with running(service) as url:
        yield Running(url, service, script)


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def ask(url: str, prompt: object = PROMPT, key: str = "", **fields: Any) -> httpx.Response:  # noqa: ANN401 - JSON
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)


def hints(url: str, **fields: object) -> list[dict[str, Any]]:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    told: list[dict[str, Any]] = answer.json()["cache_hints"]
    return told


def num_leased(service: Service) -> int:
    return sum(pool.num_leased for pool in local_engine(service).llm.core.space.statistics().pools)


def cached(service: Service, prompt: str, salt: bytes = b"") -> int:
    """Count the tokens that a prompt hits."""
    space = local_engine(service).llm.core.space
    return space.match(tokens_of(prompt + "?", ends=False), keys=RequestKeys(salt=salt)).num_tokens


def test_a_pin_leases_the_prompt_up_to_its_end(fresh: Running) -> None:
    half = {**PIN, "payload": {"ttl_seconds": 60, "token_end": 40}}
    (told,) = hints(fresh.url, kv_hints=envelope(half))
    assert told == {"hint": "kv_hints.actions.0", "action_id": "p", "status": "applied", "num_tokens": 32}
    assert num_leased(fresh.service) == 2
    (told,) = hints(fresh.url, kv_hints=envelope(PIN))
    assert told["num_tokens"] == 96
    assert num_leased(fresh.service) == 6


def test_demoted_content_is_evicted_first_and_retained_content_last(fresh: Running) -> None:
    def action(kind: str) -> dict[str, Any]:
        return envelope({"action_id": kind, "action_type": kind, "action_version": "1"})

    prompts = {kind: kind[0] * 64 for kind in ("retain", "plain", "demote")}
    for kind, prompt in prompts.items():
        answer = ask(fresh.url, prompt, kv_hints=None if kind == "plain" else action(kind))
        assert [each["status"] for each in answer.json().get("cache_hints", ())] == ["applied"][: kind != "plain"]
    for number in range(6):  # of 95 blocks, of 600
        ask(fresh.url, f"{number:03}" + "y" * 1510)
    gone: dict[str, int] = {}
    for number in range(20):
        ask(fresh.url, f"{number:03}" + "x" * 50)  # of 4 blocks, as each of the prompts
        for kind, prompt in prompts.items():
            if kind not in gone and cached(fresh.service, prompt) < 64:
                gone[kind] = number
    assert gone["demote"] < gone["plain"] < gone.get("retain", 20)


def test_ranges_and_durations_of_tensorrt_are_leases_of_beginnings(fresh: Running) -> None:
    told = hints(
        fresh.url,
        kv_cache_retention_config={
            "token_range_retention_configs": [
                {"token_start": 0, "token_end": 32, "priority": 100, "duration_ms": 30_000},
                {"token_start": 32, "priority": 35},
                {"token_start": 96, "token_end": 500, "priority": 100},
                {"token_start": 32, "token_end": 64, "priority": 10},
            ],
            "decode_retention_priority": 80,
        },
    )
    assert [each["status"] for each in told] == ["applied", "ignored", "ignored", "ignored", "applied"]
    assert (told[0]["num_tokens"], told[-1]["num_tokens"]) == (32, 96)
    assert num_leased(fresh.service) == 6


def test_a_low_priority_of_the_answer_gives_up_all_but_the_range_that_is_kept(fresh: Running) -> None:
    ranges = [{"token_end": 32, "priority": 90}]
    told = hints(
        fresh.url,
        kv_cache_retention_config={"token_range_retention_configs": ranges, "decode_retention_priority": 0},
    )
    assert [each["status"] for each in told] == ["applied", "applied"]
    assert num_leased(fresh.service) == 2


def test_hints_of_dynamo_set_the_priority_and_tell_what_they_do_not(fresh: Running) -> None:
    seen = []
    fresh.service.on_served.append(lambda served: seen.append(served.request.hints.priority))
    given = {"priority": -5, "strict_priority": 2, "osl": 100, "speculative_prefill": True}
    told = hints(fresh.url, nvext={"agent_hints": given})
    assert {each["hint"].rpartition(".")[2]: each["status"] for each in told} == {
        "strict_priority": "applied",
        "priority": "applied",
        "osl": "ignored",
        "speculative_prefill": "ignored",
    }
    assert seen == [2 * 2**16 - 5]


def test_streams_chats_and_responses_tell_their_hints_too(server: Running) -> None:
    fields: dict[str, Any] = {"kv_hints": envelope(PIN)}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, "stream": True, **fields}
    ) as stream:
        assert '"cache_hints":[{"hint":"kv_hints.actions.0"' in stream.read().decode()
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=PATIENCE_S).json()
    assert answer["cache_hints"][0]["status"] == "applied"
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**chat, "stream": True}) as stream:
        assert '"cache_hints"' in stream.read().decode()
    body = {"input": PROMPT, "max_output_tokens": 2, **fields}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE_S).json()
    assert answer["cache_hints"][0]["status"] == "applied"


UNKNOWN = (
    ("kv_hints.protocol_version", {"kv_hints": {**envelope(), "protocol_version": "9"}}),
    ("kv_hints.thing", {"kv_hints": {**envelope(), "thing": 1}}),
    ("kv_hints.actions.0.payload.ttl", {"kv_hints": envelope({**PIN, "payload": {"ttl": 1, "ttl_seconds": 1}})}),
    ("kv_hints.actions.0.payload.ttl_seconds", {"kv_hints": envelope({**PIN, "payload": {}})}),
    ("kv_hints.actions.0.payload.ttl_seconds", {"kv_hints": envelope({**PIN, "payload": {"ttl_seconds": 1e9}})}),
    ("nvext.annotations", {"nvext": {"annotations": ["timing"]}}),
    ("nvext.agent_hints.latency", {"nvext": {"agent_hints": {"latency": 1}}}),
    ("kv_cache_retention_config.directory", {"kv_cache_retention_config": {"directory": "/tmp"}}),  # noqa: S108 - is refused
    ("priority", {"priority": 1, "nvext": {"agent_hints": {"priority": 1}}}),
    ("session_id", {"session_id": ""}),
)


@pytest.mark.parametrize(("name", "fields"), UNKNOWN)
def test_a_form_that_is_not_understood_is_refused_with_its_name(
    name: str, fields: dict[str, Any], server: Running
) -> None:
    answer = ask(server.url, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_an_action_that_is_not_known_is_ignored_and_told(server: Running) -> None:
    (told,) = hints(server.url, kv_hints=envelope({"action_id": "s", "action_type": "share", "action_version": "1"}))
    assert told["status"] == "ignored"


def test_hints_that_contradict_each_other_are_refused(server: Running) -> None:
    kinds = [{"action_id": kind, "action_type": kind, "action_version": "1"} for kind in ("retain", "demote")]
    assert "contradicts another hint" in ask(server.url, kv_hints=envelope(*kinds)).text
    kept = {"decode_retention_priority": 90}
    answer = ask(server.url, kv_hints=envelope(kinds[1]), kv_cache_retention_config=kept)
    assert "hints contradict each other" in answer.text
    assert "at most" in ask(server.url, kv_hints=envelope(*[PIN] * 17)).text
    assert "up to 4 places" in ask(server.url, kv_hints=envelope(*[PIN] * 5)).text
    assert "of one prompt" in ask(server.url, prompt=["a", "b"], kv_hints=envelope(PIN)).text


# Sessions


def close(url: str, name: str, key: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{url}/close_session", json={"session_id": name}, headers=headers, timeout=PATIENCE_S)


def test_closing_a_session_frees_what_nothing_else_continues(fresh: Running) -> None:
    system, ours, theirs = "s" * 32, "a" * 32, "b" * 32
    pinned = envelope(PIN)
    for branch in (ours, ours + "c" * 32, ours + "d" * 32):
        ask(fresh.url, system + branch, session_id="one", kv_hints=pinned)
    ask(fresh.url, system + theirs, session_id="other")
    closed = close(fresh.url, "one").json()
    assert closed["session_id"] == "one"
    assert closed["num_branches"] == 2 + 1  # the first turn's answer is no beginning of the next prompt
    assert closed["num_freed_blocks"] == 6
    assert cached(fresh.service, system + ours) == 32
    assert cached(fresh.service, system + theirs) == 64
    assert num_leased(fresh.service) == 2, "the other session's part of the prompt is still leased"
    assert close(fresh.url, "one").status_code == 404
    local_engine(fresh.service).llm.core.space.check()


def test_a_session_is_its_tenants() -> None:
    keys = {hashlib.sha256(name.encode()).hexdigest(): Caller(name, name.encode()) for name in ("a", "b")}
    service = make_service(Script(), ApiKeys(keys))
    with running(service) as url:
        ask(url, key="a", session_id="s")
        assert close(url, "s", "b").status_code == 404
        assert ask(url, key="a", nvext={"agent_hints": {"priority": 1}}).status_code == 403
        assert cached(service, PROMPT, b"a") == 96
        assert close(url, "s", "a").json()["num_freed_blocks"] == 6
        assert cached(service, PROMPT, b"a") == 0


turns = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=8)


@given(noted=turns, most=st.integers(1, 30))
def test_a_session_keeps_each_branch_once_and_within_its_bound(noted: list[list[int]], most: int) -> None:
    """The reference: all turns that no later turn continues, unless they are too many."""
    sessions = Sessions(most)
    expected: list[list[int]] = []
    for turn in noted:
        merged = [each for each in expected if turn[: len(each)] != each] + [turn]
        if sum(map(len, merged)) + len(merged) - 1 <= most:
            expected = merged
        sessions.note("s", turn, "t")
    assert sessions.close("s", None) == []
    assert [each.tolist() for each in sessions.close("s", "t")] == expected
    assert sessions.close("s", "t") == []
