"""The inspector's paths: who may read them, the form of their answers, and what they never tell."""

import base64
import json
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import pairwise
from threading import Thread
from typing import Any, Final

import httpx
import numpy as np
import pytest

from pagedkv.space import BlockState
from tests.server.conftest import Running
from tests.server.inspector.conftest import PRIVATE, STORED, Tiered, ask, forget_device
from tests.server.serving import local_engine

DATA: Final = ("events", "block/full/1", "prefixes", "history")
ROOT: Final = {"x-api-key": "root"}
CLIENT: Final = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


def events(url: str, num_events: int, headers: Mapping[str, str] | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Read the first events."""
    with CLIENT.stream("GET", f"{url}/inspect/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        told: list[tuple[str, dict[str, Any]]] = []
        while len(told) < num_events:
            name, data, blank = next(lines), next(lines), next(lines)
            assert blank == ""
            told.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return told


def get(server: Running, path: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    answer = CLIENT.get(f"{server.url}/inspect/{path}", headers=headers)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


# Only where it was asked for, only for administrators


def test_there_is_no_inspector_unless_it_was_added(server: Running) -> None:
    for path in ("", "/page.js", *(f"/{each}" for each in DATA)):
        assert CLIENT.get(f"{server.url}/inspect{path}").status_code == 404
    assert len(server.service.on_step) == 1, "metrics alone"
    space = local_engine(server.service).llm.core.space
    assert space._state.observers.check == ()


def test_data_needs_an_administrators_key(keyed: Running) -> None:
    for path in DATA:
        url = f"{keyed.url}/inspect/{path}"
        assert CLIENT.get(url).status_code == 401
        assert CLIENT.get(url, headers={"x-api-key": "unknown"}).status_code == 401
        assert CLIENT.get(url, headers={"x-api-key": "a"}).status_code == 403
        assert CLIENT.get(f"{url}?key=root&api_key=root").status_code == 401, "a key in an address is none"


def test_the_page_has_no_data_and_loads_nothing_from_elsewhere(keyed: Running, watched: Running) -> None:
    for server, access in ((keyed, "keys"), (watched, "open")):
        page = CLIENT.get(f"{server.url}/inspect")
        assert page.status_code == 200
        assert f'data-access="{access}"' in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for path in ("page.css", "page.js"):
            part = CLIENT.get(f"{server.url}/inspect/{path}")
            assert part.status_code == 200
            assert "http:" not in part.text
            assert "https:" not in part.text
    assert "/inspect" not in CLIENT.get(f"{watched.url}/openapi.json").text


# What is told


def test_the_first_event_is_whole_and_the_next_are_what_changed(watched: Running) -> None:
    (first, whole), *more = events(watched.url, 3)
    assert (first, [name for name, _ in more]) == ("snapshot", ["delta", "delta"])
    (pool,) = whole["pools"]
    states = np.frombuffer(base64.b64decode(pool["map"]), np.uint8) & 7
    space = local_engine(watched.service).llm.core.space
    assert len(states) == pool["num_blocks"] == 600
    assert (states == BlockState.CACHED).sum() == pool["counts"]["cached"] == space.num_cached_blocks()
    assert (states == BlockState.LIVE).sum() == pool["counts"]["live"] == 0
    assert whole["block_states"][BlockState.CACHED] == "cached"
    times = [whole["now_s"], *(told["now_s"] for _, told in more)]
    assert times == sorted(times)
    assert all(later - earlier > 0.2 for earlier, later in pairwise(times)), "at most 4 a second"
    for _, told in more:
        assert told["pools"][0]["ids"] == told["pools"][0]["values"] == ""


def test_changes_make_the_map_that_is(watched: Running) -> None:
    with CLIENT.stream("GET", f"{watched.url}/inspect/events") as answer:
        lines = answer.iter_lines()
        messages = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        known = np.frombuffer(base64.b64decode(next(messages)["pools"][0]["map"]), np.uint8).copy()
        ask(watched.url, "a text that was not there before, of some blocks")
        for _ in range(40):
            (pool,) = next(messages)["pools"]
            known[np.frombuffer(base64.b64decode(pool["ids"]), "<i4")] = np.frombuffer(
                base64.b64decode(pool["values"]), np.uint8
            )
            if pool["counts"]["cached"] > 0 and not pool["counts"]["live"] and pool["ids"]:
                break
    assert ((known & 7) == BlockState.CACHED).sum() == local_engine(watched.service).llm.core.space.num_cached_blocks()


def test_a_request_says_where_its_hit_ended_and_why(watched: Running) -> None:
    requests = sorted(get(watched, "history?from=0")["requests"], key=lambda each: each["number"])
    assert [each["cause"] for each in requests[:3]] == ["never stored", "block not full", "changed tokens"]
    assert [each["hit"] for each in requests[:3]] == [0, 64, 32]
    assert requests[2]["position"] == 40
    assert {each["state"] for each in requests} == {"length"}
    assert requests[0]["prompt"] == len(PRIVATE)


def test_tiers_and_what_they_had_for_a_request_are_told(tiered: Tiered, watched: Running) -> None:
    forget_device(tiered.service)
    ask(tiered.url, STORED)
    _, whole = events(tiered.url, 1)[0]
    (tier,) = whole["tiers"]
    statistics = local_engine(tiered.service).llm.tier_statistics()[0]
    assert (tier["name"], tier["state"]) == ("test", "closed")
    assert tier["entries"] == statistics.store.num_entries == 2
    assert tier["nbytes"] == statistics.store.nbytes <= tier["cap_nbytes"] == 64 * 2**20
    assert tier["loaded_tokens"] == tier["hit_tokens"] == statistics.num_hit_tokens >= 256
    assert whole["loads"] == []
    latest = whole["ended"][0]
    assert latest["tiers"][0].startswith("tokens 0 to 256 were in tier test: loaded after ")
    assert get(tiered, "history")["requests"][0]["tiers"] == latest["tiers"]
    _, none = events(watched.url, 1)[0]
    assert none["tiers"] == none["loads"] == []
    assert {tuple(each["tiers"]) for each in none["ended"]} == {()}


def test_a_load_under_way_is_told_with_the_requests_that_wait_for_it(tiered: Tiered) -> None:
    forget_device(tiered.service)
    tiered.body.has_come.clear()
    tiered.body.may_go_on.clear()
    asking = Thread(target=ask, args=(tiered.url, STORED))
    asking.start()
    try:
        assert tiered.body.has_come.wait(60)
        told = next(told for _, told in iter(lambda: events(tiered.url, 1)[0], None) if told["loads"])
    finally:
        tiered.body.may_go_on.set()
        asking.join()
    assert told["loads"] == [{"tier": "test", "start": 0, "end": 256, "requests": 1}]
    assert told["tiers"][0]["reads"] == 2
    assert [each["state"] for each in told["requests"]] == ["waiting"]


def test_a_history_counts_what_was_served(watched: Running) -> None:
    ask(watched.url, "an answer of one token begins and ends in the same step", num_tokens=1)
    told = get(watched, "history")
    requests = told["requests"]
    assert sum(told["buckets"]["admitted"]) == len(requests)
    assert (requests[0]["generated"], requests[0]["state"]) == (1, "length")
    assert sum(told["buckets"]["hit"]) == sum(each["hit"] for each in requests)
    missed = sum(tokens for *_, tokens in told["buckets"]["misses"])
    assert missed == sum(each["prompt"] - each["hit"] for each in requests)
    samples = told["samples"]
    assert len(samples["time_s"]) == len(samples["pools"]) == len(samples["shares"]) > 0
    assert all(sum(counts) == 599 for pools in samples["pools"] for counts in pools)
    assert get(watched, "history?from=1e9")["buckets"]["start_s"] == []
    for wrong in ("from=-1", "from=nan", "to=x"):
        assert CLIENT.get(f"{watched.url}/inspect/history?{wrong}").status_code == 400


def test_a_block_and_the_tree_of_prefixes(watched: Running) -> None:
    events(watched.url, 1)
    tree = get(watched, "prefixes?pool=full")
    root = max(tree["roots"], key=lambda node: node["all_hits"])
    assert root["children"], "two prompts went on differently"
    block = get(watched, f"block/full/{root['block']}")
    assert (block["state"], block["num_tokens"], block["parent"]) == ("cached", 16, None)
    assert block["unchanged_s"] is not None
    for wrong in ("block/full/0", "block/full/600", "block/other/1", "prefixes?pool=other"):
        assert CLIENT.get(f"{watched.url}/inspect/{wrong}").status_code == 404


# What is not told


def test_without_the_option_there_is_no_text(watched: Running) -> None:
    told = [json.dumps(each) for _, each in events(watched.url, 2)]
    told += [
        json.dumps(get(watched, path)) for path in ("prefixes", "history", *(f"block/full/{n}" for n in range(1, 9)))
    ]
    for text in told:
        assert "token_ids" not in text
        assert "harbour" not in text


def test_texts_are_those_of_the_callers_own_tenant(keyed: Running) -> None:
    blocks = [get(keyed, f"block/full/{number}", ROOT) for number in range(1, 12)]
    own = [block for block in blocks if block["tenant"] == "root" and block["num_tokens"]]
    others = [block for block in blocks if block["tenant"] == "a" and block["num_tokens"]]
    assert own
    assert others
    assert "".join(block["text"] for block in own).startswith("what operations ask")
    assert not any("text" in block or "token_ids" in block for block in others)
    ((_, now),) = events(keyed.url, 1, ROOT)
    assert [taken + cached > 0 for taken, cached in now["shares"][0]] == [False, True, True], "no tenant, and both"
    sampled = get(keyed, "history", ROOT)["samples"]["shares"][-1][0]  # of some seconds ago
    assert len(sampled) == len(now["shares"][0])
    everything = json.dumps(
        [blocks, events(keyed.url, 2, ROOT), get(keyed, "history", ROOT), get(keyed, "prefixes", ROOT)]
    )
    assert "harbour" not in everything


@pytest.mark.parametrize("key", ["root", "a"])
def test_a_key_is_in_no_answer(keyed: Running, key: str) -> None:
    salt = (key.encode() * 8).hex()
    told = json.dumps([events(keyed.url, 1, ROOT), get(keyed, "prefixes", ROOT), get(keyed, "block/full/1", ROOT)])
    assert salt not in told


def test_only_so_many_may_watch(watched: Running) -> None:
    url = f"{watched.url}/inspect/events"
    with ExitStack() as watchers:
        for _ in range(16):
            assert watchers.enter_context(CLIENT.stream("GET", url)).status_code == 200
        assert CLIENT.get(url).status_code == 429
    statuses = []
    while 200 not in statuses:  # a place is free once the server has noticed that a client went
        with CLIENT.stream("GET", url) as answer:
            statuses.append(answer.status_code)
        assert len(statuses) < 100
