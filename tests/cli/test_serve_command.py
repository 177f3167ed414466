"""``pagedkv serve``: which model it serves, and how it goes on where the self-test would refuse one."""

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from pagedkv.cli.commands.serve import _default_memory, tell
from pagedkv.cli.engine_options import EngineOptions
from pagedkv.cli.progress import Stages
from pagedkv.errors import ConfigurationError
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


@pytest.mark.parametrize(
    ("given", "default", "share", "nbytes"),
    [(None, "90%", 0.9, 2**29), ("60%", "90%", 0.6, 2**29), ("8", "90%", None, 2**33), (None, "512MiB", None, 2**29)],
)
def test_memory_is_a_size_or_a_share(given: str | None, default: str, share: float | None, nbytes: int) -> None:
    EngineOptions(memory=given).require_valid()
    chosen = EngineOptions(memory=given).config(default)
    assert (chosen.kv_share, chosen.kv_nbytes) == (share, nbytes)


def test_an_engine_that_is_served_has_a_share_of_what_is_free() -> None:
    assert _default_memory("demo", "cpu", 1, 0) == "512MiB"
    assert _default_memory("folder", "cpu", 1, 0) == "25%"
    assert _default_memory("folder", "cpu", 4, 0) == "6.25%"
    assert _default_memory("folder", "cuda", 1, 0) == "90%"
    assert _default_memory("folder", "cuda", 2, 1) == "90%"
    assert _default_memory("folder", "cuda", 4, 0.5) == "45%"


@pytest.mark.parametrize("given", ["0%", "100%", "many%"])
def test_a_share_that_cannot_be_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="--memory must be"):
        EngineOptions(memory=given).require_valid()


def test_the_stages_of_a_start_are_told() -> None:
    for is_terminal in (False, True):
        out = StringIO()
        stages = Stages(Console(file=out, force_terminal=is_terminal, width=200))
        with stages.stage("loading it"):
            pass
        with pytest.raises(ValueError, match="no room"), stages.stage("warming it up"):
            raise ValueError("no room")
        assert re.search(r"pagedkv: loading it took \d+\.\d s\n", out.getvalue())
        assert ("pagedkv: loading it ...\n" in out.getvalue()) is not is_terminal
        assert "warming it up took" not in out.getvalue()


def test_the_choices_of_the_engine_are_told_and_have_options(capsys: pytest.CaptureFixture[str]) -> None:
    tell(make_service(Script()), "http://here", inspects=False, total_s=1.0)
    assert "the model is not compiled (the model is on cpu); steps do not overlap" in capsys.readouterr().err
    chosen = EngineOptions().config()
    assert (chosen.compile_model, chosen.overlap) == (None, None)
    chosen = EngineOptions(compile_model=False, overlap=True).config()
    assert (chosen.compile_model, chosen.overlap) == (False, True)
