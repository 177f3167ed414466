"""FIFO: cached blocks are evicted in the order in which they were first released. A hit renews nothing.

A block gets its place when it first becomes free under its name, behind all that have one; of one sequence the
tail before the head, as with LRU. A hit takes it out of the cold list but leaves it its place, and when it is released
again it returns there: between the free blocks that were first released just before and just after it. With its name it
loses the place. All places are a ring of links beside the cold list, of blocks in use as well::

    ring:   sentinel -> oldest place ... -> youngest place -> sentinel        (last row of the table)
    cold:   blocks without content | the free blocks of the ring, in its order

Whoever returns looks for the nearest free block in both directions of the ring at once. Both see only blocks in use
before they find it, and blocks of one sequence mostly stand side by side: O(1 + blocks in use that stand between).

It is not prefix-closed: a prefix that many sequences continue is older than what continues it, and goes first. What it
leaves behind cannot be hit and is evicted when its turn comes, so this costs hits, and correctness nothing. Renewing
whatever is continued would close the gap, and would be LRU in all but name, as nearly every hit is continued. FIFO is
here to be compared with: it shows what recency is worth.
"""

from typing import ClassVar, Final

import numpy as np

from pagedkv.memory.compilation.compiled import compiled, inlined
from pagedkv.memory.pool.blocks import FREE, NAME, NEXT, NULL_BLOCK, QUEUE, PoolArrays
from pagedkv.memory.pool.eviction.moments import PolicyMoments
from pagedkv.memory.pool.eviction.policy import TABLE_FIELDS, EvictionPolicy, PolicyState, check_cold, no_state
from pagedkv.memory.pool.features import FeaturedArrays
from pagedkv.memory.pool.free_queue import insert_before
from pagedkv.memory.pool.moments import put_last

__all__ = ["FIFO"]

# Columns of the table, which has a row for every block. 0 is the null block's id, which has no place: no place.
OLDER: Final = 0
YOUNGER: Final = 1
NO_PLACE: Final = 0


def _new_state(num_blocks: int) -> PolicyState:
    """Make an empty ring: its sentinel is its own neighbour."""
    table = np.zeros((num_blocks + 2, TABLE_FIELDS), np.uint32)
    table[-1] = num_blocks + 1
    return no_state(num_blocks)._replace(table=table)


@inlined
def _enqueue(pool: PoolArrays, block: int) -> None:
    """Put a block into its place, the youngest if it has none yet."""
    if pool.eviction_table[block, OLDER] == NO_PLACE:
        _link_youngest(pool, block)
        put_last(pool, block)
    else:
        insert_before(pool.records, pool.counts, _next_of_returning(pool, block), block)


@compiled
def _link_youngest(pool: PoolArrays, block: int) -> None:
    places = pool.eviction_table
    sentinel = len(places) - 1
    youngest = places[sentinel, OLDER]
    places[block, OLDER] = youngest
    places[block, YOUNGER] = sentinel
    places[youngest, YOUNGER] = block
    places[sentinel, OLDER] = block


@compiled
def _next_of_returning(pool: PoolArrays, block: int) -> int:
    """Find what a block with a place is to stand before in the cold list: a block, or the list's sentinel."""
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


@compiled
def _note_drop(pool: PoolArrays, block: int) -> None:
    """Take a block's place away, if it has one."""
    places = pool.eviction_table
    older, younger = places[block, OLDER], places[block, YOUNGER]
    if older != NO_PLACE:
        places[older, YOUNGER] = younger
        places[younger, OLDER] = older
        places[block, OLDER] = NO_PLACE
        places[block, YOUNGER] = NO_PLACE


def _check(where: str, pool: PoolArrays, cold: list[int], protected: list[int]) -> None:
    """The ring holds named blocks, both ways, and the cold list its free ones in its order."""
    check_cold(where, pool, cold, protected)
    places, records = pool.eviction_table, pool.records
    sentinel = len(places) - 1
    ring = [sentinel]
    while (younger := int(places[ring[-1], YOUNGER])) != sentinel:
        assert younger != NO_PLACE, f"{where}: block {ring[-1]} is followed by none"
        assert len(ring) < len(places), f"{where}: the ring of places does not close"
        ring.append(younger)
    assert (places[ring, OLDER] == np.roll(ring, 1)).all(), f"{where}: places forward and backward differ"
    assert (places[:, OLDER] != NO_PLACE).sum() == len(ring), f"{where}: a block has a place outside the ring"
    placed = ring[1:]
    assert (records[placed, NAME] != 0).all(), f"{where}: a block without a name has a place"
    in_order = [block for block in placed if records[block, QUEUE] == FREE]
    assert [block for block in cold if records[block, NAME]] == in_order, f"{where}: a cached block is out of its place"


class FifoArrays(FeaturedArrays):
    """The arrays of a pool that evicts so."""

    __slots__ = ()
    policy: ClassVar = PolicyMoments(
        enqueue=_enqueue,
        note_drop=_note_drop,
    )


FIFO: Final = EvictionPolicy("fifo", FifoArrays, new_state=_new_state, check=_check)
