"""The order in which free blocks are allocated: an intrusive, circular, doubly linked list.

This module writes in which list a free or deferred block is, and where, and counts it. The value of a block's content
is decided by callers, which append cached blocks at the back, the least valuable first, and put blocks without
content at the front. The spare list (:mod:`~pagedkv.blocks.life_cycle`) is used as soon as no block without
content is left. The protected list is used last; only some eviction policies (:mod:`~pagedkv.blocks.eviction`) put
blocks there. Leased blocks (:mod:`~pagedkv.blocks.leasing`) are in no list; they are moved to the lists before
these run out. Every operation on one block is O(1), also its removal from the middle, which a prefix hit on a free
block needs.

::

    sentinel (null block) -> block without content, newest freed first -> ...
                          -> cached block, least recently used first, tail of a sequence before its head
                          -> sentinel
    sentinel (second record after the blocks) -> spare block, the one that became spare first -> ... -> sentinel
    sentinel (first record after the blocks) -> protected block, least recently used first -> ... -> sentinel
"""

from typing import cast

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.record import (
    DEFERRED,
    FREE,
    IN_USE,
    KEPT,
    NAME,
    NEXT,
    NULL_BLOCK,
    NUM_CACHED,
    NUM_DEFERRED,
    NUM_DEFERRED_LISTS,
    NUM_FREE,
    NUM_SENTINELS,
    PREVIOUS,
    QUEUE,
    RELEASED,
    SPARE,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, featured, inlined, unsigned
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.errors import BlockError


@inlined
def is_spare(pool: PoolArrays, block: int) -> bool:
    """Whether a block is spare, or will be once no step needs it any more."""
    return bool(pool.records[block, KEPT] == SPARE)


@featured
@inlined
def is_leased(pool: PoolArrays, block: int) -> bool:
    """Whether a block has a lease or high priority."""
    return len(pool.leases) > 0 and bool(pool.leases[block] > 0)


@inlined
def deferred_sentinel(records: Int32Array, step: int) -> int:
    """Sentinel of the list of blocks that wait for a step; steps NUM_DEFERRED_LISTS apart share a list."""
    return len(records) - 1 - step % NUM_DEFERRED_LISTS


@inlined
def protected_sentinel(records: Int32Array) -> int:
    """Sentinel of the protected list: the free blocks that are allocated last."""
    return len(records) - NUM_SENTINELS


@inlined
def spare_sentinel(records: Int32Array) -> int:
    """Sentinel of the spare list: the cached blocks that are allocated before the others."""
    return len(records) - NUM_SENTINELS + 1


def free_leased(pool: PoolArrays) -> npt.NDArray[np.bool_]:
    """Mark the records of free leased blocks, which are allocated after all others: bool ``[records]``."""
    is_one = np.zeros(len(pool.records), np.bool_)
    is_one[: len(pool.leases)] = (pool.leases > 0) & (pool.records[: len(pool.leases), QUEUE] == FREE)
    is_one[NULL_BLOCK] = False
    return is_one


@inlined
def unlink(records: Int32Array, block: int) -> None:
    """Remove a block from its list."""
    following = unsigned(records[block, NEXT])
    preceding = unsigned(records[block, PREVIOUS])
    records[preceding, NEXT] = following
    records[following, PREVIOUS] = preceding


@inlined
def link_before(records: Int32Array, place: int, block: int) -> None:
    """Insert a block before ``place`` (if that is a sentinel: at the back of its list)."""
    preceding = unsigned(records[place, PREVIOUS])
    records[block, NEXT] = place
    records[block, PREVIOUS] = preceding
    records[preceding, NEXT] = block
    records[place, PREVIOUS] = block


@inlined
def enter_free(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Mark a block as free, and count it; a named one also as cached."""
    records[block, QUEUE] = FREE
    counts[NUM_FREE] += 1
    if records[block, NAME]:
        counts[NUM_CACHED] += 1


@inlined
def leave_free(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Mark a block as no longer free, and no longer count it as free or cached."""
    records[block, QUEUE] = IN_USE
    counts[NUM_FREE] -= 1
    if records[block, NAME]:
        counts[NUM_CACHED] -= 1


@inlined
def insert_before(records: Int32Array, counts: Int64Array, place: int, block: int) -> None:
    """Free a block, and insert it before ``place`` (if that is a sentinel: at the back of its list)."""
    link_before(records, place, block)
    enter_free(records, counts, block)


@inlined
def put_last(pool: PoolArrays, block: int) -> None:
    """Free a block, and add it at the back of the cold list, whose blocks are allocated from the front."""
    insert_before(pool.records, pool.counts, NULL_BLOCK, block)


@inlined
def prepend(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Add a block at the front, where it is allocated next."""
    insert_before(records, counts, unsigned(records[NULL_BLOCK, NEXT]), block)


@inlined
def remove(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Take a free block out of whichever list it is in."""
    unlink(records, block)
    leave_free(records, counts, block)


@inlined
def wait_for(records: Int32Array, counts: Int64Array, block: int, step: int) -> None:
    """Add an unreferenced block to those that are deferred until a step ends."""
    link_before(records, deferred_sentinel(records, step), block)
    records[block, QUEUE] = DEFERRED
    counts[NUM_DEFERRED] += 1


@inlined
def stop_waiting(records: Int32Array, counts: Int64Array, block: int) -> None:
    """Take a deferred block out of its list."""
    unlink(records, block)
    records[block, QUEUE] = IN_USE
    counts[NUM_DEFERRED] -= 1


@inlined
def first(records: Int32Array) -> int:
    """Return the block to be allocated next; the caller has checked that there is one."""
    block = unsigned(records[NULL_BLOCK, NEXT])
    if block == NULL_BLOCK or records[block, NAME]:
        spare = unsigned(records[spare_sentinel(records), NEXT])
        if spare < len(records) - NUM_SENTINELS:
            block = spare
    if block == NULL_BLOCK:
        block = unsigned(records[protected_sentinel(records), NEXT])
    return block


@inlined
def popleft(records: Int32Array, counts: Int64Array) -> int:
    """Take out the block to be allocated next; the caller has checked that there is one."""
    block = first(records)
    remove(records, counts, block)
    return block


class FreeBlockQueue:
    """The free blocks of one pool, in the order in which they will be allocated.

    A wrapper for users and tests; compiled loops call this module's functions on the same arrays.

    >>> from pagedkv.blocks.record import new_pool_arrays
    >>> queue = FreeBlockQueue(new_pool_arrays(5, 16, caching=False))
    >>> queue.popleft(), queue.popleft_n(2)
    (1, [2, 3])
    >>> queue.append_n([3, 1])
    >>> queue.get_all_free_blocks()
    [4, 3, 1]
    """

    def __init__(self, arrays: PoolArrays) -> None:
        """Wrap the arrays of a pool."""
        self._arrays = arrays
        self._records = arrays.records
        self._counts = arrays.counts

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks. O(1)."""
        return int(self._counts[NUM_FREE])

    def popleft(self) -> int:
        """Take the first block. Raises BlockError when empty. O(1)."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[int]:
        """Take the first ``n`` blocks, or raise BlockError and take none. O(n)."""
        if not 0 <= n <= self.num_free_blocks:
            message = f"cannot take {n} blocks from a queue of {self.num_free_blocks} free blocks"
            raise BlockError(message)
        return [int(popleft(self._records, self._counts)) for _ in range(n)]

    def remove(self, block_id: int) -> None:
        """Take one block from any place. Raises BlockError if it is not in the queue. O(1)."""
        self._require(block_id, FREE)
        remove(self._records, self._counts, block_id)

    def append(self, block_id: int) -> None:
        """Add one block at the back. Raises BlockError if it is in the queue already. O(1)."""
        self._require(block_id, IN_USE)
        put_last(self._arrays, block_id)

    def append_n(self, block_ids: list[int]) -> None:
        """Add blocks at the back, in order, or raise BlockError and add none. O(n)."""
        for block_id in block_ids:
            self._require(block_id, IN_USE)
        if len(set(block_ids)) != len(block_ids):
            message = f"a block appears twice among the {len(block_ids)} blocks to append"
            raise BlockError(message)
        for block_id in block_ids:
            put_last(self._arrays, block_id)

    def get_all_free_blocks(self) -> list[int]:
        """List all free blocks in the order of allocation, leased ones last in the order of their release.

        Changes nothing. O(free blocks), with leases O(blocks log blocks).
        """
        num_free = self.num_free_blocks
        cold = blocks_of_list(self._records, NULL_BLOCK, num_free)
        num_empty = sum(self._records[block, NAME] == 0 for block in cold)
        order = cold[:num_empty] + blocks_of_list(self._records, spare_sentinel(self._records), num_free)
        order += cold[num_empty:]
        order += blocks_of_list(self._records, protected_sentinel(self._records), num_free)
        leased = np.flatnonzero(free_leased(self._arrays))
        order += leased[np.argsort(self._records[leased, RELEASED])].tolist()
        assert len(order) == num_free, f"the queue links {len(order)} blocks but counts {num_free}"
        return order

    def _require(self, block_id: int, place: int) -> None:
        num_blocks = len(self._records) - NUM_SENTINELS
        if not 0 < block_id < num_blocks:
            message = f"block {block_id} is not one of this pool's blocks 1..{num_blocks - 1}"
            raise BlockError(message)
        if self._records[block_id, QUEUE] != place:
            message = f"block {block_id} is {'not ' if place == FREE else ''}in a free queue"
            raise BlockError(message)


@compiled
def _walk(records: Int32Array, sentinel: int, out: Int32Array) -> int:
    """Write the blocks of a list to ``out``; return their number, at most ``len(out) + 1``."""
    block = records[sentinel, NEXT]
    num_blocks = 0
    while block != sentinel and num_blocks <= len(out):
        if num_blocks < len(out):
            out[num_blocks] = block
        num_blocks += 1
        block = records[block, NEXT]
    return num_blocks


def blocks_of_list(records: Int32Array, sentinel: int, num_blocks: int) -> list[int]:
    """Read a whole list; its length differs from ``num_blocks`` only if the list is broken."""
    order = np.empty(num_blocks + 1, np.int32)
    num_walked = _walk(records, sentinel, order)
    return cast("list[int]", order[:num_walked].tolist())
