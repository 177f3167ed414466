"""The loops that Python calls, and the types of the calls: recorded while the loops run as plain Python.

With :data:`RECORDING` in the environment, loops are not compiled but record each call from Python; calls between loops
are not recorded. So the list of loops to compile is known within seconds, and they can be compiled in parallel.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import Any, Final, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")

RECORDING: Final = "PAGEDKV_RECORD_LOOPS"


def is_recording() -> bool:
    """Whether this process records calls instead of compiling loops."""
    return RECORDING in os.environ


@dataclass(frozen=True, slots=True)
class Request:
    """One entry that Python needs.

    Args:
        module: the module of its loop.
        name: the loop's qualified name.
        kinds: Numba's types of the arguments.
    """

    module: str
    name: str
    kinds: tuple[Any, ...]

    def compile(self) -> None:
        """Compile the entry, unless it is on disk."""
        loop: Any = import_module(self.module)
        for part in self.name.split("."):
            loop = getattr(loop, part)
        loop.compile(self.kinds)


@dataclass(slots=True)
class Requests:
    """The entries that Python has needed in this process."""

    found: dict[Request, None] = field(default_factory=dict)
    _depth: int = 0

    def noting(self, loop: Callable[P, R]) -> Callable[P, R]:
        """Wrap a loop so that its calls from Python are recorded."""

        @wraps(loop)
        def call(*args: P.args, **kws: P.kwargs) -> R:
            if self._depth == 0 and not kws:
                self.note(loop, args)
            self._depth += 1
            try:
                return loop(*args, **kws)
            finally:
                self._depth -= 1

        return call

    def note(self, loop: Callable[..., object], args: tuple[object, ...]) -> None:
        """Record that Python calls a loop with these arguments, unless some are left out."""
        if "<locals>" not in loop.__qualname__ and len(args) == loop.__code__.co_argcount:
            kinds = tuple(cast("Any", numba).typeof(arg) for arg in args)
            self.found[Request(loop.__module__, loop.__qualname__, kinds)] = None


RECORDED: Final = Requests()
"""The requests of this process."""
