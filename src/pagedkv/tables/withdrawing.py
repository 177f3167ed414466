"""The continuations of bad content: all named blocks that are reached from it by links from parent to child."""

from pagedkv.blocks.blocks import LIFE, NAME, NULL_BLOCK, PARENT, PARENT_LIFE, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Uint8Array

__all__ = ["spread_taint"]

UNKNOWN = 0
SOUND = 1
TAINTED = 2


@compiled
def spread_taint(pool: PoolArrays, name: int, marks: Uint8Array) -> int:
    """Mark the named blocks of a group that continue a tainted one; return how many are tainted.

    Each block is visited once, and followed up to its first ancestor with a known mark.

    Args:
        marks: uint8 ``[num_blocks]``; ``TAINTED`` for blocks that are known to be bad, else ``UNKNOWN``; every named
            block of the group gets a mark.
    """
    records = pool.records
    num_tainted = 0
    for block in range(1, len(marks)):
        if records[block, NAME] != name:
            continue
        ancestor = block
        while marks[ancestor] == UNKNOWN:
            parent = records[ancestor, PARENT]
            if parent == NULL_BLOCK or records[parent, LIFE] != records[ancestor, PARENT_LIFE]:
                break
            ancestor = parent
        mark = marks[ancestor] if marks[ancestor] != UNKNOWN else SOUND
        follower = block
        while marks[follower] == UNKNOWN:
            marks[follower] = mark
            if follower == ancestor:
                break
            follower = records[follower, PARENT]
        num_tainted += marks[block] == TAINTED
    return num_tainted
