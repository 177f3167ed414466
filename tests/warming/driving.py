"""State machines of all mixes, for the loops that random operations reach."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conftest import *  # noqa: F403  # the profiles
from tests.space.mixes import MIXES
from tests.space.test_cross_attention_machine import MIXES as ENCODERS, EncoderMachine, machine_of
from tests.space.test_state_machine import drive

RUNS = 12


def drive_all() -> None:
    """Drive each mix, with the eviction policy that it names, and those with encoders."""
    for mix in MIXES:
        drive(mix, RUNS)
    for groups in ENCODERS:
        chosen = settings(max_examples=RUNS, stateful_step_count=40, deadline=None)
        run_state_machine_as_test(machine_of(EncoderMachine, groups), settings=chosen)
