"""The central proof: every operation in any order, on every group mix, against a model with memory.

At least as many checked operations in all as ``pytest --operations N`` says, by default 6,000: the same
for each of 13 mixes, 7 in 10 of them in any order, and the others of rows that share what is still to be computed and
leave in any order, which have a machine of their own. ``make test-long`` makes two million, and the interpreted loops
see some three thousand.
"""

import os
from collections import Counter
from math import ceil

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.space.mixes import MIXES, Mix
from tests.space.space_machine import machine_of
from tests.space.tangled_machine import tangled_machine_of

NUMBA_IS_OFF = os.environ.get("NUMBA_DISABLE_JIT") == "1"
RULES_A_RUN = 60  # the first builds the space
OPERATIONS_A_RUN = 30  # at least, on average

TANGLES_A_RUN = 12
TANGLED_OPERATIONS_A_RUN = 65

SHARE_IN_ANY_ORDER = 0.7
WHOLE = 100_000  # so many meet everything that there is
LONG = 2_000_000
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


def operations_of_a_mix(total: int) -> tuple[int, int]:
    """How many operations in any order, and how many of tangled rows, are each mix's share of a total."""
    share = total / len(MIXES)
    in_any_order = ceil(share * SHARE_IN_ANY_ORDER)
    return in_any_order, ceil(share) - in_any_order


def require_met(expected: frozenset[str], seen: Counter[str], total: int) -> None:
    """Assert that a machine has met what it should, if it ran for long."""
    missed = {what for what in expected if not seen[what]} if total >= WHOLE else set()
    assert missed == set(), "the machine did not meet everything it should"


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_any_order_of_operations_leaves_tables_and_memory_right(mix: Mix, pytestconfig: pytest.Config) -> None:
    total = pytestconfig.getoption("--operations")
    num_operations, _ = operations_of_a_mix(total)
    seen = drive(mix, ceil(num_operations / OPERATIONS_A_RUN))
    assert seen["steps"] >= num_operations
    require_met(mix.expected, seen, total)


def tangle(mix: Mix, runs: int, profile: str | None = None) -> Counter[str]:
    """Run a mix's machine of tangled rows so many times; return what was met."""
    seen: Counter[str] = Counter()
    run_state_machine_as_test(
        tangled_machine_of(mix, seen),
        settings=settings(profile_of(profile), max_examples=runs, stateful_step_count=TANGLES_A_RUN),
    )
    return seen


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_rows_that_are_tangled_leave_tables_and_memory_right(mix: Mix, pytestconfig: pytest.Config) -> None:
    total = pytestconfig.getoption("--operations")
    _, num_operations = operations_of_a_mix(total)
    seen = tangle(mix, ceil(num_operations / TANGLED_OPERATIONS_A_RUN))
    assert seen["tangled steps"] >= num_operations
    require_met(MET_IN_TANGLES | ({"hit", "merge"} if mix.caching else set()), seen, total)


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_rows_that_are_tangled_for_long(mix: Mix) -> None:
    _, num_operations = operations_of_a_mix(LONG)
    tangle(mix, ceil(num_operations / TANGLED_OPERATIONS_A_RUN), profile="long")


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_any_order_of_operations_for_long(mix: Mix) -> None:
    num_operations, _ = operations_of_a_mix(LONG)
    assert drive(mix, ceil(num_operations / OPERATIONS_A_RUN), profile="long")["steps"] >= num_operations


@pytest.mark.interpreted
@pytest.mark.skipif(not NUMBA_IS_OFF, reason="compiled loops see more")
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_any_order_of_operations_with_loops_as_plain_python(mix: Mix) -> None:
    assert drive(mix, runs=10)["steps"] >= 220
