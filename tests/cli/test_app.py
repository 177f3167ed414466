"""The application: what its help costs, what it lists, how shells complete it, which paths it looks at before torch."""

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagedkv.cli import commands
from pagedkv.cli.app import BESIDE, SUMMARIES, app
from tests.cli.command import run

ROOT = Path(__file__).parents[2]
HEAVY = {"numba", "numpy", "llvmlite", "torch", "transformers", "matplotlib", "msgspec", "zmq", "jinja2"}

# A finder that finds nothing but sees each search: what is imported, and what was tried.
SEEING_IMPORTS = """
import json, sys
sys.argv[0] = "pagedkv"
class Recorder:
    seen = set()
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        cls.seen.add(name.partition(".")[0])
sys.meta_path.insert(0, Recorder)
from pagedkv.cli import main
try:
    main()
finally:
    print(json.dumps(sorted(Recorder.seen)))
"""


def seeing_imports(*arguments: object, **environment: str) -> tuple[int, list[str], set[str]]:
    """Run the command line; return how it ended, the lines of both its streams, and the packages that it looked for."""
    ended = subprocess.run(
        [sys.executable, "-c", SEEING_IMPORTS, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    *lines, seen = ended.stdout.splitlines()
    return ended.returncode, lines + ended.stderr.splitlines(), set(json.loads(seen))


@pytest.mark.parametrize("typed", ["--help", "--version", "--show-completion=bash"])
def test_what_needs_no_command_imports_none(typed: str) -> None:
    ended = seeing_imports(*typed.split("="), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")  # make's shell is sh
    assert ended[0] == 0, ended[1]
    assert ended[2].isdisjoint(HEAVY)
    assert "typer" in ended[2]


def test_help_lists_every_command_with_its_line() -> None:
    listed = " ".join(run("--help").stdout.replace("│", " ").split())
    for name, summary in SUMMARIES.items():
        assert f"{name} {summary}" in listed


def test_every_module_of_commands_is_a_command() -> None:
    modules = {path.stem for path in Path(str(commands.__file__)).parent.glob("[a-z]*.py")}
    names = {name.replace("-", "_") for name in SUMMARIES}
    assert names - BESIDE.keys() == modules
    assert set(BESIDE.values()) <= modules


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_is_the_first_line_of_what_the_command_says(name: str) -> None:
    python_name = name.replace("-", "_")
    function = getattr(import_module(f"pagedkv.cli.commands.{BESIDE.get(python_name, python_name)}"), python_name)
    assert (inspect.getdoc(function) or "").splitlines()[0] == SUMMARIES[name]


def test_a_command_that_is_not_there_is_told_with_what_is_like_it() -> None:
    ended = run("curv", "trace")
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "No such command 'curv'. Did you mean 'curve'?" in ended.stderr


def typed_so_far(*words: str) -> dict[str, str]:
    """The variables with which a shell asks how the last of these words is completed."""
    asked = {"COMP_WORDS": " ".join(("pagedkv", *words)), "COMP_CWORD": str(len(words))}
    return {"_PAGEDKV_COMPLETE": "complete_bash", **asked}


def completed(*words: str) -> list[str]:
    """What a shell is told when the last of these words is to be completed."""
    return CliRunner().invoke(app, [], prog_name="pagedkv", env=typed_so_far(*words)).stdout.splitlines()


def test_a_shell_completes_commands_without_importing_them() -> None:
    _, lines, seen = seeing_imports(**typed_so_far("re"))
    assert lines == ["replay", "report", "record"]
    assert seen.isdisjoint(HEAVY)


def test_a_shell_completes_options_and_the_names_of_presets() -> None:
    assert completed("replay", "--evi") == ["--eviction"]
    assert "llama-3.1-8b" in completed("plan", "--model", "llama-3.1")
    assert "llama-3.1-8b/h100" in completed("replay", "--cost-model", "llama-3.1-8b/")


@pytest.mark.plain_only
@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("generate --model ./gone --prompt x", "model './gone' is no folder"),
        ("generate --model some/model --input gone.jsonl", "gone.jsonl: cannot be read"),
        ("generate --model some/model --prompt x --output gone/answers", "there is no folder gone"),
        ("replay gone.jsonl --engine", "gone.jsonl: "),
        (f"replay {ROOT}/examples/conversations.jsonl.gz --engine --model-path ./gone", "model './gone' is no folder"),
        ("demo --json gone/result.json", "there is no folder gone"),
        ("report gone.jsonl -o report.html", "gone.jsonl: "),
        ("plan gone.jsonl --model llama-3.1-8b --memory 16 --report plan.html", "gone.jsonl: "),
    ],
)
def test_a_wrong_path_is_refused_before_torch_is_imported(
    typed: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, lines, seen = seeing_imports(*typed.split(), NUMBA_DISABLE_JIT="1", PYTHONPATH=str(ROOT / "src"))
    assert code == 2
    (line,) = lines
    assert line.startswith("pagedkv: ")
    assert told in line
    assert seen.isdisjoint({"torch", "transformers", "matplotlib"})
