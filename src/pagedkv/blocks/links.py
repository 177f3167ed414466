"""Links between free blocks. Only this module writes the columns ``NEXT`` and ``PREVIOUS``.

A free or deferred block is in one circular list; the list's sentinel is a record of its own. A free leased block is
instead in one tree (:mod:`~pagedkv.blocks.treap`), which uses the same two columns for a node's two subtrees.
Blocks that are being moved from one to the other form a *chain*: each links to the next, and the last to the null
block. The lists and their meaning are defined in :mod:`~pagedkv.blocks.free_queue`.
"""

import numpy as np

from pagedkv.blocks.blocks import LEASED_ROOT, NEXT, NULL_BLOCK, NUM_SENTINELS, PREVIOUS
from pagedkv.compilation.compiled import inlined, unsigned
from pagedkv.contract.arrays import Int32Array

__all__ = ["begin_list", "lead_to", "link_all", "link_before", "set_branch", "unlink"]


def link_all(records: Int32Array) -> None:
    """Link every block into the null block's list, in order, and make the other sentinels' lists empty."""
    num_blocks = len(records) - NUM_SENTINELS
    records[:num_blocks, NEXT] = np.arange(1, num_blocks + 1)
    records[:num_blocks, PREVIOUS] = np.arange(-1, num_blocks - 1)
    records[NULL_BLOCK, PREVIOUS] = num_blocks - 1
    records[num_blocks - 1, NEXT] = NULL_BLOCK
    sentinels = np.arange(num_blocks, num_blocks + NUM_SENTINELS)
    records[sentinels, NEXT] = sentinels
    records[sentinels, PREVIOUS] = sentinels
    records[num_blocks + LEASED_ROOT, (NEXT, PREVIOUS)] = NULL_BLOCK


@inlined
def unlink(records: Int32Array, block: int) -> None:
    """Remove a block from its list."""
    following = unsigned(records[block, NEXT])
    preceding = unsigned(records[block, PREVIOUS])
    records[preceding, NEXT] = following
    records[following, PREVIOUS] = preceding


@inlined
def link_before(records: Int32Array, place: int, block: int) -> None:
    """Insert a block before ``place`` (if that is a sentinel: at the back of its list)."""
    preceding = unsigned(records[place, PREVIOUS])
    records[block, NEXT] = place
    records[block, PREVIOUS] = preceding
    records[preceding, NEXT] = block
    records[place, PREVIOUS] = block


@inlined
def begin_list(records: Int32Array, sentinel: int, block: int) -> None:
    """Make a block of a list its first, or the list empty if it is the sentinel. Links of blocks before it remain."""
    records[sentinel, NEXT] = block
    records[block, PREVIOUS] = sentinel


@inlined
def lead_to(records: Int32Array, block: int, following: int) -> None:
    """Link a block that is in no list to the next one of its chain, or to the null block."""
    records[block, NEXT] = following


@inlined
def set_branch(lease_links: Int32Array, row: int, column: int, block: int) -> None:
    """Set the child of a node on one side of a tree, or a link of a list, in the records or in ``lease_links``."""
    lease_links[row, column] = block
