"""The audit of ghosts: at most one for content, none if it is cached; each has a cause of loss."""

from typing import Final

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import NAME, NUM_SENTINELS, PoolArrays
from pagedkv.blocks.causes import NUM_CAUSES
from pagedkv.blocks.ghosts import GHOSTS_A_SET, are_same, find_ghost, ghost_cause, is_ghost
from pagedkv.compilation.compiled import compiled

__all__ = ["check_ghosts"]

FAULTS: Final = ("", "a ghost of content that can be found", "two ghosts of one content", "a ghost gone for no reason")
NONE, GHOST_OF_NAMED, SAME_GHOST, NO_CAUSE = range(len(FAULTS))


def check_ghosts(pool: BlockPool) -> None:
    """Check the ghosts. Raises AssertionError with the first contradiction. O(blocks + ghosts)."""
    fault = _ghosts_fault(pool.arrays)
    assert fault == NONE, f"{pool.name}: {FAULTS[fault]}"


@compiled
def _ghosts_fault(pool: PoolArrays) -> int:
    """Check that at most one for content, none if it is cached; each has a cause of loss."""
    for block in range(len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME] and find_ghost(pool, pool.records[block, NAME], pool.digests[block]) >= 0:
            return GHOST_OF_NAMED
    for number in range(len(pool.ghosts)):
        for way in range(GHOSTS_A_SET):
            place = number * GHOSTS_A_SET + way
            if not is_ghost(pool, place):
                continue
            if not 0 < ghost_cause(pool, place) < NUM_CAUSES:
                return NO_CAUSE
            for other in range(place + 1, (number + 1) * GHOSTS_A_SET):
                if are_same(pool, place, other):
                    return SAME_GHOST
    return NONE
