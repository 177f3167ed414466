"""Epochs of the weights that computed what a block holds: a range a block, where epochs are counted.

The range spans everything that contributed to a block's content: the tokens before it as well, since their keys and
values were read when it was computed. Kept beside the records, and only where they are asked for::

    epochs[block] | OLDEST NEWEST |          8 bytes a block; the null block's are the epoch in force

A block that no plan has computed anything into is *undated*: nobody knows yet with which weights, those in force now,
as it seems. Two blocks hold equal content only if their ranges are equal.
"""

from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.pool.block_pool import drop_name
from pagedkv.pool.blocks import NAME, NEWEST, NULL_BLOCK, NUM_SENTINELS, OLDEST, UNDATED, PoolArrays
from pagedkv.pool.ghosts import EPOCH

__all__ = ["copy_epochs", "drop_stale", "has_epochs", "is_fresher", "same_epochs"]


@inlined
def has_epochs(pool: PoolArrays) -> bool:
    """Tell whether epochs are counted."""
    return len(pool.epochs) > 0


@inlined
def seeming(pool: PoolArrays, block: int, column: int) -> int:
    """Tell an epoch of a block's range; of an undated one, the epoch in force."""
    epoch = pool.epochs[block, column]
    return int(pool.epochs[NULL_BLOCK, column] if epoch == UNDATED else epoch)


@inlined
def same_epochs(pool: PoolArrays, block: int, other_pool: PoolArrays, other: int) -> bool:
    """Tell whether weights of the same epochs computed two blocks; always where none are counted."""
    if not has_epochs(pool):
        return True
    return bool(
        seeming(pool, block, OLDEST) == seeming(other_pool, other, OLDEST)
        and seeming(pool, block, NEWEST) == seeming(other_pool, other, NEWEST)
    )


@inlined
def is_fresher(pool: PoolArrays, block: int, other: int) -> bool:
    """Tell whether hits may rest on a block for longer than on another one."""
    return seeming(pool, block, OLDEST) > seeming(pool, other, OLDEST)


@inlined
def copy_epochs(source: PoolArrays, block: int, destination: PoolArrays, place: int) -> None:
    """Note that a block becomes a copy of another one, in the same pool or on the other side."""
    if has_epochs(source):
        destination.epochs[place, OLDEST] = source.epochs[block, OLDEST]
        destination.epochs[place, NEWEST] = source.epochs[block, NEWEST]


@compiled
def drop_stale(pool: PoolArrays, bound: int) -> int:
    """Make everything unfindable to which weights of before epoch ``bound`` contributed; return how many blocks."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME] and pool.epochs[block, OLDEST] < bound:
            drop_name(pool, block, EPOCH)
            num_dropped += 1
    return num_dropped
