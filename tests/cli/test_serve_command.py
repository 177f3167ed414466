"""``pagedkv serve``: which model it serves, and how it goes on where the self-test would refuse one."""

from pathlib import Path

from pagedkv.cli.engine_options import EngineOptions
from tests.cli.command import run


def test_the_model_is_an_argument_or_an_option_as_of_other_commands(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for given in ([missing], ["--model", missing], [missing, "--model", missing]):
        ended = run("serve", *given)
        assert ended.exit_code == 2
        assert str(missing) in ended.stderr.replace("\n", "")
    ended = run("serve", missing, "--model", tmp_path)
    assert ended.exit_code == 2
    assert "two models are given" in ended.stderr


def test_differences_are_accepted_only_on_request() -> None:
    assert not EngineOptions().config().accept_differences
    assert EngineOptions(accept_differences=True).config().accept_differences
