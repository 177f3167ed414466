"""Links between free blocks: the columns ``NEXT`` and ``PREVIOUS``, and nothing else.

A free block, or a deferred one, stands in one circular list, whose sentinel is a record of its own; a free leased block
stands in one tree (:mod:`~pagedkv.memory.pool.treap`), with the same two columns for what comes before and after it
below. Blocks that go from one to the other are a *chain* meanwhile: each leads to the following one, the last to the
null block. Which lists there are, and what they mean, is :mod:`~pagedkv.memory.pool.free_queue`'s.
"""

import numpy as np

from pagedkv.memory.compilation.compiled import inlined, unsigned
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool.blocks import LEASED_ROOT, NEXT, NULL_BLOCK, NUM_SENTINELS, PREVIOUS

__all__ = ["begin_list", "lead_to", "link_all", "link_before", "set_branch", "unlink"]


def link_all(records: Int32Array) -> None:
    """Put every block into the null block's list, in order, and make the other sentinels' lists empty."""
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
    """Take a block out of the list it is in."""
    following = unsigned(records[block, NEXT])
    preceding = unsigned(records[block, PREVIOUS])
    records[preceding, NEXT] = following
    records[following, PREVIOUS] = preceding


@inlined
def link_before(records: Int32Array, place: int, block: int) -> None:
    """Insert a block before ``place`` (before a sentinel: at the back of its list)."""
    preceding = unsigned(records[place, PREVIOUS])
    records[block, NEXT] = place
    records[block, PREVIOUS] = preceding
    records[preceding, NEXT] = block
    records[place, PREVIOUS] = block


@inlined
def begin_list(records: Int32Array, sentinel: int, block: int) -> None:
    """Let a list begin with a block of it, or be empty if that is the sentinel. Links of those before it stay."""
    records[sentinel, NEXT] = block
    records[block, PREVIOUS] = sentinel


@inlined
def lead_to(records: Int32Array, block: int, following: int) -> None:
    """Let a block that stands nowhere lead to the following one of its chain, or to the null block."""
    records[block, NEXT] = following


@inlined
def set_branch(lease_links: Int32Array, row: int, column: int, block: int) -> None:
    """Set what hangs below a block on one side of a tree, or of a list, in the records or in ``lease_links``."""
    lease_links[row, column] = block
