"""Renamed commands and options: an old name is refused, and the message has the new one."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pagedkv.errors import ConfigurationError

__all__ = ["NEW_COMMANDS", "NEW_OPTIONS", "refuse_old_command", "refuse_old_options"]

NEW_COMMANDS: Final[Mapping[str, str]] = MappingProxyType({"demo-replay": "replay examples/conversations.jsonl.gz"})
"""The replacements of commands, by their old names."""

NEW_OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"--policy": "--eviction", "--speed": "--load", "--one-at-a-time": "--max-sequences 1"}
)
"""The replacements of options, by their old names."""


def refuse_old_command(typed: Sequence[str]) -> None:
    """Refuse an old name of a command, given all typed words.

    Raises:
        ConfigurationError: the first word is an old name.
    """
    new = NEW_COMMANDS.get(next(iter(typed), ""))
    if new is not None:
        raise ConfigurationError(f"{typed[0]} is gone: pagedkv {new} does the same")


def refuse_old_options(typed: Sequence[str], options: Collection[str]) -> None:
    """Refuse an old name of an option that a command has.

    Args:
        typed: the arguments of the command.
        options: all options of the command.

    Raises:
        ConfigurationError: one of the arguments is an old name.
    """
    for word in typed:
        if word == "--":
            return
        old = word.partition("=")[0]
        new = NEW_OPTIONS.get(old)
        if new is not None and new.partition(" ")[0] in options and old not in options:
            raise ConfigurationError(f"{old} is called {new} now")
