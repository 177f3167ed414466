"""Options in groups are to typer what they are one by one, and mistakes in them are users' mistakes."""

from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from pagedkv.cli.options import command, flag, option
from pagedkv.cli.user_errors import reported
from pagedkv.errors import ConfigurationError


@dataclass(frozen=True)
class Inner:
    """A group within a group."""

    PANEL: ClassVar = "Inside"

    depth: Annotated[int, option("N", "How deep.")] = 2
    height_m: Annotated[float, option("M", "How high.", "--height")] = 1.0
    is_open: Annotated[bool, flag("Without a lid.", "--open")] = False
    round: Annotated[bool, flag("Without corners.")] = False

    def __post_init__(self) -> None:
        if self.height_m < 0:
            raise ConfigurationError(f"height_m must be 0 or more, got {self.height_m}")
        if self.depth < 0:
            raise ConfigurationError(f"--depth must not be negative, got {self.depth}")


@dataclass(frozen=True)
class Outer:
    """A group of options."""

    width: Annotated[float, typer.Option(help="How wide.")]
    inner: Inner = field(default_factory=Inner)


seen: list[tuple[str, Outer, bool]] = []


@command
def measure(name: Annotated[str, typer.Argument()], *, outer: Outer, loud: bool = False) -> None:
    """Note what was given."""
    seen.append((name, outer, loud))


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(measure)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stderr


def test_a_group_stands_for_its_fields() -> None:
    assert list(signature(measure).parameters) == ["name", "width", "depth", "height_m", "is_open", "round", "loud"]
    assert invoke("x", "--width", "1.5", "--loud") == (0, "")
    assert invoke("y", "--width", "2", "--depth", "7") == (0, "")
    assert seen[-2:] == [("x", Outer(1.5), True), ("y", Outer(2.0, Inner(7)), False)]


def test_an_option_without_default_is_required() -> None:
    exit_code, stderr = invoke("x")
    assert exit_code == 2
    assert "--width" in stderr


def test_what_a_group_refuses_is_told_in_one_line() -> None:
    assert invoke("x", "--width", "1", "--depth", "-1") == (2, "pagedkv: --depth must not be negative, got -1\n")


def test_a_message_of_a_parameter_names_the_option_that_was_declared_for_it() -> None:
    assert invoke("x", "--width", "1", "--height", "-1") == (2, "pagedkv: --height must be 0 or more, got -1.0\n")


def test_a_flag_has_no_negative_form_and_an_option_the_panel_of_its_group() -> None:
    app = typer.Typer()
    app.command()(measure)
    options = {each.name: each for each in typer.main.get_command(app).params}
    assert [(options[name].opts, options[name].secondary_opts) for name in ("is_open", "round")] == [
        (["--open"], []),
        (["--round"], []),
    ]
    assert {getattr(options[name], "rich_help_panel", None) for name in ("depth", "round")} == {"Inside"}


@pytest.mark.parametrize("positional", [["x", 1.0]])
def test_a_command_is_called_by_names(positional: list[object]) -> None:
    with pytest.raises(TypeError):
        measure(*positional)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("block_size must be at least 1, got 0", "--block-size must be at least 1, got 0"),
        ("watermark must be in [0, 1), got 2.0", "--watermark must be in [0, 1), got 2.0"),
        ("the watermark must stay below 1", "the watermark must stay below 1"),
        ("host_blocks (--host-blocks) must be set", "host_blocks (--host-blocks) must be set"),
        ("no file 'block_size.json'", "no file 'block_size.json'"),
    ],
)
def test_messages_name_options_as_they_are_typed(message: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"block_size": "--block-size", "watermark": "--watermark", "host_blocks": "--host-blocks"}
    with pytest.raises(typer.Exit), reported(options):
        raise ConfigurationError(message)
    assert capsys.readouterr().err == f"pagedkv: {told}\n"
