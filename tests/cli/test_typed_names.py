"""Messages of the library name parameters, those of the command line options."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import typer

import pagedkv
from pagedkv.cli.user_errors import CALLS, NAMED, OPTIONS, as_typed, reported
from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.recording.recorder import Bounds
from pagedkv.planner.traces.token_blocks import text_tokens
from pagedkv.scheduling import SchedulingConfig
from pagedkv.simulation import ServingConfig
from tests.cli.command import run

pytestmark = pytest.mark.plain_only

PACKAGE: Final = Path(pagedkv.__file__).parent
TRACE: Final = Path(__file__).parents[2] / "examples" / "conversations.jsonl.gz"
OPTION: Final = re.compile(r"(?<![\w(-])--[a-z][\w-]*|\(--[a-z][\w-]*(?= |\)$|\))")
FOREIGN: Final = {
    "--enable-log-requests",
    "--kv-events-config",
    "--log-requests",
    "--log-requests-level",
    "--max-log-len",
    "--save-detailed",
    "--save-result",
}
"""Options of engines and their benchmarks, by which a file is written."""


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """List the texts of a module that are no docstrings, by their lines."""
    tree = ast.parse(source)
    told = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in told:
            yield node.lineno, node.value


def options_in(text: str) -> set[str]:
    """List our options that a text names: those of CSS variables and of others' programs are none."""
    if text.startswith("var(--"):
        return set()
    return {option.strip("()") for option in OPTION.findall(text)} - FOREIGN


def library() -> dict[str, str]:
    """Give the sources of all floors below the command line."""
    files = {file.relative_to(PACKAGE).as_posix(): file for file in sorted(PACKAGE.rglob("*.py"))}
    return {name: file.read_text() for name, file in files.items() if not name.startswith("cli/")}


def test_no_text_of_the_library_names_an_option() -> None:
    found = [
        f"{name}:{line}: {sorted(options_in(text))}"
        for name, source in library().items()
        for line, text in texts_of(source)
        if options_in(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["give --block-size", "more (--memory)", "--ttft must", "by --columns; other", "`--x`"]
)
def test_an_option_would_be_noticed(text: str) -> None:
    assert options_in(text)


def test_every_parameter_in_backquotes_has_an_option_and_every_entry_is_used() -> None:
    names = {found[0] for source in library().values() for _, text in texts_of(source) for found in NAMED.findall(text)}
    parts = "".join(text for source in library().values() for _, text in texts_of(source))
    assert names - {"name"} <= OPTIONS.keys() | CALLS.keys()
    for name in (*OPTIONS, *CALLS):
        assert f"`{name}" in parts or name in {"ttft_s", "tpot_s", "columns", "fields"}, name


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("give `num_host_blocks`, or", "give --host-blocks, or"),
        ("divide it, as in `window=1h`", "divide it, as in --window 1h"),
        ("name it (`TraceReader.block_size`)", "name it (--trace-block-size)"),
        (
            "Make them: `with_block_ids(a b.jsonl)`",
            "Make them: pagedkv convert a b.jsonl --block-size 16 -o with-ids.jsonl.gz",
        ),
        ("Sort it: `sorted_by_arrival`", "Sort it: --sort"),
        ("block_size must be at least 1, got 0", "--block-size must be at least 1, got 0"),
        ("nothing must be at least 1, got 0", "nothing must be at least 1, got 0"),
        ("`nobody` knows `f(x)` nor block_size", "`nobody` knows `f(x)` nor block_size"),
    ],
)
def test_parameters_become_options(message: str, typed: str) -> None:
    assert as_typed(message) == typed


@pytest.mark.parametrize("error", [ConfigurationError, lambda text: TraceError("t.jsonl", 3, text, "Mend it")])
def test_errors_name_options_on_the_command_line(
    error: type[ConfigurationError], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), reported():
        raise error("give `tenant_by`")
    assert "give --tenant-by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "library_says", "typed", "command_says"),
    [
        (
            lambda: Bounds(duration_s=0.0),
            "`duration_s` must be a number of seconds above 0",
            ("record", "tcp://127.0.0.1:1", "--seconds", "0"),
            "--seconds must be a number of seconds above 0",
        ),
        (
            lambda: text_tokens("tokenizer.json", 4.0),
            "`tokenizer` and `chars_per_token` both define tokens",
            ("curve", "TRACE", "--tokenizer", "tokenizer.json", "--chars-per-token", "4"),
            "--tokenizer and --chars-per-token both define tokens",
        ),
        (
            lambda: SchedulingConfig(max_sequences=0),
            "max_sequences must be at least 1, got 0",
            ("replay", "TRACE", "--num-blocks", "100", "--cost-model", "instant", "--max-sequences", "0"),
            "--max-sequences must be at least 1, got 0",
        ),
        (
            lambda: ServingConfig(100, num_samples=0),
            "`num_samples` must be from 1",
            ("replay", "TRACE", "--num-blocks", "100", "--cost-model", "instant", "--samples", "0"),
            "--samples must be from 1",
        ),
    ],
    ids=["a recording", "texts", "a scheduler", "a simulation"],
)
def test_the_library_names_the_parameter_and_the_command_the_option(
    asked: object, library_says: str, typed: tuple[str, ...], command_says: str
) -> None:
    assert callable(asked)
    with pytest.raises(ConfigurationError) as caught:
        asked()
    assert library_says in str(caught.value)
    assert "--" not in str(caught.value)
    ended = run(*(TRACE if word == "TRACE" else word for word in typed))
    assert ended.exit_code == 2
    assert command_says in " ".join(ended.stderr.split())
