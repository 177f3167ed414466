"""What every command has: help with examples, JSON on the standard output; and the version."""

import json
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.traces.trace_files import HASH_IDS

pytestmark = pytest.mark.plain_only


@pytest.mark.parametrize("command", ["replay", "demo"])
def test_the_help_of_each_command_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f" pagedkv {command} " in result.stdout.replace("\n", " ")


@pytest.mark.parametrize("arguments", [(), ("warm-up",), ("generate",)])
def test_flags_are_shown_without_a_type(arguments: tuple[str, ...]) -> None:
    shown = run(*arguments, "--help").stdout
    assert "--help" in shown
    assert "bool" not in shown.lower()


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
