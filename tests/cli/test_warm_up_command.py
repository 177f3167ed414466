"""``pagedkv warm-up``: what it refuses, before anything is compiled; what it tells; how it ends."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv.cli.interrupting import EXIT_INTERRUPTED
from pagedkv.warming import WarmUp
from tests.cli.command import run
from tests.compiling import needs_compiled_loops


def test_an_unknown_target_is_refused_with_those_that_are_known() -> None:
    result = run("warm-up", "--target", "x86-64-v9")
    assert result.exit_code == 2
    assert "--target must be one of" in result.stderr
    assert "'x86-64-v9'" in result.stderr


@pytest.mark.long
@needs_compiled_loops
def test_what_is_compiled_is_told_and_lies_where_it_is_said() -> None:
    result = run("warm-up", "--json", "-")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert sorted(told) == ["folder", "num_loops", "seconds"]
    assert len(list(Path(told["folder"]).glob("pagedkv.*.nbc"))) >= told["num_loops"] > 100


def test_an_interrupted_warm_up_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, on_progress: Callable[[int, int], None], **__: object) -> None:
        on_progress(3, 160)
        raise KeyboardInterrupt

    monkeypatch.setattr("pagedkv.cli.commands.warm_up.compile_all", interrupted)
    result = run("warm-up")
    assert result.exit_code == EXIT_INTERRUPTED
    *_, last = result.stderr.splitlines()
    assert last == "pagedkv: interrupted while loops were compiled; 3 of 160 loops are kept"


def test_off_a_terminal_each_tenth_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: object, on_progress: Callable[[int, int], None], **__: object) -> WarmUp:
        for num_done in range(41):
            on_progress(num_done, 40)
        return WarmUp(40, 1.0, 2, "folder")

    monkeypatch.setattr("pagedkv.cli.commands.warm_up.compile_all", compiled)
    result = run("warm-up")
    assert result.stdout == "40 loops are in folder (1 s, 2 at once)\n"
    told = [f"pagedkv: {num_done} of 40 loops are compiled" for num_done in range(0, 41, 4)]
    assert result.stderr.splitlines() == told
