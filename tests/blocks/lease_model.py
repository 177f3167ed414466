"""Leases played with lists: what ``pagedkv.blocks.leasing`` says in words, by passes over all leased blocks.

The order in which a pool gives leases up is written down here as it is meant, without a thought of what it costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pagedkv.blocks.record import HIGH_PRIORITY

__all__ = ["Leased", "end_largest"]

Block = TypeVar("Block", bound="Leased")


@dataclass(eq=False)
class Leased:
    """A block with or without a lease.

    Args:
        parent: the block that it continues; None for a first one.
        is_named: whether it can be found; what continues it does so only as long as that.
        until: when its lease ends, 0 if it has none.
    """

    parent: "Leased | None" = None
    is_named: bool = False
    until: float = 0.0


def end_largest(resting: Sequence[Block], is_evictable: Sequence[Block]) -> list[Block]:
    """End the largest lease of some blocks, and return those of it that no other lease shares, as they were released.

    Args:
        resting: unreferenced leased blocks, in the order of their release.
        is_evictable: those of them whose leases may be given up, one at least, in the same order.
    """
    while True:
        largest = _largest(is_evictable)
        given_up = [block for block in is_evictable if block.until == largest]
        for block in given_up:
            block.until = -1.0
        for block in resting:
            if block.until > 0:
                _raise_parents(block)
        ended = [block for block in given_up if block.until < 0]
        if not ended and _largest(is_evictable) == largest:
            ended = [next(block for block in is_evictable if block.until == largest)]
        for block in ended:
            block.until = 0.0
        if ended:
            return ended


def _largest(blocks: Sequence[Leased]) -> float:
    """When the largest lease ends; high priority comes before all."""
    ends = [block.until for block in blocks]
    return HIGH_PRIORITY if HIGH_PRIORITY in ends else max(ends)


def _raise_parents(block: Leased) -> None:
    """Let what a block continues bear its end, as far as that is leased, and for less long."""
    above = block.parent
    while above is not None and above.is_named and above.until != 0 and above.until < block.until:
        above.until = block.until
        above = above.parent
