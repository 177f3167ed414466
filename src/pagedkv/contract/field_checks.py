"""Checks of the fields of specifications, and their short ``repr``."""

from dataclasses import fields
from typing import Any

from pagedkv.contract.arguments import as_count
from pagedkv.errors import ConfigurationError

__all__ = ["check_count", "check_flag", "require", "short_repr"]


def require(condition: bool, message: str) -> None:  # noqa: FBT001 - reads as an assertion
    """Raise ConfigurationError unless a condition holds."""
    if not condition:
        raise ConfigurationError(message)


def check_count(spec: object, name: str, *, least: int = 1) -> None:
    """Check a count in a field of a frozen dataclass, and store it there as a plain integer."""
    object.__setattr__(spec, name, as_count(getattr(spec, name), name, least=least))


def check_flag(spec: object, name: str) -> None:
    """Raise ConfigurationError unless a field is True or False."""
    given = getattr(spec, name)
    require(isinstance(given, bool), f"{name} must be True or False, got {given!r}")


def short_repr(spec: Any) -> str:  # noqa: ANN401 - any dataclass
    """Write a specification as Python would build it, without fields that have their default value."""
    shown = [item for item in fields(spec) if item.init and getattr(spec, item.name) != item.default]
    return f"{type(spec).__name__}({', '.join(f'{item.name}={getattr(spec, item.name)!r}' for item in shown)})"
