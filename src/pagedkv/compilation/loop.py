"""A compiled loop: a function for Python, and a piece of code for other loops.

A piece is the output of Numba's front end for a function and given types of arguments: it is not optimised, not machine
code, and not wrapped for Python. An entry is one module with one wrapper and all pieces that a loop reaches, each once;
it is optimised and turned into machine code once.

Numba itself turns every function into a library that is optimised, emitted, and wrapped for Python and for C; and it is
emitted again in each library that calls it. For loops that are called by other loops, only the front end's output is
needed.

A loop takes every signed integer as int64, whatever its type in the call. Ids are int32 in arrays and int64 in ranges;
otherwise each would need a function of its own.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias, cast

from llvmlite.binding import Linkage, ObjectFileRef  # type: ignore[import-untyped]
from numba.core import compiler, sigutils, types, typing
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import _FunctionCompiler
from numba.core.environment import lookup_environment
from numba.core.registry import CPUDispatcher

from pagedkv.compilation.notice import NOTICE

Opaque: TypeAlias = Any
"""Objects that Numba passes in and takes back: types, flags, contexts, results of its compiler, templates of calls."""
ENVIRONMENT: Final = "_ZN08NumbaEnv"
"""Prefix of Numba's names of environments, in which a function's exceptions are looked up."""


class PieceLibrary(JITCodeLibrary):
    """The code of one function, to be linked, as the front end left it."""

    _closed: Opaque = None

    def finalize(self) -> None:
        """Close the library, as Numba requires before linking it."""
        self._finalized = True

    def reached(self) -> list[JITCodeLibrary]:
        """List all libraries that this one needs, itself first, each after all libraries that need it.

        LLVM links only functions that are needed so far. If the only caller of a function so far was optimised away,
        the function is left out, and a caller that is linked later would find no address.
        """
        behind: dict[JITCodeLibrary, None] = {}
        self._note_behind(behind)
        return list(behind)[::-1]

    def _note_behind(self, behind: dict[JITCodeLibrary, None]) -> None:
        """Add the libraries that this one needs, and then itself, to those found before."""
        for library in reversed(self._linking_libraries):
            if library in behind:
                continue
            if isinstance(library, PieceLibrary):
                library._note_behind(behind)
            behind[library] = None
        behind[self] = None

    def own_module(self) -> Opaque:
        """Return the code of its function alone."""
        return super()._get_module_for_linking()

    def _get_module_for_linking(self) -> Opaque:
        """Return the code of this function and of all that it needs, for a library of plain Numba, which links once."""
        if self._closed is None:
            own, *others = map(_Linked, self.reached())
            self._closed = own._get_module_for_linking().clone()
            for library in others:
                self._closed.link_in(library._get_module_for_linking(), preserve=True)
        return self._closed


@dataclass(frozen=True)
class _Linked:
    """A library as an entry links it: a piece alone, since the entry links the pieces that it needs itself."""

    library: Opaque

    @property
    def _reload_init(self) -> Opaque:
        return self.library._reload_init

    def _get_module_for_linking(self) -> Opaque:
        library = self.library
        return library.own_module() if isinstance(library, PieceLibrary) else library._get_module_for_linking()


class EntryLibrary(JITCodeLibrary):
    """The code of one function for Python, which is called only through its wrapper.

    Args:
        wrapper: the wrapper's name.
    """

    def __init__(self, codegen: Opaque, name: str, wrapper: str) -> None:
        super().__init__(codegen, name)
        self._wrapper = wrapper

    def _optimize_final_module(self) -> None:
        """Optimise the whole module, in which only the wrapper is visible from outside.

        Otherwise LLVM must assume that another module may replace each function, and drops no unused argument of it: a
        call passed all arrays of a pool, 130 ns more.

        The functions are also renamed. Under their own names, LLVM would resolve calls from plain Numba to them, and
        find no address.
        """
        for function in self._final_module.functions:
            if not function.is_declaration and function.name != self._wrapper:
                function.linkage = Linkage.internal
                function.name = f"inside.{function.name}"
        super()._optimize_final_module()

    def link(self, piece: PieceLibrary) -> None:
        """Link a piece, and all that it needs, into this library."""
        self._linking_libraries += map(_Linked, piece.reached())

    def environments(self) -> list[Opaque]:
        """Find the environments that the machine code refers to: the loop's own and those of its pieces."""
        names = (variable.name for variable in self._final_module.global_variables if not variable.is_declaration)
        found = (lookup_environment(name) for name in names if name.startswith(ENVIRONMENT))
        return [environment for environment in found if environment is not None]

    def set_environments(self, environments: list[Opaque]) -> None:
        """Set the addresses of the environments, which differ between processes, in the machine code."""
        for environment in environments:
            self.codegen.set_env(environment.env_name, environment)

    def machine_code(self) -> tuple[bytes, set[str]]:
        """Return the machine code as an object file, and the names that it defines."""
        module = self._final_module
        return self._get_compiled_object(), {
            symbol.name
            for symbol in (*module.functions, *module.global_variables)
            if not symbol.is_declaration and symbol.linkage != Linkage.internal
        }

    def load(self, code: bytes, names: set[str]) -> None:
        """Load machine code that a compatible process made, instead of compiling."""
        engine = self.codegen._engine  # as Numba's own libraries load theirs
        engine._ee.add_object_file(ObjectFileRef.from_data(code))
        engine._defined_symbols |= names
        engine.finalize_object()
        self._finalized = True


class _Flags(compiler.Flags):
    """Flags of one compilation, which do not change once it has begun; most comparisons are with themselves.

    Numba looks up its templates by flags, for each operator of each function, and compares some thirty values each
    time.
    """

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not _Flags:
            return False
        own, others = self._values, other._values  # the values that were set; all others are Numba's defaults
        return bool(own == others or (own.keys() != others.keys() and super().__eq__(other)))

    def __hash__(self) -> int:
        return hash(_Flags)  # flags differ so rarely that one hash is enough


class PieceCompiler(_FunctionCompiler):
    """The compiler of the pieces of one function."""

    def __init__(self, function: Opaque, target: Opaque, options: dict[str, Any]) -> None:
        super().__init__(function, target, options, {}, _Pipeline)

    def _customize_flags(self, flags: Opaque) -> Opaque:
        flags = _Flags(flags)
        flags.no_compile = True
        flags.no_cpython_wrapper = True
        flags.no_cfunc_wrapper = True
        return flags


class _Pipeline(compiler.Compiler):
    """Numba's pipeline, up to a piece."""

    def compile_extra(self, func: Opaque) -> Opaque:
        self.state.library = PieceLibrary(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)


def entry_of(piece: Opaque, *, releases_gil: bool) -> Opaque:
    """Make the entry of a piece: a result of Numba's compiler, in the form that its dispatchers store."""
    context, described = piece.target_context, piece.fndesc
    library = EntryLibrary(context.codegen(), described.qualname, described.llvm_cpython_wrapper_name)
    library.enable_object_caching()
    library.link(piece.library)
    context.create_cpython_wrapper(library, described, piece.environment, piece.call_helper, release_gil=releases_gil)
    library.finalize()
    library.set_environments(library.environments())
    function = context.get_executable(library, described, piece.environment)
    return piece._replace(library=library, entry_point=function)


def packed(entry: Opaque) -> Opaque:
    """Return the parts from which an entry can be restored, for pickling."""
    described = entry.fndesc
    described.typemap = described.calltypes = None  # as in Numba's caches: not needed, and may not be picklable
    library = entry.library
    environments = [each for each in library.environments() if each.can_cache()]
    return library.name, library.machine_code(), described, entry.environment, entry.signature, environments


def restored(context: Opaque, parts: Opaque) -> Opaque:
    """Restore an entry from the parts that :func:`packed` returned, in this process or another."""
    name, (code, names), described, environment, signature, environments = parts
    library = EntryLibrary(context.codegen(), name, described.llvm_cpython_wrapper_name)
    library.load(code, names)
    function = context.get_executable(library, described, environment)
    library.set_environments(environments)
    return compiler.compile_result(
        typing_context=context.typing_context,
        target_context=context,
        library=library,
        environment=environment,
        entry_point=function,
        fndesc=described,
        signature=signature,
        objectmode=False,
        reload_init=[],
        referenced_envs=environments,
    )


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
