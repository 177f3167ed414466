"""Names: which block holds which content, found by digest or by following the last block's successor.

The columns ``NAME``, ``BUCKET_NEXT``, ``PARENT``, ``PARENT_LIFE`` and ``SUCCESSOR`` belong to this module, and the
buckets. These are a chained hash table. Its hash covers all words of the digest, since digests supplied by
callers may agree in any of them (docs/decisions/0006-exact-hits.md). Chaining was chosen because eviction removes names
from the middle at any time, for which an open table would need tombstones or shifting. Reference counts and queues are
handled elsewhere.

A child stores its parent *and the parent's life*. When the parent's content is lost, its life is incremented, which
makes every link to it invalid without a search for the children.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.event_log import log_event
from pagedkv.blocks.eviction import policy
from pagedkv.blocks.free_queue import is_spare
from pagedkv.blocks.ghosts import recall, remember
from pagedkv.blocks.record import (
    BUCKET_NEXT,
    EVICTED,
    KEPT,
    LIFE,
    NAME,
    NULL_BLOCK,
    NUM_EVICTED,
    NUM_NAMED,
    NUM_SENTINELS,
    OVERWRITTEN,
    PARENT,
    PARENT_LIFE,
    SHED,
    SUCCESSOR,
    PoolArrays,
)
from pagedkv.blocks.siblings import link_child, next_child, unlink_child
from pagedkv.compilation.compiled import inlined, unsigned
from pagedkv.contract.answers import REMOVED, STORED
from pagedkv.contract.arrays import DIGEST_WORDS, Uint32Array
from pagedkv.errors import BlockError

GROUP_SPREAD: Final = 0x9E3779B1  # keeps equal digests of different groups in different buckets
KEYS: Final = (0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5)
"""One for each word, without a pattern: the first constants of SHA-256."""
FIRST_BIT: Final = 31  # of a sum of products; from this bit on, each bit depends on all words
WORD_MASK: Final = 2**32 - 1


@inlined
def bucket_of(pool: PoolArrays, name: int, digest: Uint32Array) -> int:
    """Compute the bucket of a name.

    The sum over pairs of words of ``(word + key) * (other + its key)`` is the hash NH of UMAC (Black, Halevi, Krawczyk,
    Krovetz, Rogaway, 1999), except that sums of word and key are not truncated, so that no factor is 0. The four
    products are independent. The result is the same in 64 bits, which wrap, and in Python's integers, which do not.
    """
    mixed = 0
    for word in range(0, DIGEST_WORDS, 2):
        mixed += (int(digest[word]) + KEYS[word]) * (int(digest[word + 1]) + KEYS[word + 1])
    return (((mixed >> FIRST_BIT) & WORD_MASK) + int(name) * GROUP_SPREAD) & (len(pool.buckets) - 1)


@inlined
def has_digest(pool: PoolArrays, block: int, digest: Uint32Array) -> bool:
    """Compare a block's digest with ``digest``."""
    for word in range(DIGEST_WORDS):  # noqa: SIM110 - all() over a generator does not compile
        if pool.digests[block, word] != digest[word]:
            return False
    return True


@inlined
def find(pool: PoolArrays, name: int, digest: Uint32Array) -> int:
    """Look up the block of a digest; the null block if there is none. The caller verifies the content."""
    block = pool.buckets[bucket_of(pool, name, digest)]
    while block != NULL_BLOCK:
        if pool.records[block, NAME] == name and has_digest(pool, block, digest):
            return int(block)
        block = pool.records[block, BUCKET_NEXT]
    return NULL_BLOCK


@inlined
def is_child_of(pool: PoolArrays, name: int, block: int, parent: int) -> bool:
    """Whether a named block continues the current content of ``parent``."""
    records = pool.records
    return bool(
        records[unsigned(block), NAME] == name
        and records[unsigned(block), PARENT] == parent
        and records[unsigned(block), PARENT_LIFE] == records[unsigned(parent), LIFE]
    )


@inlined
def name_block(pool: PoolArrays, name: int, block: int, parent: int, parent_life: int) -> None:
    """Name a block by its recorded digest, as a child of ``parent`` in the given life of that block."""
    records = pool.records
    bucket = bucket_of(pool, name, pool.digests[block])
    records[block, NAME] = name
    records[block, PARENT] = parent
    records[block, PARENT_LIFE] = parent_life
    records[block, SUCCESSOR] = NULL_BLOCK
    records[block, KEPT] = 0
    records[block, BUCKET_NEXT] = pool.buckets[bucket]
    pool.buckets[bucket] = block
    if pool.records[parent, LIFE] == parent_life:
        if len(pool.siblings):
            link_child(pool, block, parent, parent_life)
        pool.records[parent, SUCCESSOR] = block
    pool.counts[NUM_NAMED] += 1
    policy.note_name(pool, block)
    if len(pool.ghosts):
        recall(pool, block)
    if len(pool.event_log):
        log_event(pool, STORED, block)


@inlined
def unname(pool: PoolArrays, block: int, cause: int = OVERWRITTEN) -> None:
    """Remove a block's name without notifying the eviction policy; links to its content become invalid."""
    records = pool.records
    parent = records[block, PARENT]
    if records[parent, SUCCESSOR] == block:
        records[parent, SUCCESSOR] = next_child(pool, block)
    if len(pool.ghosts):
        remember(pool, block, cause)
    if len(pool.event_log):
        log_event(pool, REMOVED, block)
    if len(pool.siblings):
        unlink_child(pool, block)
    if len(pool.leases):
        pool.leases[block] = 0
    bucket = bucket_of(pool, records[block, NAME], pool.digests[block])
    current = pool.buckets[bucket]
    if current == block:
        pool.buckets[bucket] = records[block, BUCKET_NEXT]
    else:
        while pool.records[current, BUCKET_NEXT] != block:
            current = pool.records[current, BUCKET_NEXT]
        pool.records[current, BUCKET_NEXT] = records[block, BUCKET_NEXT]
    records[block, NAME] = 0
    records[block, BUCKET_NEXT] = NULL_BLOCK
    records[block, SUCCESSOR] = NULL_BLOCK
    records[block, KEPT] = 0
    records[block, LIFE] += 1
    pool.counts[NUM_NAMED] -= 1


@inlined
def lose_content(pool: PoolArrays, block: int) -> None:
    """Remove the name of a cached block that was taken out of its list to make room."""
    pool.counts[NUM_EVICTED] += 1
    cause = SHED
    if not is_spare(pool, block):
        cause = EVICTED
        policy.note_eviction(pool, block)
        policy.note_drop(pool, block)
    unname(pool, block, cause)


class PrefixIndex:
    """The names of one pool, for users and tests; compiled loops use this module's functions."""

    def __init__(self, arrays: PoolArrays) -> None:
        """Wrap the arrays of a pool."""
        self._arrays = arrays

    def __len__(self) -> int:
        """Count the named blocks. O(1)."""
        return int(self._arrays.counts[NUM_NAMED])

    def find(self, group: int, digest: bytes) -> int | None:
        """Look up the block that carries a digest, changing nothing. Raises BlockError. Expected O(1)."""
        if len(digest) != 4 * DIGEST_WORDS:
            raise BlockError(f"a digest has {4 * DIGEST_WORDS} bytes, got {len(digest)}")
        if len(self._arrays.digests) == 0:
            return None
        words = np.frombuffer(digest, dtype=">u4").astype(np.uint32)
        return find(self._arrays, group + 1, words) or None

    def named_blocks(self) -> npt.NDArray[np.int64]:
        """All blocks with a name, in order of their ids. O(blocks)."""
        return np.flatnonzero(self._arrays.records[:-NUM_SENTINELS, NAME])
