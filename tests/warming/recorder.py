"""The entries that Python needs while a module runs, and those of them that the list lacks.

They are recorded in a process of its own, in which loops are plain Python; calls between loops are not recorded.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numba
from numba.core import types

from pagedkv.compilation import compiled as compiling

Found = set[tuple[str, tuple[Any, ...]]]


def recorded(module: str) -> tuple[set[str], list[str]]:
    """Call ``drive_all()`` of a module; answer the loops that Python called, and the lines that the list lacks."""
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.warming.recorder import record; record({module!r})"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loops, missing = json.loads(done.stdout.splitlines()[-1])
    return set(loops), missing


def record(module: str) -> None:
    """Record what a module needs, in this process, which has not imported any loop yet; print it."""
    found: Found = set()
    depth = 0

    def note(loop: Any, args: tuple[object, ...]) -> None:  # noqa: ANN401 - a function
        if "<locals>" not in loop.__qualname__ and len(args) == loop.__code__.co_argcount:
            kinds = tuple(_widened(cast("Any", numba).typeof(arg)) for arg in args)
            found.add((f"{loop.__module__}.{loop.__qualname__}".removeprefix("pagedkv."), kinds))

    def entry(function: Any, *, is_noted: bool) -> Callable[..., Any]:  # noqa: ANN401 - as above
        @wraps(function)
        def call(*args: object, **kws: object) -> object:
            nonlocal depth
            if is_noted and depth == 0 and not kws:
                note(function, args)
            depth += 1
            try:
                return function(*args, **kws)
            finally:
                depth -= 1

        return call

    def specialize(loop: Any, *examples: object) -> Callable[..., Any]:  # noqa: ANN401 - as above
        note(loop.__wrapped__, examples)
        return entry(loop.__wrapped__, is_noted=False)

    replaced = cast("Any", compiling)
    replaced._compile = lambda function, **_: entry(function, is_noted=True)
    replaced.specialize = specialize
    import_module(module).drive_all()
    loops = sorted({loop for loop, _ in found})
    sys.stdout.write(json.dumps((loops, sorted(_line(*each) for each in found - _listed()))))


def _listed() -> Found:
    from pagedkv.blocks.eviction.registry import POLICIES  # noqa: PLC0415 - loops are replaced before
    from pagedkv.warming.parts import all_of, type_of  # noqa: PLC0415 - as above

    entries = {entry for policy in POLICIES for part in all_of(policy) for entry in part.entries()}
    return {(entry.loop, tuple(type_of(each, entry.pool) for each in entry.arguments)) for entry in entries}


def _widened(kind: Any) -> Any:  # noqa: ANN401 - types of Numba
    return types.int64 if isinstance(kind, types.Integer) and cast("Any", kind).signed else kind


def _line(loop: str, kinds: tuple[Any, ...]) -> str:
    return " ".join((loop, *map(_text, kinds)))


def _text(kind: Any) -> str:  # noqa: ANN401 - as above
    if isinstance(kind, types.BaseNamedTuple):
        return str(cast("Any", kind).instance_class.__name__)
    if isinstance(kind, types.Array):
        return f"{kind.dtype}:{kind.ndim}{'' if kind.mutable else '!'}"
    return str(kind)
