"""The second pass: the longest hit that ends where blocks of all groups end.

A bound is lowered for the first of these reasons that holds, until none does:

1. A group lacks a block that a hit of this length needs.
2. The open step computes some of what hits: these blocks are *pending*. A row that hits them takes their computation
   over if the row that computes them leaves, so it must hold what computing them takes, and a group lacks that.
3. Some of what it would hold for that is pending, too: computing begins earlier.
4. A block behind a pending one is *settled*. Whoever took over would write it again, and a step that failed would leave
   it undefined for all who hold it.

For the second reason and the last the hit does without anything pending. Here the last one, with blocks of 4 tokens and
a window of 4; ``~~`` is pending::

    position   0   4   8   12  16
    full       [##][##][~~][~~][~~]
    window       . [##][~~][~~][##]     computing 8 takes block 1, which is there; but block 4 is settled
    hit        |------|                 8 tokens
"""

from typing import NamedTuple

import numpy as np

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool.blocks import NULL_BLOCK, PENDING_STEP
from pagedkv.memory.space.matching.known import Ending, Known

__all__ = ["longest_boundary"]


class Bound(NamedTuple):
    """How long a hit can be at most, as far as is known.

    Args:
        length: its tokens.
        compute_from: first position of it that the open step computes; ``length`` if it computes none.
    """

    length: int
    compute_from: int


def longest_boundary(known: Known) -> Ending:
    """Find the longest hit that ends at a boundary, and its blocks.

    It ends: each round but the last lowers one of two numbers that are never below 0, and raises none.
    """
    length = known.aligned(known.limit)
    settled = [chain.num_settled * chain.group.block_size for chain in known.chains.values()]
    bound = Bound(length, min([length, *settled]))
    while True:
        lower, block_ids = _lower(known, bound)
        if lower == bound:
            return Ending(bound.length, block_ids)
        bound = lower


def _lower(known: Known, bound: Bound) -> tuple[Bound, list[Int32Array]]:
    """Lower a bound for the first reason that there is; if there is none: the same, and the blocks of such a hit."""
    length, compute_from = bound
    served = _served_by_all(known, length)
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


def _served_by_all(known: Known, length: int) -> int:
    """Lower a length by what each group lacks whose prefix may be gone."""
    longest_servable = known.state.loops.longest_servable
    for lookup in known.lookups.values():
        num_known = lookup.num_known * lookup.group.block_size
        length = longest_servable(*lookup.arguments, min(length, num_known))
    return known.aligned(length)


def _lacks_what_computing_takes(known: Known, bound: Bound) -> bool:
    """Tell whether a group lacks what computing the pending part of a hit takes."""
    missing_block = known.state.loops.missing_block
    return any(missing_block(*arguments, *bound) >= 0 for _, arguments in known.lookups.values())


def _collected(known: Known, bound: Bound) -> tuple[list[Int32Array], int]:
    """Collect the blocks of a hit that all groups can serve, and tell the first position of them that is pending."""
    block_ids, first_pending = known.chain_blocks(bound.length), bound.compute_from
    for index, (group, arguments) in known.lookups.items():
        block_ids[index] = np.empty(bound.length // group.block_size, np.int32)
        num_settled = known.state.loops.collect_servable(*arguments, *bound, block_ids[index])
        first_pending = min(first_pending, num_settled * group.block_size)
    return block_ids, first_pending


def _has_settled_behind(known: Known, block_ids: list[Int32Array], compute_from: int) -> bool:
    """Tell whether a settled block of a hit reaches beyond the first position that is still to be computed."""
    open_step = known.state.open_step
    for group, held in zip(known.state.groups, block_ids, strict=True):
        behind = held[compute_from // group.block_size :]
        if (group.pool.arrays.records[behind[behind != NULL_BLOCK], PENDING_STEP] != open_step).any():
            return True
    return False
