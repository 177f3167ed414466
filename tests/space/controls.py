"""What negative controls share: a machine on a broken space, to be stopped within few, always equal examples."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from pagedkv import BlockSpace
from pagedkv.errors import PagedKVError
from tests.space.mixes import MIXES
from tests.space.operations import Sabotage
from tests.space.space_machine import machine_of
from tests.space.tangled_machine import tangled_machine_of

__all__ = ["EXAMPLES", "SEED", "replace_method", "require_noticed", "require_noticed_in_tangles", "require_stopped"]

SEED: Final = "PAGEDKV_CONTROL_SEED"
EXAMPLES: Final = "PAGEDKV_CONTROL_EXAMPLES"
"""Variables of the environment: another seed, and other numbers of examples, for all controls."""


def require_noticed(mix_name: str, sabotage: Sabotage | None = None, *, first_seed: int = 0) -> None:
    """Run the state machine on a broken space; an assertion, a missing error or one out of place must stop it.

    ``first_seed``: with it the fault is noticed early, with any other later: `python -m tests.space.find_seeds` finds
    one again where the machine's rules have changed.
    """
    _require_noticed(mix_name, sabotage, first_seed, tangled=False)


def require_noticed_in_tangles(mix_name: str, sabotage: Sabotage | None = None, *, first_seed: int = 0) -> None:
    """Run the machine of tangled rows on a broken space, and expect the same."""
    _require_noticed(mix_name, sabotage, first_seed, tangled=True)


def _require_noticed(mix_name: str, sabotage: Sabotage | None, first_seed: int, *, tangled: bool) -> None:
    mix = next(mix for mix in MIXES if mix.name == mix_name)
    machine = (tangled_machine_of if tangled else machine_of)(mix, Counter(), sabotage)
    require_stopped(machine, 1000 if tangled else 2000, 12 if tangled else 50, first_seed)


def require_stopped(
    machine: type[RuleBasedStateMachine], num_examples: int, num_steps: int, first_seed: int = 0
) -> None:
    """Run a machine that must fail within so many examples, of so many steps each; the first failure ends it."""
    chosen, most = os.environ.get(SEED, str(first_seed)), os.environ.get(EXAMPLES, str(num_examples))
    bounded = settings(
        settings.get_profile("pagedkv"),
        max_examples=int(most),
        stateful_step_count=num_steps,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
    )
    with pytest.raises((AssertionError, pytest.fail.Exception, PagedKVError)):
        run_state_machine_as_test(seed(int(chosen))(machine), settings=bounded)


def replace_method(
    space: BlockSpace, name: str, wrap: Callable[[Callable[..., object]], Callable[..., object]]
) -> None:
    """Put a wrapper around a method of one space."""
    setattr(space, name, wrap(getattr(space, name)))
