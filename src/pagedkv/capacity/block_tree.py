"""Block ids of prompts as one tree: an id names a block *together with everything before it*, so it has one place.

Owns the numbers 1, 2, ... of blocks in the order in which they first appear; 0 is the root, the empty prompt. A
prompt is the path from the root to its last block, and that block alone tells it::

    prompts  7 8 9 | 7 8 4 | 5          0 -+- 1 (id 7) -- 2 (id 8) -+- 3 (id 9)
                                           |                        `- 4 (id 4)
                                           `- 5 (id 5)

So a trace takes memory for its distinct blocks and not for its references, of which a trace of coding agents has 27
times as many: their prompts repeat all that was said before.
"""

from array import array
from bisect import bisect_left
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.arrays import Int32Array, Int64Array
from pagedkv.compilation.compiled import compiled

__all__ = ["ROOT", "BlockTree", "write_path"]

ROOT: Final = 0
NO_ID: Final = -1


class BlockTree:
    """The tree of all prompts inserted so far.

    >>> tree = BlockTree()
    >>> [tree.insert(np.array(prompt)) for prompt in ([7, 8, 9], [7, 8, 4], [5], [7, 8], [])]
    [3, 4, 5, 2, 0]
    >>> tree.parents().tolist()
    [0, 0, 1, 2, 2, 0]
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._parents = array("i", [ROOT])
        self._ids = array("q", [NO_ID])

    def insert(self, block_ids: npt.NDArray[np.int64]) -> int | None:
        """Add a prompt, from its first block on.

        Args:
            block_ids: int64 ``[n]``, none negative.

        Returns:
            The number of its last block (``ROOT`` if it has none), or None if an id would stand in two places; the
            tree is then as it was. O(n); a block that is known takes about 1 ns.
        """
        num_known = bisect_left(block_ids, x=True, key=lambda block_id: int(block_id) not in self._numbers)
        last_known = self._numbers[int(block_ids[num_known - 1])] if num_known else ROOT
        if not _is_path(
            np.frombuffer(self._parents, np.int32),
            np.frombuffer(self._ids, np.int64),
            last_known,
            block_ids[:num_known],
        ):
            return None
        new_ids = block_ids[num_known:].tolist()
        first_new = len(self._parents)
        new_numbers = dict(zip(new_ids, range(first_new, first_new + len(new_ids)), strict=True))
        if len(new_numbers) < len(new_ids) or not self._numbers.keys().isdisjoint(new_ids):
            return None
        if not new_ids:
            return last_known
        self._numbers |= new_numbers
        self._ids.extend(new_ids)
        self._parents.extend([last_known, *range(first_new, first_new + len(new_ids) - 1)])
        return len(self._parents) - 1

    def parents(self) -> Int32Array:
        """Copy the tree: int32 ``[1 + blocks]``, for each block the one before it, always a smaller number."""
        return np.array(self._parents, np.int32)


@compiled
def _is_path(parents: Int32Array, ids: Int64Array, last_block: int, block_ids: Int64Array) -> bool:
    """Tell whether the path from the root to ``last_block`` has exactly these ids."""
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
