"""Rehearsals: modules with a function ``rehearse`` that does all operations of a part of the library once.

They are given by name and not imported: the one of attention needs torch, and all run in a separate process.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pagedkv.blocks.eviction.registry import DEFAULT, policy_named
from pagedkv.compilation.loop_sources import PACKAGE_FOLDER

FEATURES: Final = "features"
NO_FEATURES: Final = "no features"
"""The argument of a rehearsal of spaces: whether their pools have features."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One rehearsal.

    Args:
        module: the module of its function ``rehearse``.
        arguments: the arguments of the function.
        needs: a package without which neither the rehearsal nor the rehearsed part can run; empty if there is none.
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
        """Whether the package that it needs is installed."""
        return not self.needs or find_spec(self.needs) is not None

    def run(self) -> None:
        """Run the rehearsal in this process."""
        import_module(self.module).rehearse(*self.arguments)


ATTENTION: Final = Rehearsal("pagedkv.attention.rehearsal", needs="torch")
"""Attention on a CPU."""
ROUTING: Final = Rehearsal("pagedkv.routing.rehearsal")
"""A router and its index."""


def of_spaces(eviction: str, *, has_features: bool = True) -> Rehearsal:
    """Return the rehearsal of spaces with an eviction policy. Raises ConfigurationError for an unknown policy.

    ``has_features``: as in :attr:`SpaceConfig.has_features <pagedkv.SpaceConfig>`.
    """
    with_all = has_features or policy_named(eviction) is not DEFAULT
    arguments = (policy_named(eviction).name, FEATURES if with_all else NO_FEATURES)
    return Rehearsal("pagedkv.warming.rehearsal", arguments)


def of_curves(eviction: str) -> Rehearsal:
    """Return the rehearsal of curves of an eviction policy. Raises ConfigurationError for an unknown policy."""
    return Rehearsal("pagedkv.planner.capacity.model_curve", (policy_named(eviction).name, "blocks"))


def of_model_curves(eviction: str) -> Rehearsal:
    """Return the rehearsal of curves of an eviction policy in a model. Raises ConfigurationError for an unknown one."""
    return Rehearsal("pagedkv.planner.capacity.model_curve", (policy_named(eviction).name, "model"))


def of_stores(eviction: str) -> Rehearsal:
    """Return the rehearsal of stores of tiers with an eviction policy. Raises ConfigurationError for an unknown one."""
    return Rehearsal("pagedkv.tiers.core", (policy_named(eviction).name,))


def all_of(eviction: str) -> tuple[Rehearsal, ...]:
    """Return all rehearsals that can run, for an eviction policy. Raises ConfigurationError for an unknown policy."""
    spaces = (of_spaces(eviction), of_spaces(eviction, has_features=False))
    others = (of_curves(eviction), of_model_curves(eviction), of_stores(eviction), ROUTING, ATTENTION)
    each = dict.fromkeys((*spaces, *others))
    return tuple(rehearsal for rehearsal in each if rehearsal.can_be_run)
