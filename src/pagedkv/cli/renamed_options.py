"""Options that have another name now: the old name is refused with the new one."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pagedkv.memory.contract.errors import ConfigurationError

__all__ = ["NEW_NAMES", "refuse_old_names"]

NEW_NAMES: Final[Mapping[str, str]] = MappingProxyType({"--policy": "--eviction", "--speed": "--load"})
"""The new names of options, by the old ones."""


def refuse_old_names(typed: Sequence[str], options: Collection[str]) -> None:
    """Refuse an old name of an option that a command has.

    Args:
        typed: the arguments of the command.
        options: all that it takes.

    Raises:
        ConfigurationError: one of the arguments is an old name.
    """
    for word in typed:
        if word == "--":
            return
        old = word.partition("=")[0]
        new = NEW_NAMES.get(old)
        if new in options and old not in options:
            raise ConfigurationError(f"{old} is called {new} now")
