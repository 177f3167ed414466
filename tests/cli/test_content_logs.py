"""Logs with texts or tokens: every command makes the same blocks of them, by ``--block-size``."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.planner.traces.reader import TraceReader
from tests.cli.command import run


def conversations(path: Path, *, cut: bool = False) -> Path:
    """Write a log in which three conversations of one system text go on for four turns each."""
    rows: list[dict[str, Any]] = []
    said: list[list[dict[str, str]]] = [[{"role": "system", "content": "You keep the log. " * 20}] for _ in range(3)]
    tokens = [90] * 3
    for turn in range(12):
        messages = said[turn % 3]
        messages.append({"role": "user", "content": f"What of ship {turn}, and of the weather on that day? " * 3})
        tokens[turn % 3] += 37 + turn
        answer = f"Ship {turn} was seen at noon. " * 4
        usage = {"prompt_tokens": tokens[turn % 3], "completion_tokens": 31}
        answered = {"choices": [{"message": {"role": "assistant", "content": answer}}], "usage": usage}
        row = {"ts": 1.5 * turn, "messages": list(messages), "response": answered}
        if cut and turn == 5:
            del row["messages"]
        rows.append(row)
        messages.append({"role": "assistant", "content": answer})
        tokens[turn % 3] += 31
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counted(path: Path, block_size: int) -> tuple[int, int, int]:
    """Count blocks, those that an earlier prompt had, and prompt tokens, with nothing but sets."""
    seen: set[tuple[int, ...]] = set()
    num_blocks = num_hits = num_tokens = 0
    with TraceReader(path) as trace:
        for request in trace:
            num_tokens += request.input_length
            num_blocks += request.input_length // block_size
            if request.prompt_token_ids is None:
                continue
            ids = request.prompt_token_ids.tolist()
            prefixes = [tuple(ids[:end]) for end in range(block_size, len(ids) + 1, block_size)]
            hits = [prefix in seen for prefix in prefixes]
            num_hits += hits.index(False) if False in hits else len(hits)
            seen.update(prefixes)
    return num_blocks, num_hits, num_tokens


@pytest.mark.parametrize("cut", [False, True])
def test_a_curve_of_texts_is_that_of_their_blocks(tmp_path: Path, cut: bool) -> None:  # noqa: FBT001 - a parameter
    log = conversations(tmp_path / "log.jsonl", cut=cut)
    for block_size in (16, 8):
        curve = json.loads(run("curve", log, "--block-size", block_size, "--json", "-").stdout)
        num_blocks, num_hits, num_tokens = counted(log, block_size)
        assert (curve["block_size"], curve["num_block_refs"], curve["ideal_hits"]) == (block_size, num_blocks, num_hits)
        assert curve["ideal_token_ratio"] == pytest.approx(num_hits * block_size / num_tokens)
        told = ["of 1 of 12 requests the content is unknown: they count as sharing nothing"]
        assert curve["warnings"] == (told if cut else [])
    if not cut:
        converted = tmp_path / "ids.jsonl"
        run("convert", log, "-o", converted, "--block-size", 8)
        assert json.loads(run("curve", converted, "--json", "-").stdout)["ideal_hits"] == num_hits


def test_a_report_of_texts_has_a_curve_by_the_replays_block_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = conversations(tmp_path / "log.jsonl")
    behind = tmp_path / "behind.json"
    options = ("--block-size", 8, "--num-blocks", 10_000, "--cost-model", "instant")
    result = run("report", log, "-o", tmp_path / "page.html", "--json", behind, *options)
    assert result.exit_code == 0, result.output
    (shown,) = json.loads(behind.read_text())["runs"]
    num_blocks, num_hits, _ = counted(log, 8)
    assert (shown["curve"]["num_block_refs"], shown["curve"]["ideal_hits"]) == (num_blocks, num_hits)
    assert shown["curve"]["block_size"] == 8
    assert "so which blocks requests share is unknown" not in (tmp_path / "page.html").read_text()


def test_what_must_be_known_of_a_log_is_told_by_each_command(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    row = {"usage": {"prompt_tokens": 40, "completion_tokens": 2}}
    log.write_text("".join(json.dumps({"ts": number // 4} | row) + "\n" for number in range(40)) + "{\n")
    assert "not a whole JSON object" in run("convert", log, "-o", tmp_path / "out.jsonl").stderr
    result = run("convert", log, "-o", tmp_path / "out.jsonl", "--skip-bad", 1, "--json", tmp_path / "told.json")
    whole, bad = json.loads((tmp_path / "told.json").read_text())["warnings"]
    assert whole.startswith("times are whole seconds, so 30 of 40 requests")
    assert bad.startswith("bad lines passed over: 1, 1 as line 41 (not a whole JSON object")
    assert f"warning: {whole}" in result.stderr
    options = ("--cost-model", "instant", "--num-blocks", 1000, "--skip-bad", 1, "--json", "-")
    assert json.loads(run("replay", log, *options).stdout)["warnings"][:2] == [whole, bad]
    run("convert", log, "-o", tmp_path / "out.jsonl", "--skip-bad", 1, "--spread", 1)
    with TraceReader(tmp_path / "out.jsonl") as trace:
        assert [request.arrival_s for request in trace] == [number / 4 for number in range(40)]


def test_requests_without_times_come_at_random_where_that_is_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "batch.jsonl"
    body = {"model": "m", "messages": [{"role": "user", "content": "Name a river."}]}
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(500)
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = run("convert", log, "-o", tmp_path / "out.jsonl")
    assert "let requests come at random (--arrivals poisson:RATE)" in refused.stderr
    told = run("convert", log, "-o", tmp_path / "out.jsonl", "--arrivals", "poisson:2").stderr
    assert "an OpenAI batch file" in told
    assert "arrivals made up: at random, 2 a second" in told
    with TraceReader(tmp_path / "out.jsonl") as trace:
        arrivals = [request.arrival_s for request in trace]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / 499 == pytest.approx(0.5, rel=0.15)
    assert "wants poisson:RATE" in run("convert", log, "-o", tmp_path / "out.jsonl", "--arrivals", "2").stderr
