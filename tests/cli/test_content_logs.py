"""Logs with texts or tokens: every command makes the same blocks of them, by ``--block-size``."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.planner.traces.reader import TraceReader
from tests.cli.command import run
from tests.traces.test_samples import SAMPLES

pytestmark = pytest.mark.plain_only


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


def paths(path: Path, block_size: int) -> list[tuple[list[tuple[int, ...]], int]]:
    """Give what each request leaves behind, block by block as all tokens up to its end, and how many are its prompt's.

    Its answer's, less the last token, are left where none of them was there before.
    """
    seen: set[tuple[int, ...]] = set()
    found: list[tuple[list[tuple[int, ...]], int]] = []
    with TraceReader(path) as trace:
        for number, request in enumerate(trace):
            if request.prompt_token_ids is None:
                unknown: list[tuple[int, ...]] = [(-1 - number, at) for at in range(request.input_length // block_size)]
                found.append((unknown, len(unknown)))
                continue
            asked, said = request.prompt_token_ids.tolist(), request.output_token_ids
            computed = asked + ([] if said is None else said.tolist()[:-1])
            blocks = [tuple(computed[:end]) for end in range(block_size, len(computed) + 1, block_size)]
            prompt = blocks[: len(asked) // block_size]
            left = prompt if any(block in seen for block in blocks[len(prompt) :]) else blocks
            seen.update(left)
            found.append((left, len(prompt)))
    return found


def hits_of_lru(path: Path, block_size: int, capacity: int) -> int:
    """Count the hits of LRU with a list: what was used last stands first, of one request its head."""
    line: list[tuple[int, ...]] = []
    num_hits = 0
    for left, num_prompt_blocks in paths(path, block_size):
        cached = set(line[:capacity])
        hits = [block in cached for block in left[:num_prompt_blocks]]
        num_hits += hits.index(False) if False in hits else len(hits)
        line = left + [block for block in line if block not in set(left)]
    return num_hits


@pytest.mark.parametrize("cut", [False, True])
def test_a_curve_of_texts_is_that_of_their_blocks(tmp_path: Path, cut: bool) -> None:  # noqa: FBT001 - a parameter
    log = conversations(tmp_path / "log.jsonl", cut=cut)
    for block_size in (16, 8):
        curve = json.loads(run("curve", log, "--block-size", block_size, "--json", "-").stdout)
        num_blocks, num_of_prompts, num_tokens = counted(log, block_size)
        num_hits = hits_of_lru(log, block_size, 10**9)
        assert num_hits > num_of_prompts, "next turns hit what answers left"
        assert (curve["block_size"], curve["num_block_refs"], curve["ideal_hits"]) == (block_size, num_blocks, num_hits)
        assert curve["ideal_token_ratio"] == pytest.approx(num_hits * block_size / num_tokens)
        lefts = paths(log, block_size)
        assert curve["num_answer_blocks"] == sum(len(left) - num_prompt_blocks for left, num_prompt_blocks in lefts)
        assert curve["num_unique_blocks"] == len({block for left, _ in lefts for block in left})
        for capacity, hits in curve["policies"]["lru"].items():
            assert hits == hits_of_lru(log, block_size, int(capacity))
            assert all(of[capacity] <= curve["policies"]["optimal"][capacity] for of in curve["policies"].values())
        told = ["the content of 1 of 12 requests is unknown: they count as sharing nothing"]
        assert curve["warnings"] == (told if cut else [])
    if not cut:
        converted = tmp_path / "ids.jsonl"
        run("convert", log, "-o", converted, "--block-size", 8)
        assert json.loads(run("curve", converted, "--json", "-").stdout)["ideal_hits"] == num_of_prompts


def test_a_report_of_texts_has_a_curve_by_the_replays_block_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = conversations(tmp_path / "log.jsonl")
    behind = tmp_path / "behind.json"
    options = ("--block-size", 8, "--num-blocks", 10_000, "--cost-model", "instant")
    result = run("report", log, "-o", tmp_path / "page.html", "--json", behind, *options)
    assert result.exit_code == 0, result.output
    (shown,) = json.loads(behind.read_text())["runs"]
    num_blocks, _, _ = counted(log, 8)
    assert shown["curve"]["num_block_refs"] == num_blocks
    assert shown["curve"]["ideal_hits"] == hits_of_lru(log, 8, 10**9)
    assert shown["curve"]["block_size"] == 8
    page = (tmp_path / "page.html").read_text()
    assert "so which blocks requests share is unknown" not in page
    assert shown["replay"]["hits"]["num_hit_blocks"] == shown["curve"]["ideal_hits"], "nothing is evicted in either"
    assert f"Blocks of answers are cached as well, as in an engine: {shown['curve']['num_answer_blocks']}" in page


def test_what_must_be_known_of_a_log_is_told_by_each_command(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    row = {"usage": {"prompt_tokens": 40, "completion_tokens": 2}}
    log.write_text("".join(json.dumps({"ts": number // 4} | row) + "\n" for number in range(40)) + "{\n")
    assert "not a whole JSON object" in run("convert", log, "-o", tmp_path / "out.jsonl").stderr
    result = run("convert", log, "-o", tmp_path / "out.jsonl", "--skip-bad", 1, "--json", tmp_path / "told.json")
    whole, bad = json.loads((tmp_path / "told.json").read_text())["warnings"]
    assert whole.startswith("times are whole seconds, so 30 of 40 requests")
    assert bad.startswith("bad lines skipped: 1, 1 as line 41 (not a whole JSON object")
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
    assert "generate random arrivals (--arrivals poisson:RATE)" in refused.stderr
    told = run("convert", log, "-o", tmp_path / "out.jsonl", "--arrivals", "poisson:2").stderr
    assert "an OpenAI batch file" in told
    assert "generated arrivals: at random, 2 a second" in told
    with TraceReader(tmp_path / "out.jsonl") as trace:
        arrivals = [request.arrival_s for request in trace]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / 499 == pytest.approx(0.5, rel=0.15)
    assert "must be poisson:RATE" in run("convert", log, "-o", tmp_path / "out.jsonl", "--arrivals", "2").stderr


def test_a_log_written_as_answers_ended_needs_no_conversion(tmp_path: Path) -> None:
    log = conversations(tmp_path / "log.jsonl")
    rows = log.read_text().splitlines(keepends=True)
    late = tmp_path / "late.jsonl"
    late.write_text("".join(rows[place ^ 1] for place in range(len(rows))))
    options = ("--cost-model", "instant", "--num-blocks", 1000, "--json", "-")
    refused = run("replay", late, *options)
    assert refused.exit_code != 0
    assert f"--sort; or, once for several commands, pagedkv convert {late} --sort" in refused.stderr
    expected, found = (json.loads(run("replay", path, "--sort", *options).stdout) for path in (log, late))
    assert found["hits"] == expected["hits"]
    assert found["latency"] == expected["latency"]
    curves = [json.loads(run("curve", path, "--sort", "--json", "-").stdout) for path in (log, late)]
    assert curves[0]["ideal_hits"] == curves[1]["ideal_hits"]
    setting = ("--model", "llama-3.1-8b", "--gpu", "h100", "--eviction", "lru", "--load", 1, "-j", 1)
    plans = [
        json.loads(run("plan", path, "--sort", *setting, "--results", tmp_path / "kept", "--json", "-").stdout)
        for path in (log, late)
    ]
    assert plans[0]["points"] == plans[1]["points"]


def test_a_page_says_why_prompts_shorter_than_a_block_have_no_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = tmp_path / "log.jsonl"
    rows = [{"ts": number, "messages": [{"role": "user", "content": "Hi"}], "response": "Yes"} for number in range(3)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("report", log, "-o", tmp_path / "page.html", "--cost-model", "instant")
    assert result.exit_code == 0, result.stderr
    told = "There is no capacity curve: every prompt is shorter than a block: the longest has 7 tokens."
    assert told in (tmp_path / "page.html").read_text()
    assert "or smaller blocks where they are made of tokens (--block-size)" in run("curve", log).stderr


def test_times_that_are_made_up_and_answers_that_are_not_known_are_warnings() -> None:
    options = ("--cost-model", "instant", "--num-blocks", 1000, "--json", "-")
    made_up = run("replay", SAMPLES / "batch-input.jsonl", "--arrivals", "poisson:4", *options)
    warnings = json.loads(made_up.stdout)["warnings"]
    assert (
        warnings[0] == "arrivals are generated, at random, 4 a second: every figure of recorded traffic rests on them"
    )
    assert warnings[1].startswith("the log lacks the answers of 2 of 2 requests: each counts with its greatest allowed")
    turns = json.loads(run("replay", SAMPLES / "sharegpt.json", *options).stdout)["warnings"]
    assert turns[0].startswith("the file has no times of turns: 30 s between two turns are assumed")
