"""Epochs of the weights that computed a block's content: a range a block, where epochs are counted.

The range covers everything that contributed to a block's content, including the tokens before it, since their keys and
values were read when it was computed. It is stored in an array beside the records::

    epochs[block] | OLDEST NEWEST |          8 bytes a block; the null block's are the epoch in force

A block into which no plan has computed anything is *undated*: its weights are not known yet, and it is treated as if
they were those in force. Two blocks have equal content only if their ranges are equal.
"""

from pagedkv.blocks.record import NEWEST, NULL_BLOCK, OLDEST, UNDATED, PoolArrays
from pagedkv.compilation.compiled import featured, inlined


@inlined
def seeming(pool: PoolArrays, block: int, column: int) -> int:
    """Return one end of a block's range; for an undated block, the epoch in force."""
    epoch = pool.epochs[block, column]
    return int(pool.epochs[NULL_BLOCK, column] if epoch == UNDATED else epoch)


@featured
@inlined
def same_epochs(pool: PoolArrays, block: int, other_pool: PoolArrays, other: int) -> bool:
    """Whether weights of the same epochs computed two blocks."""
    return bool(
        seeming(pool, block, OLDEST) == seeming(other_pool, other, OLDEST)
        and seeming(pool, block, NEWEST) == seeming(other_pool, other, NEWEST)
    )


@featured
@inlined
def is_fresher(pool: PoolArrays, block: int, other: int) -> bool:
    """Whether a block can be hit for longer than another one, since its oldest epoch is newer."""
    return seeming(pool, block, OLDEST) > seeming(pool, other, OLDEST)


@featured
@inlined
def copy_epochs(source: PoolArrays, block: int, destination: PoolArrays, place: int) -> None:
    """Copy the range of a block to a copy of it, here or on the other side (host or device)."""
    destination.epochs[place, OLDEST] = source.epochs[block, OLDEST]
    destination.epochs[place, NEWEST] = source.epochs[block, NEWEST]


@featured
@inlined
def undate(pool: PoolArrays, block: int) -> None:
    """Mark a block as undated."""
    pool.epochs[block, OLDEST] = UNDATED
    pool.epochs[block, NEWEST] = UNDATED


@inlined
def date(pool: PoolArrays, block: int, oldest: int, epoch: int) -> None:
    """Record that weights of ``epoch`` compute into a block with a chain as old as ``oldest``."""
    pool.epochs[block, OLDEST] = oldest
    newest = pool.epochs[block, NEWEST]
    if newest < epoch or newest == UNDATED:
        pool.epochs[block, NEWEST] = epoch
