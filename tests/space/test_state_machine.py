"""The central proof: every operation in any order, on every group mix, against a model with memory.

By default at least 200,000 checked operations in all, 20,000 for each of 10 mixes: 14,000 in any order, and 6,000 of
rows that share what is still to be computed and leave in any order, which have a machine of their own. ``make
test-long`` makes ten times as many, and the interpreted loops see some ten thousand.
"""

import os
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.space.mixes import MIXES, Mix
from tests.space.space_machine import machine_of
from tests.space.tangled_machine import tangled_machine_of

NUMBA_IS_OFF = os.environ.get("NUMBA_DISABLE_JIT") == "1"
RULES_A_RUN = 60  # the first builds the space
RUNS = 370
STEPS = 14_000

TANGLES_A_RUN = 12
TANGLED_RUNS = 80
TANGLED_STEPS = 6_000
MET_IN_TANGLES = frozenset({"fork", "truncate", "copy on write", "declared", "not declared", "lost", "abort"})


def profile_of(name: str | None) -> settings:
    """Give a profile of Hypothesis; without a name, that of this session."""
    if name is not None:
        return settings.get_profile(name)
    assert settings.default is not None
    return settings.default


def drive(mix: Mix, runs: int, profile: str | None = None) -> Counter[str]:
    """Run a mix's machine so many times; return what was met."""
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        machine_of(mix, seen),
        settings=settings(profile_of(profile), max_examples=runs, stateful_step_count=RULES_A_RUN),
    )
    return seen


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_any_order_of_operations_leaves_tables_and_memory_right(mix: Mix) -> None:
    seen = drive(mix, RUNS)
    assert seen["steps"] >= STEPS
    assert {what for what in mix.expected if not seen[what]} == set(), "the machine did not meet everything it should"


def tangle(mix: Mix, runs: int, profile: str | None = None) -> Counter[str]:
    """Run a mix's machine of tangled rows so many times; return what was met."""
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        tangled_machine_of(mix, seen),
        settings=settings(profile_of(profile), max_examples=runs, stateful_step_count=TANGLES_A_RUN),
    )
    return seen


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_rows_that_are_tangled_leave_tables_and_memory_right(mix: Mix) -> None:
    seen = tangle(mix, TANGLED_RUNS)
    assert seen["tangled steps"] >= TANGLED_STEPS
    expected = MET_IN_TANGLES | ({"hit", "merge"} if mix.caching else set())
    assert {what for what in expected if not seen[what]} == set(), "the machine did not meet everything it should"


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_rows_that_are_tangled_ten_times_as_long(mix: Mix) -> None:
    tangle(mix, 10 * TANGLED_RUNS, profile="long")


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_any_order_of_operations_ten_times_as_long(mix: Mix) -> None:
    assert drive(mix, 10 * RUNS, profile="long")["steps"] >= 10 * STEPS


@pytest.mark.interpreted
@pytest.mark.skipif(not NUMBA_IS_OFF, reason="compiled loops see more")
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_any_order_of_operations_with_loops_as_plain_python(mix: Mix) -> None:
    assert drive(mix, runs=40)["steps"] >= 1000
