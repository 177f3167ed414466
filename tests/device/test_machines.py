"""Core and body together: every live row is read back from the tensors, whatever was swapped, copied or aborted."""

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.choosing import long_but
from tests.device.machines import overlap_machine_with_body, space_machine_with_body
from tests.space.mixes import MIXES, Mix

RULES_A_RUN = 40
RUNS = 12
LONG = 150
SWAPS = frozenset({"swap out", "swap in"})
MOVES = SWAPS | {"abort", "copy on write", "several steps in flight"}  # hits inside a block are rare


def drive(machine: type[RuleBasedStateMachine], runs: int, profile: settings | None = None) -> None:
    chosen = settings(profile, max_examples=runs, stateful_step_count=RULES_A_RUN)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("mix", long_but(MIXES[::2], MIXES), ids=str)
def test_tensors_hold_what_rows_rely_on_in_any_order_of_operations(mix: Mix, device: torch.device) -> None:
    seen: Counter[str] = Counter()
    drive(space_machine_with_body(mix, seen, str(device)), RUNS)
    if not mix.replays:  # rows that are replayed hardly ever swap out; swapping in is rare in so few runs
        assert seen["swap out"] or "swap out" not in mix.expected
    assert seen["several steps in flight"]


@pytest.mark.parametrize("mix", long_but(MIXES[1::2], MIXES), ids=str)
def test_tensors_hold_what_rows_rely_on_whatever_is_refused(mix: Mix, device: torch.device) -> None:
    seen: Counter[str] = Counter()
    drive(overlap_machine_with_body(mix, seen, str(device)), RUNS)
    assert seen["unknown"]


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_any_order_of_operations_for_long(mix: Mix, device: torch.device) -> None:
    """Long enough to have met what a body is about."""
    seen: Counter[str] = Counter()
    drive(space_machine_with_body(mix, seen, str(device)), LONG, settings.get_profile("long"))
    moves = MOVES - ({"swap in"} if mix.tenants else set())
    assert {what for what in mix.expected & moves if not seen[what]} == set()


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_whatever_is_refused_for_long(mix: Mix, device: torch.device) -> None:
    seen: Counter[str] = Counter()
    drive(overlap_machine_with_body(mix, seen, str(device)), LONG, settings.get_profile("long"))
    assert seen["unknown"]
