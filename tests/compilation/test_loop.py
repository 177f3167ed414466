"""Loops as pieces of others and as entries for Python."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numba
import numpy as np
import pytest

from pagedkv.blocks.sha256 import Bytes, Words, sha256_message
from pagedkv.compilation.compiled import chosen, chosen_by_policy, compiled, inlined
from pagedkv.compilation.loop import Loop
from pagedkv.compilation.loop_cache import sources_of_bound
from pagedkv.contract.arrays import Int32Array

pytestmark = pytest.mark.skipif(bool(cast("Any", numba).config.DISABLE_JIT), reason="loops are interpreted")


@inlined
def _doubled(value: int) -> int:
    return 2 * value


@compiled
def _added(values: Int32Array, more: int = 5, is_twice: bool = False) -> int:  # noqa: FBT001, FBT002  # Numba has no keywords alone
    total = 0
    for value in values:
        total += _doubled(value) if is_twice else value
    return total + more


@compiled
def _both(values: Int32Array) -> int:
    twice = _added(values, 1, True)  # noqa: FBT003  # as above
    return _added(values) + twice + _added(values, values[0])


def loop(function: object) -> Loop:
    assert isinstance(function, Loop)
    return function


def test_a_loop_that_loops_call_is_one_piece_whatever_integers_it_is_given() -> None:
    values = np.arange(4, dtype=np.int32)
    cast("Any", _both)._cache.disable()  # what is on disk needs no pieces
    assert _both(values) == (6 + 5) + (12 + 1) + (6 + 0)
    assert len(loop(_added)._pieces) == 1
    assert len(loop(_doubled)._pieces) == 1
    assert not loop(_added).overloads
    assert not loop(_doubled).overloads


def test_python_may_call_what_loops_call_with_and_without_defaults() -> None:
    values = np.arange(4, dtype=np.int32)
    assert _doubled(cast("int", np.int32(21))) == _doubled(21) == 42
    assert len(loop(_doubled).overloads) == 1
    assert _added(values) == 11
    assert _added(values, 1) == 7


def test_plain_numba_may_call_a_loop() -> None:
    def caller(values: Int32Array) -> int:
        return _both(values) + 1

    assert cast("Any", numba).njit(caller)(np.arange(4, dtype=np.int32)) == 31


def test_plain_numba_may_call_what_a_compiled_entry_has_inside() -> None:
    """LLVM found the piece in the entry, which shows nothing but its wrapper, and the caller jumped to address 0."""

    @compiled
    def twice(buffer: Bytes, out: Words) -> None:
        sha256_message(buffer, 3, out)
        sha256_message(buffer, 3, out)

    def caller(buffer: Bytes, out: Words) -> None:
        sha256_message(buffer, 3, out)

    cast("Any", twice)._cache.disable()  # what comes from the disk shows nothing to LLVM
    buffer, out = np.zeros(64, np.uint8), np.zeros(8, np.uint32)
    buffer[:3] = list(b"abc")
    twice(buffer, out)
    expected = out.tolist()
    buffer[3:] = out[:] = 0
    cast("Any", numba).njit(caller)(buffer, out)
    assert out.tolist() == expected


class Plain(NamedTuple):
    """What a default is meant for."""

    numbers: Int32Array


@inlined
def _of_plain(pair: Plain, value: int) -> int:
    return int(pair.numbers[0]) + value


@inlined
def _of_bound(pair: Plain, value: int) -> int:
    return int(pair.numbers[0]) - value


@dataclass
class Moments:
    """One moment."""

    change: Callable[[Plain, int], int]


class Bound(Plain):
    """What binds another."""

    __slots__ = ()
    policy: ClassVar = Moments(_of_bound)


_chosen = chosen_by_policy("change", _of_plain)


@compiled
def _ask(pair: Plain, value: int) -> int:
    return _chosen(pair, value)


@pytest.mark.parametrize("ask", [_ask, _chosen], ids=["compiled in", "called by Python"])
def test_the_class_of_the_first_argument_chooses(ask: Callable[[Plain, int], int]) -> None:
    numbers = np.array([10], np.int32)
    assert ask(Plain(numbers), 3) == 13
    assert ask(Bound(numbers), 3) == 7


def test_a_loop_with_one_choice_holds_nothing_of_the_other() -> None:
    numbers = np.array([10], np.int32)
    cast("Any", _ask)._cache.disable()
    _ask(Plain(numbers), 3)
    held = {str(piece) for piece in loop(_of_bound)._pieces}
    assert not any("Plain(" in kind for kind in held)


@inlined
def _none(*_arguments: object) -> None:
    pass


@inlined
def _write(pair: Plain, value: int) -> None:
    pair.numbers[0] = value


_write_bound = cast("Callable[[Plain, int], None]", chosen(lambda kind: _write if kind is Bound else _none))


@compiled
def _write_twice(pair: Plain, value: int) -> None:
    _write_bound(pair, value)
    _write_bound(pair, pair.numbers[0] + 1)


def test_a_loop_may_stand_for_nothing_whatever_it_takes() -> None:
    numbers = np.array([10], np.int32)
    _write_twice(Plain(numbers), 3)
    assert numbers[0] == 10
    _write_twice(Bound(numbers), 3)
    assert numbers[0] == 4


def test_what_is_bound_is_found_where_it_is_written() -> None:
    assert list(sources_of_bound(Plain)) == []
    assert list(sources_of_bound(Bound)) == [Path(__file__)]


@inlined
def _nothing(_pair: Plain, _value: int) -> None:
    pass


@inlined
def _never(_pair: Plain) -> bool:
    return False


@inlined
def _maybe(pair: Plain, value: int) -> None:
    if _never(pair):
        _nothing(pair, value)


@compiled
def _always(pair: Plain, value: int) -> None:
    _nothing(pair, value)


@compiled
def _maybe_then_always(pair: Plain, value: int) -> int:
    _maybe(pair, value)
    _always(pair, value)
    return value


def test_what_an_entry_links_stands_behind_all_that_needs_it() -> None:
    """LLVM leaves out what nothing needs that was linked before; who came later called no address."""
    cast("Any", _maybe_then_always)._cache.disable()
    assert _maybe_then_always(Plain(np.array([10], np.int32)), 3) == 3
    (piece,) = loop(_maybe_then_always)._pieces.values()
    order = [library for library in piece.library.reached() if library.name != "nrt"]  # Numba's own
    names = [library.name for library in order]
    assert names[0] == "_maybe_then_always"
    assert sorted(names) == ["_always", "_maybe", "_maybe_then_always", "_never", "_nothing"]
    for place, library in enumerate(order):
        assert all(order.index(needed) > place for needed in library._linking_libraries if needed in order)


FAILING = """
import numpy as np
from pagedkv.compilation.compiled import compiled, inlined

@inlined
def inner(x):
    if x > 1:
        raise ValueError("too large")
    return x

@compiled
def outer(x):
    return inner(x) + 1

print(outer(1))
try:
    outer(2)
except ValueError as error:
    print(error)
"""


def test_what_a_piece_raises_reaches_python() -> None:
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("2\ntoo large\n", 0), done.stderr
