"""A compiled loop: a function for Python, a piece of code for other loops (:mod:`pagedkv.compilation.piece`).

A loop takes every signed integer as int64, whatever its type in the call. Ids are int32 in arrays and int64 in ranges;
otherwise each would need a function of its own.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias, cast

from numba.core import sigutils, types, typing
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from pagedkv.compilation.notice import NOTICE
from pagedkv.compilation.piece import PieceCompiler, entry_of

Opaque: TypeAlias = Any
"""Objects that Numba passes in and takes back: types, results of its compiler, templates of calls."""


class Loop(CPUDispatcher):
    """One loop.

    Args:
        function: the Python function.
        options: Numba's options, as of ``numba.njit``.
    """

    def __init__(self, function: Callable[..., object], options: dict[str, Any]) -> None:
        super().__init__(function, targetoptions=options)
        self._pieces: dict[tuple[Opaque, ...], Opaque] = {}
        self._compiler = _EntryCompiler(self)

    @cached_property
    def _piece_compiler(self) -> PieceCompiler:
        """The compiler of the loop's pieces, made when one is compiled: most processes find all entries on disk."""
        return PieceCompiler(self.py_func, self.targetdescr, self.targetoptions)

    def compile(self, sig: Opaque) -> Opaque:
        """Return the machine code for Python and arguments of these types, from disk or compiled."""
        args, _ = sigutils.normalize_signature(sig)
        return super().compile(tuple(map(_widened, args)))

    def get_call_template(self, args: Opaque, kws: Opaque) -> Opaque:
        """Return the template of a call by another loop, for Numba's type inference."""
        signature, folded = self.folded(args, kws)
        types_of_args = tuple(_widened(_of_default(kind)) for kind in folded)
        name = self.py_func.__name__
        template = typing.make_concrete_template(name, key=name, signatures=[self.piece(types_of_args).signature])
        return template, signature, types_of_args, {}

    def get_overload(self, sig: Opaque) -> Opaque:
        """Return the description of the piece that calls by other loops use."""
        return self._pieces[tuple(sig)].fndesc

    def folded(self, args: Opaque, kws: Opaque) -> Opaque:
        """Put arguments in order, and insert those that were left out."""
        return self._piece_compiler.fold_argument_types(args, kws)

    def piece(self, args: tuple[Opaque, ...]) -> Opaque:
        """Return the piece for arguments of exactly these types. O(1) once it is made."""
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
    """Disable garbage collection: a compiler's objects stay alive, and traversing them takes a sixth more time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _EntryCompiler:
    """The compiler of Python's dispatcher, called for entries that are not cached."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def fold_argument_types(self, args: Opaque, kws: Opaque) -> Opaque:
        return self._loop.folded(args, kws)

    def compile(self, args: Opaque, _return_type: Opaque) -> Opaque:
        return self._loop.entry(tuple(args))


def _of_default(kind: Opaque) -> Opaque:
    """Return the type of an argument that another loop left out; Python passes a marker for it, which is kept."""
    if isinstance(kind, types.Omitted) and isinstance(kind.value, int):
        return types.boolean if isinstance(kind.value, bool) else types.int64
    return kind


def _widened(kind: Opaque) -> Opaque:
    """Return the type as which a loop takes an argument: constants become their type, signed integers int64."""
    if isinstance(kind, types.Literal) and isinstance(kind.literal_type, types.Integer | types.Boolean):
        kind = kind.literal_type
    return types.int64 if isinstance(kind, types.Integer) and kind.signed else kind
