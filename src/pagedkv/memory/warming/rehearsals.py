"""What may be rehearsed: modules that do all that a part of the library can do, in a function ``rehearse``.

They are named, not imported: that of attention needs torch, and all are for a process of their own.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pagedkv.memory.compilation.loop_sources import PACKAGE_FOLDER
from pagedkv.memory.pool.eviction.registry import DEFAULT, policy_named

__all__ = ["ATTENTION", "FEATURES", "NO_FEATURES", "Rehearsal", "all_of", "of_curves", "of_model_curves", "of_spaces"]

FEATURES: Final = "features"
NO_FEATURES: Final = "no features"
"""What a rehearsal of spaces is told: whether their pools keep more than names."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One rehearsal.

    Args:
        module: where its function ``rehearse`` is.
        arguments: what that is called with.
        needs: a package without which it cannot be run, nor what it rehearses; none if empty.
    """

    module: str
    arguments: tuple[str, ...] = ()
    needs: str = ""

    @property
    def source(self) -> Path:
        """The file of the module."""
        return PACKAGE_FOLDER.joinpath(*self.module.split(".")[1:]).with_suffix(".py")

    @property
    def can_be_run(self) -> bool:
        """Whether what it needs is installed."""
        return not self.needs or find_spec(self.needs) is not None

    def run(self) -> None:
        """Do it, in this process."""
        import_module(self.module).rehearse(*self.arguments)


ATTENTION: Final = Rehearsal("pagedkv.memory.attention.rehearsal", needs="torch")
"""Attention on a CPU."""


def of_spaces(eviction: str, *, has_features: bool = True) -> Rehearsal:
    """Give what spaces with an eviction policy can do. Raises ConfigurationError: the policy is not known.

    ``has_features``: as :attr:`SpaceConfig.has_features <pagedkv.SpaceConfig>` says of a configuration.
    """
    with_all = has_features or policy_named(eviction) is not DEFAULT
    told = (policy_named(eviction).name, FEATURES if with_all else NO_FEATURES)
    return Rehearsal("pagedkv.memory.warming.rehearsal", told)


def of_curves(eviction: str) -> Rehearsal:
    """Give what curves of an eviction policy take. Raises ConfigurationError: the policy is not known."""
    return Rehearsal("pagedkv.planner.capacity.rehearsal", (policy_named(eviction).name, "blocks"))


def of_model_curves(eviction: str) -> Rehearsal:
    """Give what curves of an eviction policy take in a model. Raises ConfigurationError: the policy is not known."""
    return Rehearsal("pagedkv.planner.capacity.rehearsal", (policy_named(eviction).name, "model"))


def all_of(eviction: str) -> tuple[Rehearsal, ...]:
    """Give all that can be run, with this eviction policy. Raises ConfigurationError: the policy is not known."""
    spaces = (of_spaces(eviction), of_spaces(eviction, has_features=False))
    each = dict.fromkeys((*spaces, of_curves(eviction), of_model_curves(eviction), ATTENTION))
    return tuple(rehearsal for rehearsal in each if rehearsal.can_be_run)
