"""State machines of all mixes, for the loops that random operations reach."""

from tests.conftest import *  # noqa: F403  # the profiles
from tests.space.mixes import MIXES
from tests.space.test_state_machine import drive

RUNS = 12


def drive_all() -> None:
    """Drive each mix, with the eviction policy that it names."""
    for mix in MIXES:
        drive(mix, RUNS)
