"""A loop that stands for others: which one is meant is decided by the type of the first argument, when it is compiled.

So machine code holds the one that is meant, and none of the others; interpreted, the same is decided at each call.
"""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, cast

from numba.core import types

from pagedkv.compilation.loop import Loop

__all__ = ["chosen_by_type"]

P = ParamSpec("P")
R = TypeVar("R")

Opaque: TypeAlias = Any
"""What Numba hands over and takes back: types of arguments, templates of calls."""


def chosen_by_type(loops: Mapping[type, Callable[P, R]]) -> Callable[P, R]:
    """Make a loop of several, each for a first argument of a class of its own (a named tuple's)."""
    return _Choice(loops)


class _Choice(Generic[P, R]):
    """What stands for several loops. Numba asks it as it asks the dispatcher of one function."""

    is_compiling = False  # not by itself

    def __init__(self, loops: Mapping[type, Callable[P, R]]) -> None:
        self._loops = dict(loops)
        self._type = cast("Opaque", types.Dispatcher)(self)

    def __call__(self, *args: P.args, **kws: P.kwargs) -> R:
        return self._loops[type(args[0])](*args, **kws)

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
        loop = self._loops[args[0].instance_class]
        assert not isinstance(loop, FunctionType), "a loop that is compiled calls one that is not"
        return cast("Loop", loop)
