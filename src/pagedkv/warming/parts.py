"""Parts of the library and their entries: the loops that Python calls, with the types of the arguments.

They are read from ``entries.txt``, so that all can be compiled, in parallel, before any is called. It begins with
names of types: what arguments are like (:class:`~pagedkv.blocks.loops.Like`), and named tuples of arrays. Then it has a
section for each part, and sections for what only some of its pools have: an eviction policy, or features. A line is a
loop and its arguments: ``int32:2`` is a contiguous array of two dimensions, ``int32:1!`` a read-only one. A loop that
says what it takes beside its definition is a line without arguments. POOL are the arrays of a pool, of the class that
selects its code.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numba import from_dtype
from numba.core import types

from pagedkv.blocks.eviction.registry import DEFAULT, policy_named
from pagedkv.compilation.compiled import is_compiling_at_all
from pagedkv.compilation.loop_cache import PACKAGE, PACKAGE_FOLDER

LIST: Final = Path(__file__).with_name("entries.txt")
POOL: Final = "POOL"
FEATURES: Final = "features"

Opaque: TypeAlias = Any
"""Numba's types."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry.

    Args:
        loop: module and name of its loop, within the package.
        arguments: as in the list.
        pool: module and name of the class of arrays that POOL stands for; empty if no argument is one.
    """

    loop: str
    arguments: tuple[str, ...]
    pool: str = ""

    def compile(self) -> None:
        """Compile it, or load it from disk."""
        _named(self.loop).compile(tuple(type_of(argument, self.pool) for argument in self.arguments))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the library that calls loops.

    Args:
        sections: those of the list with its entries.
        pool: module and name of the class of its pools' arrays, if it has pools.
        needs: a package without which it cannot run; empty if there is none.
    """

    sections: tuple[str, ...]
    pool: str = ""
    needs: str = ""

    @property
    def can_be_run(self) -> bool:
        """Whether the package that it needs is installed."""
        return not self.needs or find_spec(self.needs) is not None

    @property
    def sources(self) -> list[Path]:
        """The files that say which entries it has, and those of its loops."""
        modules = {line[0].rpartition(".")[0] for line in self._lines()} | {self.pool.rpartition(".")[0]} - {""}
        return [LIST, *(PACKAGE_FOLDER.joinpath(*module.split(".")).with_suffix(".py") for module in modules)]

    def entries(self) -> Iterator[Entry]:
        """Yield its entries, those with most pieces in common one after the other."""
        for loop, *arguments in self._lines():
            kinds = tuple(arguments) or tuple(like.name for like in _named(loop).takes)
            yield Entry(loop, kinds, self.pool if POOL in kinds else "")

    def compile(self) -> None:
        """Compile all entries in this process, or load them from disk, unless loops are interpreted."""
        for entry in self.entries() if is_compiling_at_all() else ():
            entry.compile()

    def _lines(self) -> Iterator[list[str]]:
        listed = sections()
        return (line for name in self.sections for line in listed.get(name, ()))


def of_spaces(eviction: str, *, has_features: bool = True) -> Part:
    """Return spaces with an eviction policy. Raises ConfigurationError for an unknown policy.

    ``has_features``: as in :attr:`SpaceConfig.has_features <pagedkv.SpaceConfig>`.
    """
    if has_features or policy_named(eviction) is not DEFAULT:
        return Part(("spaces", f"spaces {FEATURES}", f"spaces {eviction}"), _pool_of(eviction, has_features=True))
    return Part(("spaces",), _pool_of(eviction))


def of_curves(eviction: str) -> Part:
    """Return curves of an eviction policy. Raises ConfigurationError for an unknown policy."""
    return Part(("curves", f"curves {eviction}"), _pool_of(eviction))


def of_model_curves(eviction: str) -> Part:
    """Return curves of an eviction policy in a model. Raises ConfigurationError for an unknown policy."""
    return Part(("models", f"models {eviction}"), _pool_of(eviction))


def of_stores(eviction: str) -> Part:
    """Return stores of tiers with an eviction policy. Raises ConfigurationError for an unknown policy."""
    return Part(("stores", f"stores {eviction}"), _pool_of(eviction))


ROUTING: Final = Part(("routing",))
"""A router and its index."""
ON_CPU: Final = Part(("on a cpu",), needs="torch")
"""What engines compute in loops on a CPU: attention, and block tables."""


def all_of(eviction: str) -> tuple[Part, ...]:
    """Return all parts that can run, for an eviction policy. Raises ConfigurationError for an unknown policy."""
    spaces = (of_spaces(eviction), of_spaces(eviction, has_features=False))
    others = (of_curves(eviction), of_model_curves(eviction), of_stores(eviction), ROUTING, ON_CPU)
    return tuple(part for part in dict.fromkeys((*spaces, *others)) if part.can_be_run)


def _pool_of(eviction: str, *, has_features: bool = False) -> str:
    """Name the class of arrays of pools with a policy. Raises ConfigurationError for an unknown policy."""
    policy = policy_named(eviction)
    if policy is DEFAULT and not has_features:
        return "blocks.record.PoolArrays"
    return f"{policy.arrays.__module__}.{policy.arrays.__qualname__}".removeprefix(f"{PACKAGE}.")


@cache
def sections() -> dict[str, list[list[str]]]:
    """Read the list: the lines of each section, in words. The section without a name has the names of types."""
    found: dict[str, list[list[str]]] = {"": []}
    name = ""
    for line in files(__package__).joinpath(LIST.name).read_text().splitlines():  # also from an archive
        if line.startswith("["):
            name = line[1:-1]
            found[name] = []
        elif line and not line.startswith("#"):
            found[name].append(line.split())
    return found


def type_of(argument: str, pool: str) -> Opaque:
    """Return Numba's type of an argument, as the list has it; ``pool`` names the class that POOL stands for."""
    if argument.startswith("("):
        return cast("Any", types.BaseTuple).from_types([type_of(each, pool) for each in argument[1:-1].split(",")])
    for name, kind, *fields in sections()[""]:
        if name == argument and fields:
            arrays = _named(pool if name == POOL else kind)
            return cast("Any", types.BaseTuple).from_types([type_of(each, pool) for each in fields], arrays)
        if name == argument:
            return type_of(kind, pool)
    dtype, _, dimensions = argument.rstrip("!").partition(":")
    number = cast("Any", from_dtype)(np.dtype(dtype))
    if not dimensions:
        return number
    return types.Array(number, int(dimensions), "C", readonly=argument.endswith("!"))


def _named(place: str) -> Opaque:
    module, _, name = place.rpartition(".")
    return getattr(import_module(f"{PACKAGE}.{module}"), name)
