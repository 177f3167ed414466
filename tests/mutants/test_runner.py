"""Faults in a small tree of its own: killed, survived, never ending, and tests that fail by themselves."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mutants.callers import Callers
from mutants.mutation import Mutation
from mutants.runner import (
    ASKED,
    DEVICE_STAGES,
    ENGINE_STAGES,
    STAGES,
    Stage,
    TestsFailError,
    Verdict,
    judge,
    require_passing,
)
from mutants.sandbox import ROOT, Sandbox, sandbox

pytestmark = pytest.mark.plain_only

CODE = """\
def count(n):
    total = 0
    while total < n:
        total += 1
    return total
"""
TESTS = """\
from code_under_test import count

def test_none():
    assert count(0) == 0

def test_three():
    assert count(3) == 3

def test_that_always_fails():
    assert count(2) == 3
"""
STAGE = Stage("counting", ("tests", "--deselect", "tests/test_count.py::test_that_always_fails"), test_seconds=2)
SECONDS = 120


def fault(original: str, replacement: str, *, equivalent: str = "") -> Mutation:
    return Mutation("fault", "src/code_under_test.py", "count", original, replacement, "an example", equivalent)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with one function, its tests, and this runner's plugin."""
    root = tmp_path / "root"
    for folder in ("src", "tests"):
        (root / folder).mkdir(parents=True)
    (root / "src" / "code_under_test.py").write_text(CODE)
    (root / "tests" / "test_count.py").write_text(TESTS)
    shutil.copy(ROOT / "tests" / "conftest.py", root / "tests")
    shutil.copytree(ROOT / "mutants", root / "mutants", ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.fixture
def copy(tree: Path) -> Iterator[Sandbox]:
    with sandbox(tree) as copy:
        yield copy


@pytest.mark.parametrize(
    ("original", "replacement", "killer"),
    [
        ("total = 0", "total = 1", "test_none"),
        ("total += 1", "total += 0", "test_three"),  # never ends
    ],
)
def test_a_fault_is_killed_by_the_first_test_that_notices(
    copy: Sandbox, original: str, replacement: str, killer: str
) -> None:
    verdict = judge(copy, fault(original, replacement), SECONDS, stages=(STAGE,))
    assert (verdict.killer, verdict.result) == (f"tests/test_count.py::{killer}", "killed")


@pytest.mark.long
def test_a_killer_must_pass_without_the_fault(copy: Sandbox) -> None:
    count, fails = (f"tests/test_count.py::{name}" for name in ("test_three", "test_that_always_fails"))
    killed = judge(copy, fault("< n", "< n - 1"), SECONDS, first=[(count,)], stages=(STAGE,))
    assert killed.killer == count
    require_passing(copy, count, SECONDS)
    with pytest.raises(TestsFailError, match="test_that_always_fails failed with a fault in the code, but does not"):
        require_passing(copy, fails, SECONDS)


@pytest.mark.long
def test_a_fault_that_no_test_notices_survives_unless_it_is_argued(copy: Sandbox) -> None:
    survivor = judge(copy, fault("< n", "!= n"), SECONDS, stages=(STAGE,))
    assert (survivor.result, survivor.is_as_it_should) == ("SURVIVED", False)
    argued = Verdict(fault("< n", "!= n", equivalent="n is not negative"), None, is_over=True, seconds=1)
    assert (argued.result, argued.is_as_it_should) == ("equivalent", True)
    disproved = Verdict(argued.mutation, "tests/test_count.py::test_three", is_over=True, seconds=1)
    assert (disproved.result, disproved.is_as_it_should) == ("KILLED, SO NOT EQUIVALENT", False)


@pytest.mark.long
def test_a_fault_is_not_killed_by_running_out_of_time(copy: Sandbox) -> None:
    endless = fault("total += 1", "total += 0")
    patient = Stage("counting", STAGE.tests, test_seconds=SECONDS)
    verdict = judge(copy, endless, 2, stages=(patient,))
    assert (verdict.killer, verdict.result, verdict.is_as_it_should) == (None, "NOT KILLED IN TIME", False)


@pytest.mark.long
def test_a_killer_of_last_time_that_is_gone_is_passed_over(copy: Sandbox) -> None:
    verdict = judge(
        copy, fault("total = 0", "total = 1"), SECONDS, first=[("tests/gone.py::test_four",)], stages=(STAGE,)
    )
    assert verdict.killer == "tests/test_count.py::test_none"


@pytest.mark.long
def test_tests_that_call_a_function_are_found(copy: Sandbox) -> None:
    callers = copy.callers(STAGE.tests, seconds=SECONDS, test_seconds=2)
    mutation = fault("< n", "!= n")
    names = ("test_none", "test_three")
    assert sorted(callers.quickest(mutation)) == [f"tests/test_count.py::{name}" for name in names]
    assert callers.quickest(replace(mutation, function="another")) == ()


def test_the_quickest_tests_come_first_as_far_as_their_time_allows(tmp_path: Path) -> None:
    place = "src/code_under_test.py::count"
    (tmp_path / "a.json").write_text(json.dumps({place: {"slow": 25.0, "quick": 2.0}}))
    (tmp_path / "b.json").write_text(json.dumps({place: {"middle": 9.0, "quick": 1.0}}))
    callers = Callers.read([tmp_path / "a.json", tmp_path / "b.json"])
    assert callers.quickest(fault("< n", "!= n")) == ("quick", "middle")
    callers.write(tmp_path / "c.json")
    assert Callers.read([tmp_path / "c.json"]).quickest(fault("< n", "!= n")) == ("quick", "middle")


@pytest.mark.long
def test_a_stage_without_tests_is_an_error_not_a_survivor(copy: Sandbox) -> None:
    with pytest.raises(TestsFailError, match=r"empty: there are none: tests/gone\.py"):
        judge(copy, fault("< n", "!= n"), SECONDS, stages=(Stage("empty", ("tests/gone.py",), test_seconds=2),))


def test_of_folders_with_large_files_only_those_of_the_root_stay_behind(tree: Path, tmp_path: Path) -> None:
    """A package may have such a name too."""
    files = ("traces/a", "src/traces/a", "out/a", "src/__pycache__/a")
    for file in files:
        (tree / file).parent.mkdir(parents=True)
        (tree / file).touch()
    Sandbox(tmp_path / "copy", tree)
    assert [file for file in files if (tmp_path / "copy" / "tree" / file).exists()] == ["src/traces/a"]


def test_all_files_that_stages_name_are_there() -> None:
    """A path that is gone makes pytest run nothing at all, so no fault could be judged."""
    arguments = [test for stage in (*STAGES, *DEVICE_STAGES, *ENGINE_STAGES) for test in stage.tests]
    named = [test.removeprefix("--deselect=").partition("::")[0] for test in (*arguments, *ASKED)]
    assert [test for test in named if test.startswith("tests/") and not (ROOT / test).exists()] == []
