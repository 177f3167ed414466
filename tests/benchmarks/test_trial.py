"""A trial measures with the package that it is told, and says what that package lacks."""

from pathlib import Path

import pytest

from benchmarks.catalogue import MODULES, Operation, operations
from benchmarks.repository import ROOT
from benchmarks.trial import Outcome, Package, run_trial

BUILD = Operation("benchmarks.operations", "build", "")


def package(folder: Path, text: str) -> Package:
    """A package of one module."""
    source = folder / "src"
    (source / "pagedkv").mkdir(parents=True)
    (source / "pagedkv" / "__init__.py").write_text(text)
    return Package("other", source, folder / "cache")


def test_a_package_without_the_api_gives_no_rows_and_the_line_that_needed_it(tmp_path: Path) -> None:
    outcome = run_trial(BUILD, package(tmp_path, ""))
    assert outcome.rows == ()
    assert outcome.failure is not None
    assert outcome.failure.startswith("ImportError: cannot import name ")
    assert "(operations.py:" in outcome.failure


def test_a_package_that_ends_the_process_is_told(tmp_path: Path) -> None:
    outcome = run_trial(BUILD, package(tmp_path, "import sys\nsys.exit('no such device')\n"))
    assert outcome == Outcome((), "exit code 1: no such device")


def test_a_trial_refuses_another_package_than_the_one_it_is_told(tmp_path: Path) -> None:
    outcome = run_trial(BUILD, Package("empty", tmp_path / "nothing", tmp_path / "cache"))
    assert outcome.failure is not None
    assert outcome.failure.startswith("exit code 1: pagedkv was imported from ")


def test_a_trial_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # nothing to compile: the pools are built by NumPy
    outcome = run_trial(BUILD, Package("now", ROOT / "src", tmp_path))
    assert outcome.failure is None
    assert [row.operation for row in outcome.rows] == ["build 100,000 blocks", "build 1,000,000 blocks"]
    assert all(0 < row.timing.best_us <= row.timing.median_us for row in outcome.rows)


def test_operations_are_chosen_by_name_or_description() -> None:
    assert [str(each) for each in operations("BUILD pools")] == ["operations.build"]
    assert [str(each) for each in operations("operations.fork")] == ["operations.fork"]
    assert operations("no such thing") == []
    assert {each.module for each in operations()} == set(MODULES)
