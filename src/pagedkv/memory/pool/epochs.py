"""Epochs of the weights that computed what a block holds: a range a block, where epochs are counted.

The range spans everything that contributed to a block's content: the tokens before it as well, since their keys and
values were read when it was computed. Kept beside the records, and only where they are asked for::

    epochs[block] | OLDEST NEWEST |          8 bytes a block; the null block's are the epoch in force

A block that no plan has computed anything into is *undated*: nobody knows yet with which weights, those in force now,
as it seems. Two blocks hold equal content only if their ranges are equal.
"""

from pagedkv.memory.compilation.compiled import inlined
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool.blocks import NEWEST, NULL_BLOCK, OLDEST, UNDATED, PoolArrays

__all__ = [
    "copy_epochs",
    "date",
    "date_oldest",
    "has_epochs",
    "is_fresher",
    "same_epochs",
    "set_epoch_in_force",
    "set_ranges",
    "undate",
    "undate_newest",
]


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


@inlined
def undate(pool: PoolArrays, block: int) -> None:
    """Note that nothing is computed into a block yet. Nothing where epochs are not counted."""
    if has_epochs(pool):
        pool.epochs[block, OLDEST] = UNDATED
        pool.epochs[block, NEWEST] = UNDATED


@inlined
def undate_newest(pool: PoolArrays, block: int) -> None:
    """Note that only what a block continues is computed yet."""
    pool.epochs[block, NEWEST] = UNDATED


@inlined
def date_oldest(pool: PoolArrays, block: int, epoch: int) -> None:
    """Note the oldest epoch that contributed to a block's chain."""
    pool.epochs[block, OLDEST] = epoch


@inlined
def date(pool: PoolArrays, block: int, oldest: int, epoch: int) -> None:
    """Note that weights of an epoch compute into a block whose chain is as old as ``oldest``."""
    pool.epochs[block, OLDEST] = oldest
    newest = pool.epochs[block, NEWEST]
    if newest < epoch or newest == UNDATED:
        pool.epochs[block, NEWEST] = epoch


def set_ranges(pool: PoolArrays, block_ids: Int32Array, oldest: int, newest: int) -> None:
    """Note one range for several blocks."""
    pool.epochs[block_ids] = oldest, newest


def set_epoch_in_force(pool: PoolArrays, epoch: int) -> None:
    """Note which epoch is in force. Nothing where epochs are not counted."""
    pool.epochs[:1] = epoch
