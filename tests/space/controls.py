"""What negative controls share: a machine on a broken space, to be stopped within few, always equal examples."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pagedkv import BlockSpace
from pagedkv.memory.contract.errors import PagedKVError
from tests.space.mixes import MIXES
from tests.space.operations import Sabotage
from tests.space.space_machine import machine_of
from tests.space.tangled_machine import tangled_machine_of

__all__ = ["replace_method", "require_noticed", "require_noticed_in_tangles"]


def require_noticed(mix_name: str, sabotage: Sabotage | None = None) -> None:
    """Run the state machine on a broken space; an assertion, a missing error or one out of place must stop it."""
    _require_noticed(mix_name, sabotage, tangled=False)


def require_noticed_in_tangles(mix_name: str, sabotage: Sabotage | None = None) -> None:
    """Run the machine of tangled rows on a broken space, and expect the same."""
    _require_noticed(mix_name, sabotage, tangled=True)


def _require_noticed(mix_name: str, sabotage: Sabotage | None, *, tangled: bool) -> None:
    mix = next(mix for mix in MIXES if mix.name == mix_name)
    machine = (tangled_machine_of if tangled else machine_of)(mix, Counter(), sabotage)
    bounded = settings(
        settings.get_profile("pagedkv"),
        max_examples=1000 if tangled else 2000,  # at most: a fault that is noticed ends them
        stateful_step_count=12 if tangled else 50,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
    )
    with pytest.raises((AssertionError, pytest.fail.Exception, PagedKVError)):
        run_state_machine_as_test(machine, settings=bounded)


def replace_method(
    space: BlockSpace, name: str, wrap: Callable[[Callable[..., object]], Callable[..., object]]
) -> None:
    """Put a wrapper around a method of one space."""
    setattr(space, name, wrap(getattr(space, name)))
