"""A loop that stands for several others: the class of its first argument selects one of them at compile time.

So machine code contains the selected loop and none of the others; interpreted code selects it at each call. This serves
pools (:mod:`pagedkv.blocks.record`): the loops of features are left out for a class without any, and the class binds
the loops of its eviction policy. A policy is imported by nobody who calls it. Therefore the key of machine code also
covers the sources of all loops that are bound to the classes of its arguments
(:mod:`~pagedkv.compilation.loop_cache`).
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar, cast

from numba.core import types

from pagedkv.compilation.loop import Loop

POLICY: Final = "policy"
"""The attribute of a class that binds loops: a dataclass with a field for each of them."""

P = ParamSpec("P")
R = TypeVar("R")

Opaque: TypeAlias = Any
"""Objects that Numba passes in and takes back: types of arguments, templates of calls."""


def chosen(loop_of: Callable[[type], Callable[P, R]]) -> Callable[P, R]:
    """Make a loop that stands for the one that a function returns for the class of the first argument."""
    return _Choice(loop_of)


def chosen_by_policy(name: str, default: Callable[P, R]) -> Callable[P, R]:
    """Make a loop that stands for ``policy.<name>`` of the first argument's class; the default if it has no policy."""

    def loop_of(kind: type) -> Callable[P, R]:
        bound = getattr(kind, POLICY, None)
        return default if bound is None else cast("Callable[P, R]", getattr(bound, name))

    return _Choice(loop_of)


def sources_of_bound(kind: type) -> Iterator[Path]:
    """Find the files of all loops that are bound to a class."""
    if (bound := getattr(kind, POLICY, None)) is not None:
        for loop in (getattr(bound, each.name) for each in fields(bound)):
            yield Path(inspect.getfile(getattr(loop, "py_func", loop)))


class _Choice(Generic[P, R]):
    """A stand-in for several loops, with the interface by which Numba uses the dispatcher of one function."""

    is_compiling = False  # it never compiles itself

    def __init__(self, loop_of: Callable[[type], Callable[P, R]]) -> None:
        self._loop_of = loop_of
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
        first = args[0]
        if isinstance(first, types.StarArgTuple | types.StarArgUniTuple):  # of a loop that takes any arguments
            first = first[0]
        loop = self._loop_of(first.instance_class)
        assert not isinstance(loop, FunctionType), "a loop that is compiled calls one that is not"
        return cast("Loop", loop)
