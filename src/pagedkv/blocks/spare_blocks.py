"""Spare blocks: cached blocks that are evicted before all others.

These are named blocks that are not expected to be hit. They can be hit until they are allocated for other content,
which happens before any other cached block is evicted; those that became spare first are evicted first::

    allocated:   blocks without content | spare blocks, oldest first | cached blocks, in the eviction policy's order

Spare blocks are excluded from the eviction policy: it is called as if the name were dropped (``note_drop``), and set
again at a hit. Callers decide which blocks are spare: :mod:`pagedkv.tables.retaining`, and the code that
frees superseded sequences. The mark is a value of ``KEPT``. In groups that are walked this is the column of the
prefetch hint, so a spare block has no hint.
"""

from pagedkv.blocks import free_queue, moments
from pagedkv.blocks.blocks import FREE, KEPT, NAME, QUEUE, REF_COUNT, SPARE, PoolArrays
from pagedkv.blocks.keep_reasons import forget_reasons, mark_spare
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array

__all__ = ["enqueue_spare", "is_spare", "make_cached", "make_spare", "make_unheld_spare", "renew"]


@inlined
def is_spare(pool: PoolArrays, block: int) -> bool:
    """Whether a block is spare, or will be once no step needs it any more."""
    return bool(pool.records[block, KEPT] == SPARE)


@compiled
def enqueue_spare(pool: PoolArrays, block: int) -> None:
    """Put an unreferenced named block at the back of the spare list."""
    moments.note_drop(pool, block)
    free_queue.insert_before(pool.records, pool.counts, free_queue.spare_sentinel(pool.records), block)


@compiled
def make_spare(pool: PoolArrays, block: int) -> None:
    """Mark an unreferenced named block, free or deferred, as spare."""
    if is_spare(pool, block):
        return
    mark_spare(pool.records, block)
    if pool.records[block, QUEUE] == FREE:
        free_queue.remove(pool.records, pool.counts, block)
        enqueue_spare(pool, block)
        moments.note_rank(pool, block)


@compiled
def make_unheld_spare(pool: PoolArrays, blocks: Int32Array) -> None:
    """Mark those blocks as spare that are named and unreferenced, even if kept for a reason, except by a feature."""
    for block in blocks:
        if pool.records[block, NAME] and pool.records[block, REF_COUNT] == 0 and not moments.stays(pool, block):
            make_spare(pool, block)


@compiled
def make_cached(pool: PoolArrays, block: int) -> None:
    """Make an unreferenced spare block an ordinary cached one."""
    renew(pool, block)
    if pool.records[block, QUEUE] == FREE:
        free_queue.remove(pool.records, pool.counts, block)
        moments.put(pool, block)
        moments.note_rank(pool, block)


@compiled
def renew(pool: PoolArrays, block: int) -> None:
    """Remove the spare mark of a block that is about to be taken out of its place."""
    forget_reasons(pool.records, block)
    if pool.records[block, QUEUE] == FREE:
        moments.note_name(pool, block)
