"""Loops that a space calls often: their machine code is called without a look at the types of its arguments.

A loop says what it takes beside its definition::

    @takes(POOL, GROUP, ROWS, IDS, NUMBER)
    @compiled
    def some_loop(pool, group, rows, batch, step): ...

and a space calls it as ``state.loops[some_loop](...)``: it is compiled, or loaded from disk, at its first call, for the
types of this space's arrays. That saves the cost of finding the types of a dozen arrays on every call
(:func:`~pagedkv.compilation.compiled.specialize`). Callers pass contiguous arrays of the given dtypes.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import numpy as np

from pagedkv.blocks.digests import ExtraKeyArrays
from pagedkv.blocks.record import PoolArrays
from pagedkv.compilation.compiled import specialize
from pagedkv.contract.arrays import Int32Array

P = ParamSpec("P")
R = TypeVar("R")


class Like(Enum):
    """What an argument of a loop is like: an array of the space, or one with this dtype and so many dimensions."""

    POOL = auto()
    RECORDS = auto()
    COUNTS = auto()
    GROUP = auto()
    ROWS = auto()
    EXTRA_KEYS = auto()
    BOOK = auto()
    IDS = auto()
    LONGS = auto()
    PAIRS = auto()
    WORDS = auto()
    WORD_LIST = auto()
    NUMBER = auto()
    FLAG = auto()


def takes(*likes: Like) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a compiled loop with what its arguments are like, in their order."""

    def note(loop: Callable[P, R]) -> Callable[P, R]:
        cast("Any", loop).takes = likes
        return loop

    return note


class Loops(dict[Callable[..., Any], Callable[..., Any]]):
    """The machine code of the loops of one space, by loop.

    Attributes:
        examples: an example for each kind of argument.
    """

    def __init__(self, pool: PoolArrays, group: tuple[Any, ...], rows: Int32Array, extra_keys: ExtraKeyArrays) -> None:
        """Compile nothing yet. O(1)."""
        super().__init__()
        self.examples: dict[Like, Any] = {
            Like.POOL: pool,
            Like.RECORDS: pool.records,
            Like.COUNTS: pool.counts,
            Like.GROUP: group,
            Like.ROWS: rows,
            Like.EXTRA_KEYS: extra_keys,
            Like.IDS: np.zeros(0, np.int32),
            Like.LONGS: np.zeros(0, np.int64),
            Like.PAIRS: np.zeros((0, 2), np.int32),
            Like.WORDS: np.zeros((0, 8), np.uint32),
            Like.WORD_LIST: np.zeros(0, np.uint32),
            Like.NUMBER: 0,
            Like.FLAG: False,
        }

    if TYPE_CHECKING:

        def __getitem__(self, loop: Callable[P, R]) -> Callable[P, R]:
            """Return the machine code of a loop; it takes and returns what the loop does."""

    def __missing__(self, loop: Callable[P, R]) -> Callable[P, R]:
        entry = self[loop] = specialize(loop, *(self.examples[like] for like in cast("Any", loop).takes))
        return entry
