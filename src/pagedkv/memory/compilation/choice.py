"""A loop that stands for others: which one is meant is decided by the class of the first argument, when it is compiled.

The class (a named tuple's) names the loops that are bound to it in tables, dataclasses with a field for each moment,
which are attributes of the class (``TABLES``). So machine code holds the loop that is meant, and none of the others;
interpreted, the same is decided at each call. What calls a moment imports nothing of what is bound to it: machine code
is kept under the sources of all loops that are bound to the classes of its arguments as well
(:mod:`~pagedkv.memory.compilation.loop_cache`).
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar, cast

from numba.core import types

from pagedkv.memory.compilation.loop import Loop

__all__ = ["MOMENTS", "POLICY", "TABLES", "chosen_by", "sources_of_bound"]

MOMENTS: Final = "moments"
POLICY: Final = "policy"
TABLES: Final = (MOMENTS, POLICY)
"""The attributes of a class that bind loops: what acts beside the core, and what decides about eviction in that."""

P = ParamSpec("P")
R = TypeVar("R")

Opaque: TypeAlias = Any
"""What Numba hands over and takes back: types of arguments, templates of calls."""


def chosen_by(table: str, name: str, default: Callable[P, R]) -> Callable[P, R]:
    """Make the loop that a class's table has under a name; for a class that has no such table, a default."""
    return _Choice(table, name, default)


def sources_of_bound(kind: type) -> Iterator[Path]:
    """Find the files of all loops that are bound to a class."""
    for table in TABLES:
        if (bound := getattr(kind, table, None)) is not None:
            for loop in (getattr(bound, each.name) for each in fields(bound)):
                if not isinstance(loop, _Choice):  # that is of the other table
                    yield Path(inspect.getfile(getattr(loop, "py_func", loop)))


class _Choice(Generic[P, R]):
    """What stands for several loops. Numba asks it as it asks the dispatcher of one function.

    One table may bind what another one is to decide.
    """

    is_compiling = False  # not by itself

    def __init__(self, table: str, name: str, default: Callable[P, R]) -> None:
        self._table = table
        self._name = name
        self._default = default
        self._type = cast("Opaque", types.Dispatcher)(self)

    def __call__(self, *args: P.args, **kws: P.kwargs) -> R:
        return self._loop_of(type(args[0]))(*args, **kws)

    @property
    def _numba_type_(self) -> Opaque:
        return self._type

    def get_call_template(self, args: Opaque, kws: Opaque) -> Opaque:
        """Give what a call with arguments of these types is."""
        return self._meant(args).get_call_template(args, kws)

    def get_overload(self, args: Opaque) -> Opaque:
        """Give what stands for the code of the loop that is meant, as :meth:`Loop.get_overload` does."""
        return self._meant(args).get_overload(args)

    def _meant(self, args: Opaque) -> Loop:
        loop = self._loop_of(args[0].instance_class)
        assert not isinstance(loop, FunctionType), "a loop that is compiled calls one that is not"
        return cast("Loop", loop)

    def _loop_of(self, kind: type) -> Callable[P, R]:
        bound = getattr(kind, self._table, None)
        return self._default if bound is None else cast("Callable[P, R]", getattr(bound, self._name))
