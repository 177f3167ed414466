"""A compiled loop: to Python a function, to other loops a piece of theirs (:mod:`pagedkv.memory.compilation.piece`).

A loop takes every signed integer as int64, whatever it is where the loop is called. Ids come as int32 out of arrays and
as int64 out of ranges; each would be a function of its own.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

from numba.core import sigutils, types, typing
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from pagedkv.memory.compilation.notice import NOTICE
from pagedkv.memory.compilation.piece import PieceCompiler, entry_of

__all__ = ["Loop"]

Opaque: TypeAlias = Any
"""What Numba hands over and takes back: types, results of its compiler, templates of calls."""


class Loop(CPUDispatcher):
    """One loop.

    Args:
        function: as it was written.
        options: what Numba is to mind, as of ``numba.njit``.
    """

    def __init__(self, function: Callable[..., object], options: dict[str, Any]) -> None:
        super().__init__(function, targetoptions=options)
        self._piece_compiler = PieceCompiler(function, self.targetdescr, options)
        self._pieces: dict[tuple[Opaque, ...], Opaque] = {}
        self._compiler = _EntryCompiler(self)

    def compile(self, sig: Opaque) -> Opaque:
        """Give the machine code for Python, for arguments of these types: from the disk, or compiled."""
        args, _ = sigutils.normalize_signature(sig)
        return super().compile(tuple(map(_widened, args)))

    def get_call_template(self, args: Opaque, kws: Opaque) -> Opaque:
        """Give what a call by another loop is: for Numba's type inference."""
        signature, folded = self.folded(args, kws)
        types_of_args = tuple(_widened(_of_default(kind)) for kind in folded)
        name = self.py_func.__name__
        template = typing.make_concrete_template(name, key=name, signatures=[self.piece(types_of_args).signature])
        return template, signature, types_of_args, {}

    def get_overload(self, sig: Opaque) -> Opaque:
        """Give what stands for the piece in calls by other loops."""
        return self._pieces[tuple(sig)].fndesc

    def folded(self, args: Opaque, kws: Opaque) -> Opaque:
        """Put arguments in order and those that were left out in their places."""
        return self._piece_compiler.fold_argument_types(args, kws)

    def piece(self, args: tuple[Opaque, ...]) -> Opaque:
        """Give the piece for arguments of exactly these types. O(1) once it is made."""
        if args not in self._pieces:
            with global_compiler_lock, NOTICE.compiling(self._folder), without_collections():
                piece = self._piece_compiler.compile(args, None)
            self.targetctx.insert_user_function(piece.fndesc, piece.fndesc, [piece.library])
            self._pieces[args] = piece
        return self._pieces[args]

    def entry(self, args: tuple[Opaque, ...]) -> Opaque:
        """Compile the entry for arguments of exactly these types."""
        with global_compiler_lock, NOTICE.compiling(self._folder), without_collections():
            return entry_of(self.piece(args), releases_gil=bool(self.targetoptions.get("nogil")))

    def _folder(self) -> str | None:
        return cast("str | None", self._cache.cache_path)


@contextmanager
def without_collections() -> Iterator[None]:
    """Put the collection of garbage off: what a compiler makes lives on, and looking through it takes a sixth more."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _EntryCompiler:
    """What the dispatcher of Python's calls has compile what it does not find."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def fold_argument_types(self, args: Opaque, kws: Opaque) -> Opaque:
        return self._loop.folded(args, kws)

    def compile(self, args: Opaque, _return_type: Opaque) -> Opaque:
        return self._loop.entry(tuple(args))


def _of_default(kind: Opaque) -> Opaque:
    """Give the type of an argument that another loop left out. Python hands over a mark in its place, which stays."""
    if isinstance(kind, types.Omitted) and isinstance(kind.value, int):
        return types.boolean if isinstance(kind.value, bool) else types.int64
    return kind


def _widened(kind: Opaque) -> Opaque:
    """Give the type that a loop takes an argument as: no constant, and of signed integers the widest."""
    if isinstance(kind, types.Literal) and isinstance(kind.literal_type, types.Integer | types.Boolean):
        kind = kind.literal_type
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind
