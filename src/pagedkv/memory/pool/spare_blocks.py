"""Spare blocks: cached, but only while there is room.

Named blocks that nobody is expected to hit. They can be hit until they are handed out, and that they are before any
other cached block, the one that became spare first before the others::

    handed out:  blocks without content | spare blocks, oldest first | cached blocks, as the eviction policy says

A spare block is none of the policy's: to it, the name was dropped (``note_drop``), and begins anew with a hit. Which
blocks are spare is decided above (:mod:`pagedkv.memory.tables.retaining`, and whoever frees sequences that are
superseded); ``KEPT`` tells it: in groups that are walked, where that column leads walks ahead, a spare block leads
nowhere.
"""

from pagedkv.memory.compilation.compiled import compiled, inlined
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool import free_queue, moments
from pagedkv.memory.pool.blocks import FREE, KEPT, NAME, QUEUE, REF_COUNT, SPARE, PoolArrays
from pagedkv.memory.pool.keep_reasons import forget_reasons, mark_spare

__all__ = ["enqueue_spare", "is_spare", "make_cached", "make_spare", "make_unheld_spare", "renew"]


@inlined
def is_spare(pool: PoolArrays, block: int) -> bool:
    """Tell whether a block is spare, or will be once no step needs it any more."""
    return bool(pool.records[block, KEPT] == SPARE)


@compiled
def enqueue_spare(pool: PoolArrays, block: int) -> None:
    """Put a named block that nobody uses behind the other spare ones."""
    moments.note_drop(pool, block)
    free_queue.insert_before(pool.records, pool.counts, free_queue.spare_sentinel(pool.records), block)


@compiled
def make_spare(pool: PoolArrays, block: int) -> None:
    """Make a named block spare that nobody holds, free or deferred."""
    if is_spare(pool, block):
        return
    mark_spare(pool.records, block)
    if pool.records[block, QUEUE] == FREE:
        free_queue.remove(pool.records, pool.counts, block)
        enqueue_spare(pool, block)
        moments.note_rank(pool, block)


@compiled
def make_unheld_spare(pool: PoolArrays, blocks: Int32Array) -> None:
    """Make those blocks spare that have a name and that nobody holds, whatever they were kept for, unless they stay."""
    for block in blocks:
        if pool.records[block, NAME] and pool.records[block, REF_COUNT] == 0 and not moments.stays(pool, block):
            make_spare(pool, block)


@compiled
def make_cached(pool: PoolArrays, block: int) -> None:
    """Make a spare block that nobody holds one like other cached ones."""
    renew(pool, block)
    if pool.records[block, QUEUE] == FREE:
        free_queue.remove(pool.records, pool.counts, block)
        moments.put(pool, block)
        moments.note_rank(pool, block)


@compiled
def renew(pool: PoolArrays, block: int) -> None:
    """Make a spare block one like others, since somebody is about to take it from wherever it is."""
    forget_reasons(pool.records, block)
    if pool.records[block, QUEUE] == FREE:
        moments.note_name(pool, block)
