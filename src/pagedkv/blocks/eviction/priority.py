"""Priority: the cached blocks with the lowest number are evicted first, and of one number the least recently used.

Callers give a sequence's number when it ends (``BlockSpace.free(rows, priority=)``). A block has the highest number of
all sequences that ended with it, for as long as it has its name: so a prefix that several sequences share is evicted no
earlier than what continues it. A block that was released before its sequence ended counts as 0, and so does one whose
lease has ended. The free blocks of each number are in a ring of their own, beside the cold list, which has all of them
in the order of their release::

    ring of -127:  sentinel -> least recently used ... most recently used -> sentinel
    ...
    ring of 127:   sentinel -> ...

A victim is the oldest of the lowest ring with any block; rings below that are not searched again until they get one.
TensorRT-LLM's retention priority and SGLang's ``priority`` policy order blocks like this.
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
from pagedkv.blocks.eviction.rings import YOUNGER, blocks_of_ring, link_youngest, unlink_if_linked
from pagedkv.blocks.free_queue import put_last
from pagedkv.blocks.record import NAME, NUM_SENTINELS, FeaturedArrays, PoolArrays
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import LARGEST_PRIORITY

# The policy's counts.
ENDING: Final = 0  # the level of sequences that end now
LOWEST: Final = 1  # no ring of a lower level has a block
NUM_COUNTS: Final = 2

NO_LEVEL: Final = 0  # of a block that no sequence has ended with yet
NEUTRAL: Final = LARGEST_PRIORITY + 1
"""The level of number 0."""
NUM_LEVELS: Final = 2 * NEUTRAL


def _new_state(num_blocks: int) -> PolicyState:
    """Make empty rings: each sentinel is its own neighbour."""
    table = np.zeros((num_blocks + 1 + NUM_LEVELS, TABLE_FIELDS), np.uint32)
    sentinels = np.arange(num_blocks + 1, len(table))
    table[sentinels] = sentinels[:, None]
    counts = np.array([NEUTRAL, NUM_LEVELS - 1], np.int64)
    return no_state(num_blocks)._replace(counts=counts, table=table, ranks=np.zeros(num_blocks + 1, np.uint8))


def set_priority(pool: PoolArrays, number: int) -> None:
    """Set the number of the sequences that end from now on."""
    pool.eviction[ENDING] = NEUTRAL + number


@compiled
def _note_request(pool: PoolArrays, blocks: Int32Array, _num_outputs: int) -> None:
    """Raise the levels of a sequence's named blocks to that of the sequence."""
    level = pool.eviction[ENDING]
    for block in blocks:
        if pool.records[block, NAME] and pool.ranks[block] < level:
            pool.ranks[block] = level


@inlined
def _sentinel(pool: PoolArrays, level: int) -> int:
    return len(pool.records) - NUM_SENTINELS + int(level)


@compiled
def _enqueue(pool: PoolArrays, block: int) -> None:
    """Put a block at the back of the cold list, and of the ring of its level."""
    if pool.ranks[block] == NO_LEVEL:
        pool.ranks[block] = NEUTRAL
    level = int(pool.ranks[block])
    put_last(pool, block)
    link_youngest(pool.eviction_table, _sentinel(pool, level), block)
    pool.eviction[LOWEST] = min(pool.eviction[LOWEST], level)


@inlined
def _leave_ring(pool: PoolArrays, block: int) -> None:
    """Take a block out of its ring, since it is in use or evicted."""
    unlink_if_linked(pool.eviction_table, block)


@compiled
def _note_drop(pool: PoolArrays, block: int) -> None:
    """Forget the level of a block that loses its name."""
    unlink_if_linked(pool.eviction_table, block)
    pool.ranks[block] = NO_LEVEL


@compiled
def _choose_victim(pool: PoolArrays, _first: int) -> int:
    """Choose the oldest block of the lowest level that has any."""
    level = int(pool.eviction[LOWEST])
    block = int(pool.eviction_table[_sentinel(pool, level), YOUNGER])
    while block == _sentinel(pool, level):
        level += 1
        block = int(pool.eviction_table[_sentinel(pool, level), YOUNGER])
    pool.eviction[LOWEST] = level
    return block


def _check(where: str, pool: PoolArrays, cold: list[int], protected: list[int]) -> None:
    """Check that each ring has the cached blocks of its level in the order of the cold list, and that none is lower."""
    check_cold(where, pool, cold, protected)
    cached = [block for block in cold if pool.records[block, NAME]]
    for level in range(NUM_LEVELS):
        ring = blocks_of_ring(where, pool.eviction_table, _sentinel(pool, level))
        assert ring == [block for block in cached if pool.ranks[block] == level], f"{where}: ring {level} differs"
        assert not ring or level >= pool.eviction[LOWEST], f"{where}: ring {level} has blocks below the lowest"


class PriorityArrays(FeaturedArrays):
    """The arrays of a pool with this policy."""

    __slots__ = ()
    policy: ClassVar = PolicyMoments(
        note_request=_note_request,
        enqueue=_enqueue,
        note_claim=_leave_ring,
        choose_victim=_choose_victim,
        note_eviction=_leave_ring,
        note_drop=_note_drop,
    )


PRIORITY: Final = EvictionPolicy("priority", PriorityArrays, new_state=_new_state, check=_check)
