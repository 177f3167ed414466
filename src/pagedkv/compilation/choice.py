"""A loop that stands for several others: the class of its first argument selects one of them at compile time.

The class (a named tuple's) has attributes (``TABLES``) that bind loops: dataclasses with a field for each moment. So
machine code contains the selected loop and none of the others; interpreted code selects it at each call. A caller of a
moment does not import the loops bound to it. Therefore the key of its machine code also covers the sources of all loops
that are bound to the classes of its arguments (:mod:`~pagedkv.compilation.loop_cache`).
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar, cast

from numba.core import types

from pagedkv.compilation.loop import Loop

__all__ = ["MOMENTS", "POLICY", "TABLES", "chosen_by", "sources_of_bound"]

MOMENTS: Final = "moments"
POLICY: Final = "policy"
TABLES: Final = (MOMENTS, POLICY)
"""The attributes of a class that bind loops: those of features, and, called by these, those of the eviction policy."""

P = ParamSpec("P")
R = TypeVar("R")

Opaque: TypeAlias = Any
"""Objects that Numba passes in and takes back: types of arguments, templates of calls."""


def chosen_by(table: str, name: str, default: Callable[P, R]) -> Callable[P, R]:
    """Make a loop that stands for the one that a class's table has as ``name``; the default for classes without it."""
    return _Choice(table, name, default)


def sources_of_bound(kind: type) -> Iterator[Path]:
    """Find the files of all loops that are bound to a class."""
    for table in TABLES:
        if (bound := getattr(kind, table, None)) is not None:
            for loop in (getattr(bound, each.name) for each in fields(bound)):
                if not isinstance(loop, _Choice):  # it belongs to the other table
                    yield Path(inspect.getfile(getattr(loop, "py_func", loop)))


class _Choice(Generic[P, R]):
    """A stand-in for several loops, with the interface by which Numba uses the dispatcher of one function.

    A table may bind a choice that the other table decides.
    """

    is_compiling = False  # it never compiles itself

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
        """Return the template of a call with arguments of these types."""
        return self._meant(args).get_call_template(args, kws)

    def get_overload(self, args: Opaque) -> Opaque:
        """Return the code of the selected loop, as :meth:`Loop.get_overload` does."""
        return self._meant(args).get_overload(args)

    def _meant(self, args: Opaque) -> Loop:
        loop = self._loop_of(args[0].instance_class)
        assert not isinstance(loop, FunctionType), "a loop that is compiled calls one that is not"
        return cast("Loop", loop)

    def _loop_of(self, kind: type) -> Callable[P, R]:
        bound = getattr(kind, self._table, None)
        return self._default if bound is None else cast("Callable[P, R]", getattr(bound, self._name))
