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

    The loop ends: each round but the last lowers one of two numbers that are never below 0, and raises none.
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
    is_any_pending, settled = compute_from < length, known.aligned(compute_from)
    if is_any_pending and _lacks_what_computing_takes(known, bound):
        return Bound(settled, settled), []
    block_ids, first_pending = _collected(known, bound)
    if first_pending < compute_from:
        return Bound(length, first_pending), []
    if is_any_pending and _has_settled_behind(known, block_ids, compute_from):
        return Bound(settled, settled), []
    return bound, block_ids


def _served_by_all(known: Known, length: int, seen: dict[int, Int32Array]) -> int:
    """Lower a length to what all groups that drop blocks can serve."""
    longest_servable = known.state.loops.longest_servable
    for index, lookup in known.lookups.items():
        num_known = lookup.num_known * lookup.group.block_size
        length = longest_servable(*lookup.arguments, min(length, num_known), seen[index])
    return known.aligned(length)


def _lacks_what_computing_takes(known: Known, bound: Bound) -> bool:
    """Return whether a group lacks a block that the computation of the hit's pending part reads."""
    missing_block = known.state.loops.missing_block
    return any(missing_block(*arguments, *bound) >= 0 for _, arguments in known.lookups.values())


def _collected(known: Known, bound: Bound) -> tuple[list[Int32Array], int]:
    """Collect the blocks of a hit that all groups can serve; return them and their first pending position."""
    block_ids, first_pending = known.chain_blocks(bound.length), bound.compute_from
    for index, (group, arguments) in known.lookups.items():
        block_ids[index] = np.empty(bound.length // group.block_size, np.int32)
        num_settled = known.state.loops.collect_servable(*arguments, *bound, block_ids[index])
        first_pending = min(first_pending, num_settled * group.block_size)
    return block_ids, first_pending


def _has_settled_behind(known: Known, block_ids: list[Int32Array], compute_from: int) -> bool:
    """Return whether a settled block of a hit lies behind the first position that is still to be computed."""
    open_step = known.state.open_step
    for group, held in zip(known.state.groups, block_ids, strict=True):
        behind = held[compute_from // group.block_size :]
        if (group.pool.arrays.records[behind[behind != NULL_BLOCK], PENDING_STEP] != open_step).any():
            return True
    return False
