"""Sweeps over all blocks of a pool that remove many names, O(blocks) each."""

from pagedkv.blocks.blocks import NAME, NUM_SENTINELS, OLDEST, PENDING_STEP, PoolArrays
from pagedkv.blocks.causes import CALLED_OFF, EPOCH, RESET
from pagedkv.blocks.life_cycle import drop_name, lose_name
from pagedkv.compilation.compiled import compiled

__all__ = ["drop_all_names", "drop_stale", "withdraw_since"]


@compiled
def drop_all_names(pool: PoolArrays, cause: int = RESET) -> int:
    """Remove all names; return how many blocks had one."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME]:
            lose_name(pool, block, cause)
            num_dropped += 1
    return num_dropped


@compiled
def withdraw_since(pool: PoolArrays, step: int) -> int:
    """Remove the names of content that ``step`` or a later one was to compute; return how many."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME] and pool.records[block, PENDING_STEP] >= step:
            drop_name(pool, block, CALLED_OFF)
            num_dropped += 1
    return num_dropped


@compiled
def drop_stale(pool: PoolArrays, bound: int) -> int:
    """Remove the names of content with contributions of weights older than epoch ``bound``; return how many."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME] and pool.epochs[block, OLDEST] < bound:
            drop_name(pool, block, EPOCH)
            num_dropped += 1
    return num_dropped
