"""``pagedkv replay``: what it prints and writes, and what bad input gets."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv.replay import ReplayConfig, Replayer, tokenized
from pagedkv.replay.trace import TraceReader
from tests.cli.command import run
from tests.replay.trace_files import BROKEN, HASH_IDS, HASH_RUNS, LENGTHS, SESSIONS, BrokenTrace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(HASH_IDS)
    return path


def library_result(trace: Path, num_blocks: int, block_size: int) -> dict[str, object]:
    replayer = Replayer(ReplayConfig(num_blocks, block_size), lambda: 0)
    with TraceReader(trace) as requests:
        for request in tokenized(requests):
            replayer.serve(request)
    return replayer.summary().as_dict()


def without_timing(document: dict[str, Any]) -> dict[str, Any]:
    assert set(document["timing"]) == {"bookkeeping_s", "bookkeeping_ns_per_token"}
    return {key: value for key, value in document.items() if key != "timing"}


@pytest.mark.parametrize("text", [HASH_IDS, HASH_RUNS, SESSIONS, LENGTHS])
def test_the_json_holds_what_the_library_finds(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text)
    result = run("replay", trace, "--num-blocks", 100, "--block-size", 8, "--json", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert (document.pop("trace"), document.pop("limit")) == (str(trace), None)
    assert without_timing(document) == without_timing(library_result(trace, 100, 8))


def test_the_table_shows_the_figures(trace: Path) -> None:
    result = run("replay", trace)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = dict(line.strip().split("  ", 1) for line in result.stdout.splitlines() if "  " in line.strip())
    shown = {name: value.strip() for name, value in rows.items()}
    assert shown["requests"] == "3"
    assert shown["prompt tokens"] == "2,649"
    assert shown["output tokens"] == "25"
    assert shown["hit ratio by block"] == "39.26% (64 of 163)"
    assert shown["hit ratio by token"] == "38.66% (1,024 of 2,649)"
    assert shown["blocks in use, peak"] == "96"
    assert shown["evictions"] == "0"
    assert shown["bookkeeping time"].endswith("ns a token")


def test_the_same_run_writes_the_same_json_but_for_timing(tmp_path: Path, trace: Path) -> None:
    documents = []
    for name in ("first.json", "second.json"):
        result = run("replay", trace, "--num-blocks", 50, "--json", tmp_path / name)
        assert result.exit_code == 0
        assert "hit ratio by token" in result.stdout
        documents.append(json.loads((tmp_path / name).read_text()))
    assert without_timing(documents[0]) == without_timing(documents[1])
    assert list(documents[0])[-1] == "timing"


def test_requests_larger_than_the_pool_are_counted(trace: Path) -> None:
    result = run("replay", trace, "--num-blocks", 11, "--json", "-")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["num_requests"], document["num_rejected"]) == (0, 3, 2)


def test_a_limit_cuts_the_trace_short(trace: Path) -> None:
    result = run("replay", trace, "--limit", 2, "--json", "-")
    document = json.loads(result.stdout)
    assert (document["limit"], document["num_requests"]) == (2, 2)


def test_lines_beyond_the_limit_are_not_read(trace: Path) -> None:
    trace.write_text(HASH_IDS + "broken\n")
    assert run("replay", trace, "--limit", 3).exit_code == 0
    assert run("replay", trace, "--limit", 4).exit_code == 2


@pytest.mark.parametrize("broken", [pytest.param(broken, id=name) for name, broken in BROKEN.items()])
def test_a_broken_trace_gets_one_line_and_leaves_no_file(tmp_path: Path, broken: BrokenTrace) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(broken.content)
    result = run("replay", trace, "--json", tmp_path / "result.json")
    assert (result.exit_code, result.stdout) == (2, "")
    (message,) = result.stderr.splitlines()
    place = trace if broken.line is None else f"{trace}:{broken.line}"
    assert message.startswith(f"pagedkv: {place}: ")
    assert broken.reason in message
    assert list(tmp_path.iterdir()) == [trace]


def test_a_missing_trace_gets_one_line(tmp_path: Path) -> None:
    for trace in (tmp_path / "missing", tmp_path):
        result = run("replay", trace)
        assert (result.exit_code, result.stdout) == (2, "")
        (message,) = result.stderr.splitlines()
        assert message.startswith(f"pagedkv: {trace}: cannot be opened")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--num-blocks", 0),
        ("--num-blocks", 1),
        ("--num-blocks", -5),
        ("--block-size", 0),
        ("--block-size", -16),
        ("--trace-block-size", 0),
        ("--limit", 0),
        ("--limit", -1),
    ],
)
def test_a_size_out_of_range_gets_one_line(tmp_path: Path, trace: Path, option: str, value: int) -> None:
    result = run("replay", trace, option, value, "--json", tmp_path / "result.json")
    assert (result.exit_code, result.stdout) == (2, "")
    (message,) = result.stderr.splitlines()
    assert message.startswith("pagedkv: ")
    assert str(value) in message
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize("arguments", [["--num-blocks", "many"], ["--nonsense"], []])
def test_a_wrong_command_line_is_refused(trace: Path, arguments: list[str]) -> None:
    result = run("replay", *([trace, *arguments] if arguments else []))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


def test_an_unwritable_result_is_refused_before_the_trace_is_read(tmp_path: Path) -> None:
    for target in (tmp_path / "missing" / "result.json", tmp_path):
        result = run("replay", tmp_path / "no trace", "--json", target)
        assert (result.exit_code, result.stdout) == (2, "")
        (message,) = result.stderr.splitlines()
        assert message.startswith(f"pagedkv: {target}: cannot be written")
