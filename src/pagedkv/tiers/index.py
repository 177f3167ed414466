"""The index of a store: its entries, their sizes, and the order of eviction.

An entry is a block of a pool (:mod:`pagedkv.blocks`), with the entry's key as digest and the entry's size in bytes
in place of a token. So stores use the names, reference counts, eviction policies and audit of device pools. Bytes of
one entry in the index, with LRU::

    record 56 | size 4 | digest 32 | index bucket 3..6                 = 95..98

An entry has a name while it can be loaded. Entries that are vacant, that are being written, or that were dropped while
they had references are blocks in use without a name. Vacant entries form a list of their own: in the pool's queue they
would be allocated before an entry is evicted.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.auditing import check_pool
from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.digests import set_digest
from pagedkv.blocks.eviction.policy import note_request
from pagedkv.blocks.eviction.registry import policy_named
from pagedkv.blocks.life_cycle import (
    NO_STEP,
    acquire,
    acquire_all,
    claim_all,
    drop_name,
    release,
    release_all,
    reuse_all,
)
from pagedkv.blocks.prefix_index import bucket_of, find, has_digest, name_block
from pagedkv.blocks.record import (
    LIFE,
    NAME,
    NEXT,
    NULL_BLOCK,
    NUM_FREE,
    NUM_NAMED,
    NUM_SENTINELS,
    PARENT,
    PARENT_LIFE,
    WITHDRAWN,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined, prefetch
from pagedkv.contract.arrays import DIGEST_WORDS, Int32Array, Int64Array, Uint32Array
from pagedkv.tiers.words import KEY_NBYTES, words_of

NO_ENTRY: Final = NULL_BLOCK
ENTRY_NAME: Final = 1  # of the only group
FETCHED_AHEAD: Final = 16  # keys whose entries are fetched before they are compared
NUM_OUTPUTS_UNKNOWN: Final = -1
VACANT: Final = 0  # in ``places``: the first vacant entry
NUM_VACANT: Final = 1
NUM_PLACES: Final = 2


@inlined
def _make_vacant(pool: PoolArrays, places: Int64Array, entry: int) -> None:
    """Put an entry without a name and with one reference at the front of the vacant entries."""
    pool.records[entry, NEXT] = places[VACANT]
    places[VACANT] = entry
    places[NUM_VACANT] += 1


@compiled
def _begin(pool: PoolArrays, places: Int64Array, entries: Int32Array) -> None:
    """Make all entries vacant; ``entries`` is scratch of as many."""
    acquire_all(pool, entries)
    for place in range(len(entries) - 1, -1, -1):
        _make_vacant(pool, places, entries[place])


@compiled
def _reclaim(pool: PoolArrays, places: Int64Array) -> None:
    """Make entries vacant that have neither a name nor a reference any more."""
    entry = pool.records[NULL_BLOCK, NEXT]
    while entry != NULL_BLOCK and not pool.records[entry, NAME]:
        _make_vacant(pool, places, acquire(pool))
        entry = pool.records[NULL_BLOCK, NEXT]


@compiled
def _take(pool: PoolArrays, places: Int64Array, key: Uint32Array, nbytes: int) -> int:
    """Take a vacant entry for a key. The caller has checked that one exists."""
    entry = int(places[VACANT])
    places[VACANT] = pool.records[entry, NEXT]
    places[NUM_VACANT] -= 1
    set_digest(pool, entry, key)
    pool.tokens[entry, 0] = nbytes
    return entry


@compiled
def _evict(pool: PoolArrays, places: Int64Array) -> int:
    """Evict the entry that the policy chooses. The caller has checked that one can be evicted."""
    entry = acquire(pool)
    _make_vacant(pool, places, entry)
    return entry


@compiled
def _look_up(pool: PoolArrays, keys: Uint32Array, entries: Int32Array) -> int:
    """Write the entry of each key, or ``NO_ENTRY``; return how many leading keys have one.

    All buckets are read before the entries, so that the processor waits for many cache misses at once.
    """
    for place in range(len(keys)):
        entries[place] = pool.buckets[bucket_of(pool, ENTRY_NAME, keys[place])]
    num_leading = len(keys)
    for place in range(len(keys)):
        if place + FETCHED_AHEAD < len(keys):
            prefetch(pool.digests, int(entries[place + FETCHED_AHEAD]), 0)
        entry = int(entries[place])
        if entry != NO_ENTRY and not has_digest(pool, entry, keys[place]):
            entry = int(find(pool, ENTRY_NAME, keys[place]))
            entries[place] = entry
        if entry == NO_ENTRY and num_leading == len(keys):
            num_leading = place
    return num_leading


@compiled
def _first_evictable(pool: PoolArrays, owners: Int32Array, owner: int) -> int:
    """Return the first entry of an owner in the queue of entries without references; ``NO_ENTRY`` if there is none."""
    entry = int(pool.records[NULL_BLOCK, NEXT])
    while entry != NULL_BLOCK and (entry >= len(owners) or owners[entry] != owner):
        entry = int(pool.records[entry, NEXT])
    return entry


@compiled
def _publish(pool: PoolArrays, entry: int, parent: int) -> None:
    """Name an entry by its key."""
    name_block(pool, ENTRY_NAME, entry, parent, pool.records[parent, LIFE])


@compiled
def _release(pool: PoolArrays, entry: int) -> None:
    release(pool, entry, NO_STEP)


@compiled
def _drop(pool: PoolArrays, entry: int) -> None:
    drop_name(pool, entry, WITHDRAWN)


@compiled
def _note_use(pool: PoolArrays, entries: Int32Array) -> None:
    """Notify the policy that a chain, head first, is about to be released."""
    note_request(pool, entries, NUM_OUTPUTS_UNKNOWN)


class StoreIndex:
    """The entries of one store.

    Args:
        max_entries: most entries, ready or being written.
        policy: name of the eviction policy, as in ``SpaceConfig.eviction``.

    Raises:
        ConfigurationError: no entry, or an unknown policy.
    """

    def __init__(self, max_entries: int, policy: str) -> None:
        self._pool = BlockPool("store", max_entries + 1, 1, policy=policy_named(policy))
        self._arrays = self._pool.arrays
        self._places = np.zeros(NUM_PLACES, np.int64)
        self._places[VACANT] = NO_ENTRY
        _begin(self._arrays, self._places, np.zeros(max_entries, np.int32))

    def __len__(self) -> int:
        """Count the entries that can be loaded. O(1)."""
        return int(self._arrays.counts[NUM_NAMED])

    @property
    def nbytes(self) -> int:
        """Bytes of the bookkeeping."""
        return self._pool.nbytes + self._places.nbytes

    @property
    def has_vacant(self) -> bool:
        """Whether an entry can be taken without eviction. O(1)."""
        return bool(self._places[NUM_VACANT])

    @property
    def num_vacant(self) -> int:
        """Entries that can be taken without eviction. O(1)."""
        return int(self._places[NUM_VACANT])

    @property
    def can_evict(self) -> bool:
        """Whether there is an entry without references. O(1)."""
        return bool(self._arrays.counts[NUM_FREE])

    @property
    def sizes(self) -> Int32Array:
        """Bytes of all entries by id, also of vacant ones: int32 ``[entries]``."""
        sizes: Int32Array = self._arrays.tokens[:, 0]
        return sizes

    def first_evictable(self, owners: Int32Array, owner: int) -> int:
        """Return the entry of an owner that may be evicted first; ``NO_ENTRY`` if there is none. O(entries).

        Args:
            owners: the owner of each entry: int32 ``[entries]``.
            owner: which.
        """
        return int(_first_evictable(self._arrays, owners, owner))

    def find(self, key: bytes) -> int:
        """Return the entry of a key, or ``NO_ENTRY``. Changes nothing."""
        return self._pool.prefix_index.find(0, key) or NO_ENTRY

    def look_up(self, keys: Uint32Array) -> tuple[Int32Array, int]:
        """Return each key's entry, or ``NO_ENTRY``, and how many leading keys have one. O(keys). Changes nothing."""
        entries = np.empty(len(keys), np.int32)
        return entries, int(_look_up(self._arrays, keys, entries))

    def key_of(self, entry: int) -> bytes:
        """Return the key of an entry; of a vacant entry, its last key."""
        return bytes(self._arrays.digests[entry].astype(">u4"))

    def size_of(self, entry: int) -> int:
        """Return the bytes of an entry."""
        return int(self._arrays.tokens[entry, 0])

    def sizes_of(self, entries: Int32Array) -> Int32Array:
        """Return the bytes of several entries."""
        sizes: Int32Array = self._arrays.tokens[entries, 0]
        return sizes

    def resize(self, entry: int, nbytes: int) -> None:
        """Set the bytes of an entry."""
        self._arrays.tokens[entry, 0] = nbytes

    def take(self, key: bytes, nbytes: int) -> int:
        """Take a vacant entry for a key, with one reference and without a name. The index must have a vacant entry."""
        assert self.has_vacant, "no entry is vacant"
        words = words_of(np.frombuffer(key, np.uint8).reshape(1, KEY_NBYTES))
        return int(_take(self._arrays, self._places, words[0], nbytes))

    def publish(self, entry: int, parent: int) -> None:
        """Name an entry, so that its key finds it, as the continuation of ``parent`` (``NO_ENTRY``: unknown)."""
        _publish(self._arrays, entry, parent)

    def abandon(self, entry: int) -> None:
        """Release the one reference of an entry that was never published."""
        _release(self._arrays, entry)
        _reclaim(self._arrays, self._places)

    def evict(self) -> int:
        """Evict the entry that the policy chooses, and return it. :attr:`can_evict` must be true.

        Its key and size can be read until the next entry is taken.
        """
        assert self.can_evict, "no entry can be evicted"
        return int(_evict(self._arrays, self._places))

    def drop(self, entry: int) -> None:
        """Remove the name of an entry, also while it has references."""
        _drop(self._arrays, entry)
        _reclaim(self._arrays, self._places)

    def use(self, entries: Int32Array) -> None:
        """Take a reference to each entry of a chain, as for a hit, which the eviction policy notes."""
        reuse_all(self._arrays, entries)

    def hold(self, entries: Int32Array) -> None:
        """Take a reference to each entry, which the eviction policy does not note as a hit."""
        claim_all(self._arrays, entries)

    def let_go(self, entry: int) -> None:
        """Release one reference to an entry."""
        _release(self._arrays, entry)
        _reclaim(self._arrays, self._places)

    def let_go_chain(self, entries: Int32Array) -> None:
        """Release one reference to each entry of a chain, given head first; the tail is evicted before the head."""
        named = entries[self._arrays.records[entries, NAME] != 0]
        if len(named):
            _note_use(self._arrays, named)
        release_all(self._arrays, entries)
        _reclaim(self._arrays, self._places)

    def advance(self, now_s: float) -> None:
        """Set the clock of the eviction policy."""
        self._pool.advance(now_s)

    def all_entries(self) -> npt.NDArray[np.int64]:
        """Return the ids of all entries that can be loaded. O(entries)."""
        return self._pool.prefix_index.named_blocks()

    def entries_between(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the ids from ``first`` to below ``stop`` of entries that can be loaded. O(stop - first)."""
        records = self._arrays.records[:-NUM_SENTINELS]
        return np.flatnonzero(records[first:stop, NAME]) + first

    def continuing(self, entries: Iterable[int]) -> list[int]:
        """Return all entries whose chain of known parents leads to one of ``entries``, without these.

        O(entries x depth).
        """
        records = self._arrays.records[:-NUM_SENTINELS]
        is_reached = np.zeros(len(records), bool)
        given = list(entries)
        is_reached[given] = True
        named = np.flatnonzero(records[:, NAME])
        parents = records[named, PARENT]
        linked = (parents != NO_ENTRY) & (records[named, PARENT_LIFE] == records[parents, LIFE])
        named, parents = named[linked], parents[linked]
        while (new := is_reached[parents] & ~is_reached[named]).any():
            is_reached[named[new]] = True
        is_reached[given] = False
        return [int(entry) for entry in np.flatnonzero(is_reached)]

    def check(self) -> None:
        """Check the invariants of the pool and of the vacant entries. Raises AssertionError. O(entries)."""
        check_pool(self._pool)
        records, entry, seen = self._arrays.records, int(self._places[VACANT]), 0
        while entry != NO_ENTRY:
            assert not records[entry, NAME], f"vacant entry {entry} has a name"
            seen += 1
            assert seen <= self._places[NUM_VACANT], "the chain of vacant entries is longer than counted"
            entry = int(records[entry, NEXT])
        assert seen == self._places[NUM_VACANT], "the chain of vacant entries is shorter than counted"
        assert len(self._arrays.digests[0]) == DIGEST_WORDS, "a key has other words"
