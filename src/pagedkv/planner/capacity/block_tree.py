"""Block ids of prompts as one tree: an id names a block *together with everything before it*, so it has one place.

Blocks are numbered 1, 2, ... in the order in which they first appear; 0 is the root, the empty prompt. A prompt is the
path from the root to its last block, and that block alone identifies it::

    prompts  7 8 9 | 7 8 4 | 5          0 -+- 1 (id 7) -- 2 (id 8) -+- 3 (id 9)
                                           |                        `- 4 (id 4)
                                           `- 5 (id 5)

So a trace takes memory for its distinct blocks and not for its references. A trace of coding agents has 27 times as
many references, since each prompt repeats the conversation. A block takes 18 to 24 bytes: its id, its parent, and its
number in a hash table with linear probing. A dictionary took a hundred.
"""

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Int64Array

T = TypeVar("T", bound=np.generic)

__all__ = ["ROOT", "BlockTree", "write_path"]

ROOT: Final = 0
NO_ID: Final = -1
FREE: Final = 0  # a slot of the table without a block
CONFLICT: Final = -1  # a prompt would give an id a second place
SPREAD: Final = 0x9E3779B1
WORD: Final = 2**32 - 1
UPPER: Final = 32
LEAST_ROOM: Final = 1024
SLOTS_A_BLOCK: Final = 2
"""After growing, the table has 1 to 2 slots a block: a lookup reads two or three."""
GROWTH: Final = 1.5


class BlockTree:
    """The tree of all prompts inserted so far.

    >>> tree = BlockTree()
    >>> [tree.insert(np.array(prompt)) for prompt in ([7, 8, 9], [7, 8, 4], [5], [7, 8], [])]
    [3, 4, 5, 2, 0]
    >>> tree.parents().tolist()
    [0, 0, 1, 2, 2, 0]
    """

    def __init__(self) -> None:
        self._num_blocks = 1  # the root
        self._parents = np.full(LEAST_ROOM, ROOT, np.int32)
        self._ids = np.full(LEAST_ROOM, NO_ID, np.int64)
        self._slots = np.zeros(SLOTS_A_BLOCK * LEAST_ROOM, np.int32)

    def insert(self, block_ids: npt.NDArray[np.int64]) -> int | None:
        """Add a prompt to the tree.

        Args:
            block_ids: int64 ``[n]``, none negative.

        Returns:
            The number of its last block (``ROOT`` for an empty prompt), or None if an id would get a second place; the
            tree is then unchanged. O(n); a known block takes about 1 ns.
        """
        self._make_room(len(block_ids))
        last_block = _insert(self._slots, self._ids, self._parents, self._num_blocks, block_ids)
        if last_block == CONFLICT:
            return None
        self._num_blocks = max(self._num_blocks, last_block + 1)
        return last_block

    def _make_room(self, num_blocks: int) -> None:
        """Grow the arrays to have room for this number of further blocks."""
        wanted = self._num_blocks + num_blocks
        if wanted > len(self._parents):
            room = max(wanted, int(GROWTH * len(self._parents)))
            self._parents = _grown(self._parents, room, ROOT)
            self._ids = _grown(self._ids, room, NO_ID)
        if wanted > len(self._slots):
            size = len(self._slots)
            while wanted > size:
                size *= SLOTS_A_BLOCK
            self._slots = np.zeros(size, np.int32)
            _fill_table(self._slots, self._ids, self._num_blocks)

    def parents(self) -> Int32Array:
        """Copy the tree: int32 ``[1 + blocks]``, the parent of each block, always a smaller number."""
        return self._parents[: self._num_blocks].copy()


def _grown(
    values: "np.ndarray[tuple[int], np.dtype[T]]", room: int, default: int
) -> "np.ndarray[tuple[int], np.dtype[T]]":
    grown = np.full(room, default, values.dtype)
    grown[: len(values)] = values
    return grown


@compiled
def _slot_of(slots: Int32Array, ids: Int64Array, block_id: int) -> int:
    """Find the slot that has an id's number, or the free slot for it."""
    slot = ((int(block_id) ^ int(block_id) >> UPPER) * SPREAD & WORD) % len(slots)
    while slots[slot] != FREE and ids[slots[slot]] != block_id:
        slot = slot + 1 if slot + 1 < len(slots) else 0
    return slot


@compiled
def _fill_table(slots: Int32Array, ids: Int64Array, num_blocks: int) -> None:
    """Insert all blocks into an empty table."""
    for block in range(1, num_blocks):
        slots[_slot_of(slots, ids, ids[block])] = block


@compiled
def _insert(slots: Int32Array, ids: Int64Array, parents: Int32Array, num_blocks: int, block_ids: Int64Array) -> int:
    """Add a prompt's blocks after the ``num_blocks`` existing ones; return its last one, or ``CONFLICT``."""
    num_known = _count_known(slots, ids, block_ids)
    last_block = slots[_slot_of(slots, ids, block_ids[num_known - 1])] if num_known else ROOT
    if not _is_path(parents, ids, last_block, block_ids[:num_known]):
        return CONFLICT
    for index in range(num_known, len(block_ids)):
        slot = _slot_of(slots, ids, block_ids[index])
        if slots[slot] != FREE:
            _take_back(slots, ids, num_blocks, num_blocks + index - num_known)
            return CONFLICT
        block = num_blocks + index - num_known
        slots[slot] = block
        ids[block] = block_ids[index]
        parents[block] = last_block
        last_block = block
    return int(last_block)


@compiled
def _count_known(slots: Int32Array, ids: Int64Array, block_ids: Int64Array) -> int:
    """Count the leading known ids by bisection; ids after them must be unknown."""
    low, high = 0, len(block_ids)
    while low < high:
        middle = (low + high) // 2
        if slots[_slot_of(slots, ids, block_ids[middle])] != FREE:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _take_back(slots: Int32Array, ids: Int64Array, first: int, stop: int) -> None:
    """Remove the latest blocks, in reverse, so that no remaining block was probed past a removed one."""
    for block in range(stop - 1, first - 1, -1):
        slots[_slot_of(slots, ids, ids[block])] = FREE


@compiled
def _is_path(parents: Int32Array, ids: Int64Array, last_block: int, block_ids: Int64Array) -> bool:
    """Return whether the path from the root to ``last_block`` has exactly these ids."""
    block = last_block
    for index in range(len(block_ids) - 1, -1, -1):
        if ids[block] != block_ids[index]:
            return False
        block = parents[block]
    return bool(block == ROOT)


@compiled
def write_path(parents: Int32Array, last_block: int, path: Int32Array) -> None:
    """Write the blocks of a prompt, head first."""
    block = last_block
    for index in range(len(path) - 1, -1, -1):
        path[index] = block
        block = parents[block]
