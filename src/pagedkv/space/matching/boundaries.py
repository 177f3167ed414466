"""The second pass: the longest hit that ends where blocks of all groups end.

A bound is lowered for the first of these reasons that applies, until none does:

1. A group lacks a block that a hit of this length needs.
2. The open step computes some of the blocks that hit: these are *pending*. A row that hits them must compute them if
   the row that was to compute them leaves, so it must hold what that computation reads, and a group lacks that.
3. Some of the blocks that this computation reads are pending, too: computing begins earlier.
4. A block behind a pending one is *settled*. The computation would write it again, and if its step failed, the block
   would be undefined for all rows that hold it.

For reasons 2 and 4 the hit ends before all pending blocks. An example for reason 4, with blocks of 4 tokens and a
window of 4; ``~~`` is pending::

    position   0   4   8   12  16
    full       [##][##][~~][~~][~~]
    window       . [##][~~][~~][##]     computing 8 takes block 1, which is there; but block 4 is settled
    hit        |------|                 8 tokens
"""

from typing import NamedTuple

import numpy as np

from pagedkv.blocks.blocks import NULL_BLOCK, PENDING_STEP
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.matching.known import Ending, Known

__all__ = ["longest_boundary"]


class Bound(NamedTuple):
    """An upper bound of the hit.

    Args:
        length: its tokens.
        compute_from: first position of it that the open step computes; ``length`` if it computes none.
    """

    length: int
    compute_from: int


def longest_boundary(known: Known) -> Ending:
    """Find the longest hit that ends at a boundary, and its blocks.

    The loop ends: each round but the last lowers the length.
    """
    length = known.aligned(known.limit)
    settled = [chain.num_settled * chain.group.block_size for chain in known.chains.values()]
    bound = Bound(length, min([length, *settled]))
    seen = {index: lookup.nothing_seen() for index, lookup in known.lookups.items()}
    while True:
        lower, block_ids = _lower(known, bound, seen)
        if lower == bound:
            return Ending(bound.length, block_ids)
        bound = lower


def _lower(known: Known, bound: Bound, seen: dict[int, Int32Array]) -> tuple[Bound, list[Int32Array]]:
    """Lower a bound for the first reason that applies; if none does, return it with the blocks of such a hit."""
    length, compute_from = bound
    served = _served_by_all(known, length, seen)
    if served < length:
        return Bound(served, min(served, compute_from)), []
    compute_from, block_ids = _collected(known, bound)
    settled = known.aligned(compute_from)
    if block_ids is None or (compute_from < length and _has_settled_behind(known, block_ids, compute_from)):
        return Bound(settled, settled), []
    return bound, block_ids


def _served_by_all(known: Known, length: int, seen: dict[int, Int32Array]) -> int:
    """Lower a length to what all groups that drop blocks can serve."""
    longest_servable = known.state.loops.longest_servable
    for index, lookup in known.lookups.items():
        num_known = lookup.num_known * lookup.group.block_size
        length = longest_servable(*lookup.arguments, min(length, num_known), seen[index])
    return known.aligned(length)


def _collected(known: Known, bound: Bound) -> tuple[int, list[Int32Array] | None]:
    """Collect the blocks of a hit that all groups can serve, and return where computing it begins.

    Computing pending blocks reads others, which may be pending as well; so each pass over the groups may find that it
    begins earlier. Every block is looked up once. The blocks are None if a group lacks one that computing reads.
    """
    length, compute_from = bound
    block_ids, collect_servable = known.chain_blocks(length), known.state.loops.collect_servable
    collected = {}
    for index, (group, _) in known.lookups.items():
        num_blocks = length // group.block_size
        block_ids[index], collected[index] = np.zeros(num_blocks, np.int32), np.full(2, num_blocks, np.int32)
    while True:
        first_pending = compute_from
        for index, (group, arguments) in known.lookups.items():
            num_settled = collect_servable(*arguments, length, compute_from, block_ids[index], collected[index])
            if num_settled < 0:
                return compute_from, None
            first_pending = min(first_pending, num_settled * group.block_size)
        if first_pending == compute_from:
            return compute_from, block_ids
        compute_from = first_pending


def _has_settled_behind(known: Known, block_ids: list[Int32Array], compute_from: int) -> bool:
    """Return whether a settled block of a hit lies behind the first position that is still to be computed."""
    open_step = known.state.open_step
    for group, held in zip(known.state.groups, block_ids, strict=True):
        behind = held[compute_from // group.block_size :]
        if (group.pool.arrays.records[behind[behind != NULL_BLOCK], PENDING_STEP] != open_step).any():
            return True
    return False
