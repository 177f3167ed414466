"""FIFO: cached blocks are evicted in the order in which they were first released. A hit does not renew a block.

A block gets its rank when it first becomes free under its name, after all blocks that have one; of one sequence the
tail comes before the head, as with LRU. A hit takes the block out of the cold list, but the block keeps its rank, and
its next release puts it back between the free blocks of the neighbouring ranks. It loses the rank with its name. The
ranks are a ring of links beside the cold list, which also contains blocks in use::

    ring:   sentinel -> oldest rank ... -> youngest rank -> sentinel         (last row of the table)
    cold:   blocks without content | the free blocks of the ring, in its order

A block that returns searches both directions of the ring at once for the nearest free block. It passes only blocks in
use on the way, and blocks of one sequence are mostly neighbours: O(1 + blocks in use in between).

FIFO is not prefix-closed: a prefix that many sequences share is older than its continuations, and is evicted first. The
continuations then cannot be hit, and are evicted when they are the oldest. This costs hits, but never makes a hit
wrong. Renewing the blocks before each hit would avoid it, but would be almost LRU, as nearly every hit has blocks after
it. FIFO is included for comparison: it shows the value of recency.
"""

from typing import ClassVar, Final

import numpy as np

from pagedkv.blocks.eviction.policy import (
    TABLE_FIELDS,
    EvictionPolicy,
    PolicyMoments,
    PolicyState,
    check_cold,
    no_state,
)
from pagedkv.blocks.eviction.rings import (
    NO_PLACE,
    OLDER,
    YOUNGER,
    blocks_of_ring,
    link_youngest,
    unlink_if_linked,
)
from pagedkv.blocks.free_queue import insert_before, put_last
from pagedkv.blocks.record import FREE, NAME, NEXT, NULL_BLOCK, QUEUE, FeaturedArrays, PoolArrays
from pagedkv.compilation.compiled import compiled, inlined


def _new_state(num_blocks: int) -> PolicyState:
    """Make an empty ring: its sentinel is its own neighbour."""
    table = np.zeros((num_blocks + 2, TABLE_FIELDS), np.uint32)
    table[-1] = num_blocks + 1
    return no_state(num_blocks)._replace(table=table)


@inlined
def _enqueue(pool: PoolArrays, block: int) -> None:
    """Put a block at its rank, a new youngest one if it has none yet."""
    if pool.eviction_table[block, OLDER] == NO_PLACE:
        link_youngest(pool.eviction_table, len(pool.eviction_table) - 1, block)
        put_last(pool, block)
    else:
        insert_before(pool.records, pool.counts, _next_of_returning(pool, block), block)


@compiled
def _next_of_returning(pool: PoolArrays, block: int) -> int:
    """Find the block, or the sentinel, before which a block that has a rank belongs in the cold list."""
    places, records = pool.eviction_table, pool.records
    sentinel = len(places) - 1
    older = younger = block
    while True:
        younger = int(places[younger, YOUNGER])
        if younger == sentinel:
            return NULL_BLOCK
        if records[younger, QUEUE] == FREE:
            return younger
        if older != sentinel:
            older = int(places[older, OLDER])
            if older != sentinel and records[older, QUEUE] == FREE:
                return int(records[older, NEXT])


@inlined
def _note_drop(pool: PoolArrays, block: int) -> None:
    """Remove a block's rank, if it has one."""
    unlink_if_linked(pool.eviction_table, block)


def _check(where: str, pool: PoolArrays, cold: list[int], protected: list[int]) -> None:
    """Check that the ring links named blocks in both directions, and that the cold list has its free ones in order."""
    check_cold(where, pool, cold, protected)
    places, records = pool.eviction_table, pool.records
    placed = blocks_of_ring(where, places, len(places) - 1)
    assert (places[:-1, OLDER] != NO_PLACE).sum() == len(placed), f"{where}: a block has a place outside the ring"
    assert (records[placed, NAME] != 0).all(), f"{where}: a block without a name has a place"
    in_order = [block for block in placed if records[block, QUEUE] == FREE]
    assert [block for block in cold if records[block, NAME]] == in_order, f"{where}: a cached block is out of its place"


class FifoArrays(FeaturedArrays):
    """The arrays of a pool with this policy."""

    __slots__ = ()
    policy: ClassVar = PolicyMoments(
        enqueue=_enqueue,
        note_drop=_note_drop,
    )


FIFO: Final = EvictionPolicy("fifo", FifoArrays, new_state=_new_state, check=_check)
