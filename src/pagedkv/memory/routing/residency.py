"""Which replicas have a block: a hash table from a block's digest and group to one bit for each replica.

Open addressing with linear probing, from the place that the digest itself gives. An entry that no replica has any more
stays as a tombstone until the table is rebuilt. Of a digest 128 bits are kept, so that two blocks of one name are less
likely than a fault of memory. Bytes of an entry: 16 of digest, 8 of bits; the table is at most 60 % full.
"""

from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from pagedkv.memory.compilation.compiled import compiled, inlined
from pagedkv.memory.contract.arguments import as_count
from pagedkv.memory.contract.arrays import Uint32Array
from pagedkv.memory.contract.errors import ConfigurationError

__all__ = ["MOST_REPLICAS", "Residency", "Uint64Array"]

Uint64Array: TypeAlias = npt.NDArray[np.uint64]

MOST_REPLICAS: Final = 64
DIGEST_WORDS: Final = 8
SMALLEST: Final = 1024
MOST_FULL: Final = 0.6
HIGH: Final = 0
LOW: Final = 1
ONE: Final = np.uint64(1)
NOTHING: Final = np.uint64(0)
HALF_WORD: Final = np.uint64(32)


@inlined
def _word(digest: Uint32Array, at: int) -> np.uint64:
    return (np.uint64(digest[at]) << HALF_WORD) | np.uint64(digest[at + 1])


@inlined
def _place(keys: Uint64Array, high: np.uint64, low: np.uint64) -> int:
    """Return the place of a key, or the empty one where it would be."""
    last = np.uint64(len(keys) - 1)
    place = high & last
    while True:
        here = int(place)
        if keys[here, HIGH] == high and keys[here, LOW] == low:
            return here
        if keys[here, HIGH] == NOTHING and keys[here, LOW] == NOTHING:
            return here
        place = (place + ONE) & last


@inlined
def _high(digest: Uint32Array, group: int) -> np.uint64:
    return _word(digest, 0) ^ np.uint64(group)


@compiled
def _add(keys: Uint64Array, bits: Uint64Array, digests: Uint32Array, groups: npt.NDArray[np.int32], bit: int) -> int:
    """Set a replica's bit of each digest; return how many entries are new to the table."""
    num_new = 0
    for index in range(len(digests)):
        high, low = _high(digests[index], groups[index]), _word(digests[index], 2)
        place = _place(keys, high, low)
        if keys[place, HIGH] == NOTHING and keys[place, LOW] == NOTHING:
            keys[place, HIGH], keys[place, LOW] = high, low
            num_new += 1
        bits[place] |= ONE << np.uint64(bit)
    return num_new


@compiled
def _remove(keys: Uint64Array, bits: Uint64Array, digests: Uint32Array, groups: npt.NDArray[np.int32], bit: int) -> int:
    """Clear a replica's bit of each digest; return how many were set."""
    num_set = 0
    for index in range(len(digests)):
        place = _place(keys, _high(digests[index], groups[index]), _word(digests[index], 2))
        mask = ONE << np.uint64(bit)
        num_set += 1 if bits[place] & mask else 0
        bits[place] &= ~mask
    return num_set


@compiled
def _look_up(keys: Uint64Array, bits: Uint64Array, digests: Uint32Array, group: int, out: Uint64Array) -> None:
    """Write the replicas that have each block."""
    for index in range(len(digests)):
        place = _place(keys, _high(digests[index], group), _word(digests[index], 2))
        out[index] = bits[place]


@compiled
def _move(old_keys: Uint64Array, old_bits: Uint64Array, keys: Uint64Array, bits: Uint64Array) -> int:
    """Enter what an old table has into an empty one; return how many entries that are."""
    num_entries = 0
    for index in range(len(old_keys)):
        if old_bits[index] != NOTHING:
            place = _place(keys, old_keys[index, HIGH], old_keys[index, LOW])
            keys[place, HIGH], keys[place, LOW] = old_keys[index, HIGH], old_keys[index, LOW]
            bits[place] = old_bits[index]
            num_entries += 1
    return num_entries


@final
class Residency:
    """Blocks of up to 64 replicas.

    Args:
        num_expected: blocks for which there is room at once; the table grows beyond.
    """

    def __init__(self, num_expected: int = 0) -> None:
        as_count(num_expected, "num_expected", most=2**40)
        self._num_entries = 0
        self._allocate(num_expected)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._keys.nbytes + self._bits.nbytes

    def __len__(self) -> int:
        """Count the blocks that some replica has. O(table)."""
        return int(np.count_nonzero(self._bits))

    def num_blocks_of(self, replica: int) -> int:
        """Count the blocks that a replica has. O(table)."""
        return int(np.count_nonzero(self._bits & self._mask(replica)))

    def add(self, digests: Uint32Array, groups: npt.NDArray[np.int32], replica: int) -> None:
        """Note that a replica has blocks.

        Args:
            digests: uint32 ``[n, 8]``, words of the blocks' digests; groups: int32 ``[n]``, the group of each.
            replica: number of the replica.
        """
        self._require(digests, groups)
        if self._num_entries + len(digests) > MOST_FULL * len(self._keys):
            self._rebuild(len(digests))
        self._num_entries += int(_add(self._keys, self._bits, digests, groups, self._number(replica)))

    def remove(self, digests: Uint32Array, groups: npt.NDArray[np.int32], replica: int) -> int:
        """Note that a replica has blocks no longer; return how many of them it had."""
        self._require(digests, groups)
        return int(_remove(self._keys, self._bits, digests, groups, self._number(replica)))

    def clear(self, replica: int) -> None:
        """Note that a replica has no block. O(table)."""
        self._bits &= ~self._mask(replica)

    def look_up(self, digests: Uint32Array, group: int = 0) -> Uint64Array:
        """Return the replicas that have each block of a group, uint32 ``[n, 8]``, a bit each: uint64 ``[n]``."""
        out = np.empty(len(digests), np.uint64)
        _look_up(self._keys, self._bits, digests, group, out)
        return out

    def _mask(self, replica: int) -> np.uint64:
        return ONE << np.uint64(self._number(replica))

    @staticmethod
    def _number(replica: int) -> int:
        return as_count(replica, "the number of a replica", most=MOST_REPLICAS - 1)

    @staticmethod
    def _require(digests: Uint32Array, groups: npt.NDArray[np.int32]) -> None:
        if digests.dtype != np.uint32 or digests.shape[1:] != (DIGEST_WORDS,):
            raise ConfigurationError(f"digests must be uint32 [n, 8], got {digests.dtype} {list(digests.shape)}")
        if groups.dtype != np.int32 or groups.shape != (len(digests),):
            raise ConfigurationError(
                f"groups must be int32 [{len(digests)}], one a digest, got {groups.dtype} {list(groups.shape)}"
            )

    def _allocate(self, num_entries: int) -> None:
        size = SMALLEST
        while MOST_FULL * size < num_entries:
            size *= 2
        self._keys = np.zeros((size, 2), np.uint64)
        self._bits = np.zeros(size, np.uint64)

    def _rebuild(self, num_more: int) -> None:
        """Drop tombstones, and make room for more entries."""
        keys, bits = self._keys, self._bits
        self._allocate(2 * (len(self) + num_more))
        self._num_entries = int(_move(keys, bits, self._keys, self._bits))
