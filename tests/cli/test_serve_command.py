"""``pagedkv serve``: which model it serves, and how it goes on where the self-test would refuse one."""

from pathlib import Path

import pytest

from pagedkv.cli.commands.serve import tell
from pagedkv.cli.engine_options import EngineOptions
from tests.cli.command import run
from tests.server.serving import Script, make_service


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


def test_the_choices_of_the_engine_are_told_and_have_options(capsys: pytest.CaptureFixture[str]) -> None:
    tell(make_service(Script()), "http://here", inspects=False)
    assert "the model is not compiled (the model is on cpu); steps do not overlap" in capsys.readouterr().err
    chosen = EngineOptions().config()
    assert (chosen.compile_model, chosen.overlap) == (None, None)
    chosen = EngineOptions(compile_model=False, overlap=True).config()
    assert (chosen.compile_model, chosen.overlap) == (False, True)
