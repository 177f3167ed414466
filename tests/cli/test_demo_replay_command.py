"""``pagedkv demo-replay``, the help and the version."""

import json
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.traces.trace_files import HASH_IDS


def test_the_demo_replays_conversations_and_tells_where_traces_are(tmp_path: Path) -> None:
    for arguments in ([], ["--traces", tmp_path], ["--traces", tmp_path / "missing"]):
        result = run("demo-replay", "--sessions", 5, "--seed", 3, *arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "mean_turns" in result.stdout
        assert "hit ratio by token" in result.stdout
        assert "github.com/kvcache-ai/Mooncake" in result.stdout


def test_the_demo_replays_a_recorded_trace_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "mooncake_conversation.jsonl.gz").write_text(HASH_IDS)
    result = run("demo-replay", "--sessions", 5, "--traces", tmp_path, "--num-blocks", 1000)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Replay of mooncake_conversation.jsonl.gz" in result.stdout
    assert "38.66% (1,024 of 2,649)" in result.stdout
    assert "github.com" not in result.stdout


def test_the_demo_is_the_same_for_the_same_seed() -> None:
    outputs = [run("demo-replay", "--sessions", 5, "--seed", seed).stdout for seed in (3, 3, 4)]
    first, again, other = ([line for line in output.splitlines() if "ns a token" not in line] for output in outputs)
    assert first == again
    assert first != other


@pytest.mark.parametrize(("option", "value"), [("--sessions", 0), ("--seed", -1), ("--num-blocks", 1)])
def test_a_bad_number_gets_one_line(option: str, value: int) -> None:
    result = run("demo-replay", option, value)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("pagedkv: ")


@pytest.mark.parametrize("command", ["replay", "demo", "demo-replay"])
def test_the_help_of_each_command_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f" pagedkv {command} " in result.stdout.replace("\n", " ")


def test_the_version_is_printed() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("pagedkv")


def test_presets_tell_what_decides() -> None:
    shown = [line.split() for line in run("presets").stdout.splitlines()]
    model = next(row for row in shown if row[:1] == ["llama-3.1-8b"])
    assert model[1] == "131,072"
    (gpu,) = [row for row in shown if row[:1] == ["h100"]]
    assert "window_4096" in [word for row in shown for word in row]  # nothing is cut off
    assert gpu[:5] == ["h100", "80.0", "3,350", "989", "64"]


def test_every_command_has_json_on_the_standard_output(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(HASH_IDS)
    for arguments, key in (
        (["presets"], "gpus"),
        (["demo", "--questions", 2, "--documents", 1], "num_right"),
        (["demo-replay", "--sessions", 5], "workload"),
        (["replay", trace, "--cost-model", "instant"], "hits"),
        (["curve", trace], "policies"),
        (["convert", trace, "-o", tmp_path / "out.jsonl"], "read_as"),
        (["report", trace, "-o", tmp_path / "out.html", "--num-blocks", 300], "runs"),
    ):
        result = run(*arguments, "--json", "-")
        assert result.exit_code == 0
        assert key in json.loads(result.stdout), arguments


def test_one_file_is_not_written_twice(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(HASH_IDS)
    for command in ("convert", "report"):
        result = run(command, trace, "-o", "-", "--json", "-")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--output and --json both go to -" in result.stderr
