"""Negative controls: a package with one small change is found out, one with other words is told apart.

Changes are made to copies of the package, by what is added to the end of the module of public names.
"""

import shutil
from pathlib import Path

import pytest

from benchmarks.repository import ROOT
from benchmarks.side_by_side.comparing import Comparison
from benchmarks.side_by_side.processes import play_both
from benchmarks.trial import Package

pytestmark = pytest.mark.plain_only

ANOTHER_VICTIM = """
_free = BlockSpace.free

def free(space, rows, **told):
    receipts = _free(space, rows, **told)
    queue = next(iter(space._state.pools.values())).free_queue
    if queue.num_free_blocks > 1:
        queue.append(queue.popleft())
    return receipts

BlockSpace.free = free
"""
ANOTHER_WORD_IN_A_PLAN = """
_plan_step = BlockSpace.plan_step

def plan_step(space):
    words = _plan_step(space).buffer.copy()
    words[-1] += len(words) > 70
    return StepPlan.from_buffer(words)

BlockSpace.plan_step = plan_step
"""
ERRORS = """
_truncate = BlockSpace.truncate

def truncate(space, rows, lengths):
    try:
        _truncate(space, rows, lengths)
    except PagedKVError as error:
        raise {}

BlockSpace.truncate = truncate
"""
ANOTHER_NUMBER = ERRORS.format("type(error)(str(error).replace('1', '2', 1))")
ANOTHER_CLASS = ERRORS.format("TypeError(str(error))")
OTHER_WORDS = ERRORS.format("type(error)(str(error).upper())")
ANOTHER_STATE = """
BlockSpace.advance = lambda space, now: space.reset_prefix_cache()
"""


def played(folder: Path, addition: str, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Compare one life of this tree's package with that of a copy to which something is added."""
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "src" / "pagedkv" / "public.py").open("a") as public:
        public.write(addition)
    now = Package("now", ROOT / "src", folder / "now")
    return play_both(Package("changed", folder / "src", folder / "then"), now, ["0", "20000", "0"])


@pytest.mark.parametrize(
    "change",
    [
        ANOTHER_VICTIM,
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in (ANOTHER_STATE, ANOTHER_WORD_IN_A_PLAN, ANOTHER_NUMBER, ANOTHER_CLASS)
        ),
    ],
    ids=["another victim", "another state", "another word in a plan", "another number", "another class"],
)
def test_a_change_of_behaviour_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    comparison = played(tmp_path, change, monkeypatch)
    assert comparison.difference is not None
    assert "then:" in str(comparison.difference)


def test_other_words_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = played(tmp_path, OTHER_WORDS, monkeypatch)
    assert comparison.difference is None
    assert comparison.reworded
    assert all(now == then.upper() for now, then in comparison.reworded)


def test_the_same_package_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = played(tmp_path, "", monkeypatch)
    assert comparison.difference is None
    assert not comparison.reworded
    (tally,) = comparison.tallies.values()
    assert comparison.num_calls > 200
    assert tally["allocate: done"] > 10
    assert tally["met: hits"] > 0
    assert tally["misuse: error"] > 0
    assert tally["misuse: done"] == 0
