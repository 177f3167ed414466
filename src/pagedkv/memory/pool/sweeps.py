"""Names that go together: sweeps over all blocks of a pool, O(blocks) each."""

from pagedkv.memory.compilation.compiled import compiled
from pagedkv.memory.pool.blocks import NAME, NUM_SENTINELS, OLDEST, PENDING_STEP, PoolArrays
from pagedkv.memory.pool.causes import CALLED_OFF, EPOCH, RESET
from pagedkv.memory.pool.life_cycle import drop_name, lose_name

__all__ = ["drop_all_names", "drop_stale", "withdraw_since"]


@compiled
def drop_all_names(pool: PoolArrays, cause: int = RESET) -> int:
    """Make everything unfindable; return how many blocks had a name."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME]:
            lose_name(pool, block, cause)
            num_dropped += 1
    return num_dropped


@compiled
def withdraw_since(pool: PoolArrays, step: int) -> int:
    """Drop the names whose content steps from ``step`` on were to compute; return how many."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME] and pool.records[block, PENDING_STEP] >= step:
            drop_name(pool, block, CALLED_OFF)
            num_dropped += 1
    return num_dropped


@compiled
def drop_stale(pool: PoolArrays, bound: int) -> int:
    """Make everything unfindable to which weights of before epoch ``bound`` contributed; return how many blocks."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME] and pool.epochs[block, OLDEST] < bound:
            drop_name(pool, block, EPOCH)
            num_dropped += 1
    return num_dropped
