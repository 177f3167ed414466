"""Overlapped steps in any order, and faults in what refused tokens move that the machine must notice."""

import os
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from pagedkv.space import drafting, filling, planning, truncating
from pagedkv.space.receipts import ReceiptBook
from pagedkv.space.rows import NUM_ACCEPTED, NUM_TOKENS
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import InFlightStep, StepLedger
from tests.space.controls import require_stopped
from tests.space.mixes import MIXES, Mix
from tests.space.overlap_machine import overlap_machine_of

NUMBA_IS_OFF = os.environ.get("NUMBA_DISABLE_JIT") == "1"
RULES_A_RUN = 50
RUNS = 60
OPERATIONS_OF_ALL_RUNS = 50_000  # of the other machines: who asks for fewer gets as much less of these
LEAST_RUNS = 12
RUNS_TO_NOTICE = 1000  # at most: a fault that is noticed ends them
MET = frozenset({"unknown", "filled"})
MET_WITH_DRAFTS = MET | {
    "refused",
    "refused behind a step in flight",
    "lost with a step",
    "forked before unknown tokens",
}


def overlap(mix: Mix, runs: int, profile: settings | None = None) -> Counter[str]:
    """Run a mix's machine so many times; return what was met."""
    seen: Counter[str] = Counter()
    chosen = settings(profile, max_examples=runs, stateful_step_count=RULES_A_RUN)
    run_state_machine_as_test(overlap_machine_of(mix, seen), settings=chosen)
    return seen


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_rows_read_their_own_tokens_whatever_is_accepted_refused_or_lost(mix: Mix, pytestconfig: pytest.Config) -> None:
    share = min(1.0, pytestconfig.getoption("--operations") / OPERATIONS_OF_ALL_RUNS)
    runs = LEAST_RUNS if NUMBA_IS_OFF else max(LEAST_RUNS, int(RUNS * share))
    seen = overlap(mix, runs)
    wanted = MET_WITH_DRAFTS if mix.takes_drafts and runs == RUNS else MET
    assert {what for what in wanted if not seen[what]} == set()


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_rows_read_their_own_tokens_for_long(mix: Mix) -> None:
    assert overlap(mix, 50 * RUNS, settings(derandomize=False))["filled"]


def require_noticed(name: str) -> None:
    mix = next(mix for mix in MIXES if mix.name == name)
    require_stopped(overlap_machine_of(mix, Counter()), RUNS_TO_NOTICE, RULES_A_RUN)


def test_ranges_in_flight_that_do_not_move_down_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "lower_ranges", lambda *_: None)
    require_noticed("full")


def test_refused_tokens_that_count_as_reached_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes in their place would be computed again, as the receipts have it."""
    monkeypatch.setattr(ReceiptBook, "refused", lambda *_: None)
    require_noticed("full")


def test_a_failed_step_that_leaves_its_unsampled_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "drop_unsampled", lambda *_: None)
    require_noticed("full")


def test_accepted_states_that_do_not_become_current_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a step is over or filled in."""
    for module in (filling, truncating):
        monkeypatch.setattr(module, "accept_states", lambda *_: None)
    require_noticed("drafts of states")


def test_states_that_the_next_append_accepts_and_that_do_not_become_current_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "accept_states", lambda *_: None)  # the one that grow_slots calls
    require_noticed("drafts of states")


def test_a_failed_step_that_advanced_a_state_in_place_and_loses_no_row_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "_has_state", lambda *_: True)
    require_noticed("state")


def test_tokens_that_are_accepted_before_they_are_computed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows slide below what refused drafts leave to be read."""

    def accept_all(state: SpaceState, _: StepLedger, step: InFlightStep) -> None:
        rows = step.rows[state.num_known[step.rows] > 0]
        state.rows[rows, NUM_ACCEPTED] = state.rows[rows, NUM_TOKENS]

    monkeypatch.setattr(filling, "accept", accept_all)
    require_noticed("window with sinks")
