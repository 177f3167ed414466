"""Several logs as one, by tenant and by hour: what commands print and write, held against a cache that is a dict."""

import json
import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run
from tests.report.page_reader import read_page

NOON_S = int(datetime(2025, 11, 24, 12, tzinfo=UTC).timestamp())
SYSTEM = "You are a helpful assistant of the company. " * 12
CHARACTERS_A_TOKEN = 4
BLOCK = 16


def write_log(path: Path, seed: int, num_requests: int, begin_s: float) -> list[tuple[float, str, str]]:
    """Write a log of chats; return when each came, who asked, and its text as the reader of logs has it."""
    drawn = random.Random(seed)
    rows = []
    at_s = begin_s
    for number in range(num_requests):
        at_s = round(at_s + drawn.uniform(10, 140), 3)
        user = f"u{drawn.randrange(3)}"
        rows.append((at_s, user, SYSTEM + f"I am {user}. " * 20 + f"Question {number}? " * 8))
    path.write_text(
        "".join(
            json.dumps({"timestamp": at_s, "user": user, "prompt": text, "usage": {"completion_tokens": 7}}) + "\n"
            for at_s, user, text in rows
        )
    )
    return rows


def blocks_of(text: str, salt: str = "") -> list[str]:
    """Name the full blocks of a text by all that comes before their end."""
    size = BLOCK * CHARACTERS_A_TOKEN
    return [salt + text[:end] for end in range(size, len(text) + 1, size)]


def dict_hits(prompts: list[list[str]], capacity: int) -> list[int]:
    """Play LRU with a dict: the first key goes first."""
    resident: dict[str, None] = {}
    hits = []
    for prompt in prompts:
        num_hits = next((n for n, block in enumerate(prompt) if block not in resident), len(prompt))
        for block in reversed(prompt):  # the tail goes before the head
            resident.pop(block, None)
            resident[block] = None
        while len(resident) > capacity:
            del resident[next(iter(resident))]
        hits.append(num_hits)
    return hits


@pytest.fixture
def logs(tmp_path: Path) -> dict[str, list[tuple[float, str, str]]]:
    return {
        "a.jsonl": write_log(tmp_path / "a.jsonl", 1, 60, NOON_S),
        "b.jsonl": write_log(tmp_path / "b.jsonl", 2, 40, NOON_S + 1800),
    }


def merged(logs: dict[str, list[tuple[float, str, str]]]) -> list[tuple[float, str, str, str]]:
    return sorted((at_s, name, user, text) for name, rows in logs.items() for at_s, user, text in rows)


def document(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.stderr
    told: dict[str, Any] = json.loads(result.stdout)
    return told


@pytest.mark.parametrize("isolated", [False, True])
def test_a_curve_of_two_logs_tells_hits_in_all_by_tenant_and_by_hour(
    tmp_path: Path, logs: dict[str, list[tuple[float, str, str]]], *, isolated: bool
) -> None:
    options = ("--eviction", "lru", "--capacities", "30,80", "--window", "1h", *(["--isolate"] if isolated else []))
    curve = document("curve", *(tmp_path / name for name in logs), *options)
    requests = merged(logs)
    hours = Counter(int((at_s - NOON_S) // 3600) for at_s, *_ in requests)
    for capacity in (30, 80):
        prompts = [blocks_of(text, name if isolated else "") for _, name, _, text in requests]
        hits = dict_hits(prompts, capacity)
        assert curve["policies"]["lru"][str(capacity)] == sum(hits) > 0
        for part in curve["by_tenant"]:
            own = [number for (_, name, _, _), number in zip(requests, hits, strict=True) if name == part["name"]]
            assert (part["num_requests"], part["policies"]["lru"][str(capacity)]) == (len(own), sum(own))
        for hour, part in enumerate(curve["by_window"]):
            own = [n for (at_s, *_), n in zip(requests, hits, strict=True) if (at_s - NOON_S) // 3600 == hour]
            assert part["name"] == f"2025-11-24 {12 + hour}:00-{13 + hour}:00 UTC"
            assert (part["num_requests"], part["policies"]["lru"][str(capacity)]) == (hours[hour], sum(own))
    assert [part["name"] for part in curve["by_tenant"]] == ["a.jsonl", "b.jsonl"]
    assert ("tenants isolated" in curve["read_as"]) == isolated


def test_a_replay_by_user_and_by_time_of_day_equals_a_count_one_by_one(
    tmp_path: Path, logs: dict[str, list[tuple[float, str, str]]]
) -> None:
    options = ("--tenant-by", "user", "--window", "13:00-13:30", "--utc-offset", "1", "--num-blocks", "5000")
    replay = document("replay", tmp_path / "a.jsonl", *options, "--cost-model", "instant")
    rows = logs["a.jsonl"]
    hits = [BLOCK * number for number in dict_hits([blocks_of(text) for _, _, text in rows], 10**6)]
    tokens = [-(-len(text) // CHARACTERS_A_TOKEN) for _, _, text in rows]
    for part in replay["by_tenant"]:
        own = [place for place, (_, user, _) in enumerate(rows) if user == part["name"]]
        assert part["num_hit_tokens"] == sum(hits[place] for place in own)
        assert part["num_prompt_tokens"] == sum(tokens[place] for place in own)
    within = [place for place, (at_s, _, _) in enumerate(rows) if NOON_S <= at_s < NOON_S + 1800]
    first, rest = replay["by_window"]
    assert (first["name"], rest["name"]) == ("13:00-13:30 UTC+1", "the rest")
    assert first["num_hit_tokens"] == sum(hits[place] for place in within)
    assert first["num_requests"] + rest["num_requests"] == len(rows)
    assert {replay["busiest_window"], replay["quietest_window"]} == {first["name"], rest["name"]}
    shown = " ".join(run("replay", tmp_path / "a.jsonl", *options).stdout.split())
    assert "By tenant" in shown
    assert f"busiest {replay['busiest_window']}" in shown


@pytest.mark.plain_only
def test_a_report_shows_tenants_and_windows(tmp_path: Path, logs: dict[str, list[tuple[float, str, str]]]) -> None:
    page = tmp_path / "page.html"
    assert run("report", tmp_path / "a.jsonl", "--tenant-by", "user", "--window", "30m", "-o", page).exit_code == 0
    shown = read_page(page.read_text())
    assert shown.row("u1")[0] == str(sum(user == "u1" for _, user, _ in logs["a.jsonl"]))
    assert "The busiest window is 2025-11-24" in page.read_text()


def test_a_plan_shows_tenants_and_windows(tmp_path: Path, logs: dict[str, list[tuple[float, str, str]]]) -> None:
    plan_page = tmp_path / "plan.html"
    machine = (
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "h100,2xh100",
        "--block-size",
        16,
        "--eviction",
        "lru",
        "--load",
        "1,4",
    )
    files = [tmp_path / name for name in logs]
    options = (*machine, "--ttft", 1, "--window", "1h", "--results", tmp_path / "kept", "-j", 1)
    plan = document("plan", *files, *options)
    assert run("plan", *files, *options, "--report", plan_page).exit_code == 0
    for point in plan["points"]:
        parts = point["figures"]["divided"]
        for kind in ("tenant", "window"):
            own = [part for part in parts if part["kind"] == kind]
            for figure in ("num_requests", "num_good", "num_hit_tokens", "num_prompt_tokens"):
                assert sum(part[figure] for part in own) == point["figures"][figure]
        windows = [part["num_requests"] for part in parts if part["kind"] == "window"]
        counts = Counter(int((at_s - NOON_S) // 3600) for at_s, *_ in merged(logs))
        assert windows == [counts[hour] for hour in sorted(counts)]  # recorded time, whatever the load
    assert any(reason.startswith("in the busiest window, 2025-11-24") for reason in plan["reasons"])
    assert plan["divided"]["by_tenant"][0]["name"] == "a.jsonl"
    assert read_page(plan_page.read_text()).row("b.jsonl")[0] == "40"
    hits = sum(dict_hits([blocks_of(text) for _, _, _, text in merged(logs)], 10**6))
    assert plan["points"][0]["figures"]["num_hit_tokens"] == BLOCK * hits
    apart = document("plan", *files, *options, "--isolate")
    hits_apart = sum(dict_hits([blocks_of(text, name) for _, name, _, text in merged(logs)], 10**6))
    assert apart["points"][0]["figures"]["num_hit_tokens"] == BLOCK * hits_apart < BLOCK * hits


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--isolate",), "--isolate separates tenants, and the trace names none"),
        (("--tenant-by", "team"), "no request of a.jsonl has anything there"),
        (("--window", "noon"), "--window must be a length, as in 1h, 15m or 1d, or times of day, as in 09:00-18:00"),
        (("--utc-offset", "2"), "give both"),
    ],
)
def test_what_cannot_be_told_apart_is_a_sentence(
    tmp_path: Path, logs: dict[str, list[tuple[float, str, str]]], options: tuple[str, ...], told: str
) -> None:
    assert logs
    for command in ("curve", "replay"):
        result = run(command, tmp_path / "a.jsonl", *options)
        assert result.exit_code == 2
        assert told in " ".join(result.stderr.split())


def test_a_trace_is_not_named_twice(tmp_path: Path, logs: dict[str, list[tuple[float, str, str]]]) -> None:
    assert logs
    result = run("curve", tmp_path / "a.jsonl", tmp_path / "a.jsonl")
    assert (result.exit_code, "is named twice" in result.stderr) == (2, True)
