"""Result: a dataclass that tells its own JSON."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, cast


class Result:
    """A dataclass whose JSON has its fields, and the properties that ``DERIVED`` names."""

    __slots__ = ()

    DERIVED: ClassVar[tuple[str, ...]] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return all values for JSON."""
        names = (*(each.name for each in fields(cast("Any", self))), *self.DERIVED)
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: object) -> object:
    if isinstance(value, Result):
        return value.as_dict()
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value
