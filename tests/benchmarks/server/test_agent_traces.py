"""Sessions scaled down: the same blocks hit the same, lengths and times are divided, and Weka's readers take them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server.agent_traces import Scale, chosen, scaled, write_traces
from pagedkv.planner.capacity.references import ReferenceCollector
from pagedkv.planner.traces.reader import TraceReader

pytestmark = pytest.mark.plain_only


def request(t: float, length: int, first: int = 1, agent: int = 0, output: int = 160) -> dict[str, Any]:
    return {
        "t": t,
        "input_length": length,
        "output_length": output,
        "hash_runs": [[first, length // 64]],
        "agent": agent,
        "api_time": 2.0,
        "think_time": None,
    }


def session(*requests: dict[str, Any], name: str = "s", tools: int = 128, system: int = 64) -> dict[str, Any]:
    return {
        "session": name,
        "block_size": 64,
        "tool_tokens": tools,
        "system_tokens": system,
        "requests": list(requests),
    }


SESSION = session(
    request(0.0, 400), request(10.0, 700), request(12.0, 333, 50, agent=1), request(20.0, 640, 50, agent=1),
    request(5000.0, 1300, output=3),
)  # fmt: skip


def test_lengths_and_blocks_are_divided_and_ids_stay() -> None:
    trace = scaled(SESSION, Scale(16))
    main = [entry for entry in trace["requests"] if entry["type"] == "s"]
    assert trace["block_size"] == 4
    assert [entry["in"] for entry in main] == [25, 43, 81]
    assert [entry["out"] for entry in main] == [10, 10, 1]
    assert [len(entry["hash_ids"]) for entry in main] == [6, 10, 20]
    assert (trace["tool_tokens"], trace["system_tokens"]) == (8, 4)


def test_pauses_are_cut_before_times_are_divided() -> None:
    trace = scaled(SESSION, Scale(16, times=4.0, longest_pause_s=60.0))
    assert [entry["t"] for entry in trace["requests"]] == [0.0, 2.5, 3.0, 5.0 + 15.0]
    assert trace["requests"][0]["api_time"] == 0.5


def test_a_subagent_is_one_entry_whose_requests_are_on_the_clock_of_the_session() -> None:
    entry = scaled(SESSION, Scale(16, times=1.0))["requests"][2]
    assert entry["type"] == "subagent"
    assert [entry["t"], *(each["t"] for each in entry["requests"])] == [12.0, 12.0, 20.0]
    assert entry["duration_ms"] == 10_000


@pytest.mark.parametrize("divisor", [1, 16])
def test_what_hits_is_the_same_at_each_scale(tmp_path: Path, divisor: int) -> None:
    write_traces([SESSION, {**SESSION, "session": "t"}], tmp_path, Scale(divisor, times=1.0))
    collector = ReferenceCollector("trace", full_blocks_only=True)
    with TraceReader(tmp_path) as trace:
        requests = list(trace)
    for each in sorted(requests, key=lambda each: (each.session or "", each.arrival_s)):
        collector.add(each)
    assert collector.references().ideal_hits().tolist() == 2 * [0, 6, 10, 0, 5]


def test_the_first_prompt_has_what_is_shared_whole() -> None:
    """AIPerf refuses a first prompt with fewer blocks than tools and system text take."""
    small = scaled(session(request(0.0, 192), tools=10_000, system=500), Scale(16))
    assert small["tool_tokens"] + small["system_tokens"] <= 2 * small["block_size"]


def test_blocks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="64 tokens a block cannot be divided by 24"):
        scaled(SESSION, Scale(24))


def test_sessions_that_are_too_short_or_too_long_are_left_out(tmp_path: Path) -> None:
    rows = [
        session(request(0.0, 64), name="short"),
        session(*(request(float(t), 64_000) for t in range(5)), name="long"),
        session(*(request(float(t), 640) for t in range(5)), name="first"),
        session(*(request(float(t), 640) for t in range(5)), name="second"),
    ]
    file = tmp_path / "sessions.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.write("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["session"] for row in chosen(file, 1, 1000, Scale(16))] == ["first"]
    assert [row["session"] for row in chosen(file, 9, 1000, Scale(16))] == ["first", "second"]
    assert [row["session"] for row in chosen(file, 9, 8000, Scale(16))] == ["long", "first", "second"]
