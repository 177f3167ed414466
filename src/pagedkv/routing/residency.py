"""Residency: which replicas have a block; HitLengths: how many tokens of a prompt hit there, for all groups of a model.

Residency is a hash table from a block's digest and group to the replicas that have the block, one bit for each.

Open addressing with linear probing; the digest's bits are the hash. An entry without replicas stays as a tombstone
until the table is rebuilt. 128 bits of a digest are stored, so that two blocks with equal keys are less likely than a
memory error. The table is at most 60 % full. An entry has 24 contiguous bytes::

    64 bits of digest, xor group | 64 bits of digest | a bit for each replica

so that three of four probes read one cache line. A table of a million entries is larger than the caches, and memory
latency dominates a look-up, so the entries of the next blocks are prefetched. Rejected: prefetching a block's entry as
soon as it is hashed. That made hashing a prompt of 131,072 tokens 0.15 ms slower, and its look-up 0.04 to 0.09 faster.

A hit of n tokens needs every block before n of a group that keeps whole prefixes, the last blocks of a window or chunk,
and the state at n. A block that one group lacks shortens the hit for all groups. An index that treated the blocks of
all groups as one prefix reduced the reuse of hybrid models from 76 to 25 % (llm-d-router, pull request 2363).
"""

from collections.abc import Sequence
from math import lcm
from typing import Final, TypeAlias, assert_never, final

import numpy as np
import numpy.typing as npt

from pagedkv.compilation.compiled import compiled, inlined, prefetch
from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import DIGEST_WORDS, BoolArray, Int32Array, Int64Array, Uint32Array
from pagedkv.contract.spec import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
    keeps_state,
    keeps_whole_prefix,
    num_sink_tokens,
    refuse_ahead,
)
from pagedkv.errors import ConfigurationError

Uint64Array: TypeAlias = npt.NDArray[np.uint64]
MOST_REPLICAS: Final = 64
SMALLEST: Final = 1024
MOST_FULL: Final = 0.6
HIGH: Final = 0
LOW: Final = 1
BITS: Final = 2
NUM_FIELDS: Final = 3
ONE: Final = np.uint64(1)
NOTHING: Final = np.uint64(0)
HALF_WORD: Final = np.uint64(32)
FETCHED_AHEAD: Final = 16  # distance of prefetching, in blocks

NO_POSITION: Final = -1


@inlined
def _word(digest: Uint32Array, at: int) -> np.uint64:
    return (np.uint64(digest[at]) << HALF_WORD) | np.uint64(digest[at + 1])


@inlined
def _high(digest: Uint32Array, group: int) -> np.uint64:
    return _word(digest, 0) ^ np.uint64(group)


@inlined
def _place(rows: Uint64Array, high: np.uint64, low: np.uint64) -> int:
    """Return the place of a key, or the empty place where it would be inserted."""
    last = np.uint64(len(rows) - 1)
    place = high & last
    while True:
        here = int(place)
        if rows[here, HIGH] == high and rows[here, LOW] == low:
            return here
        if rows[here, HIGH] == NOTHING and rows[here, LOW] == NOTHING:
            return here
        place = (place + ONE) & last


@inlined
def _fetch(words: Uint32Array, digest: Uint32Array, group: int) -> None:
    """Prefetch a block's entry; ``words`` is the table as uint32."""
    prefetch(words, int(_high(digest, group) & np.uint64(len(words) - 1)), 0)


@inlined
def _bits(rows: Uint64Array, digest: Uint32Array, group: int) -> np.uint64:
    """Return the replicas that have a block, one bit for each."""
    bits: np.uint64 = rows[_place(rows, _high(digest, group), _word(digest, 2)), BITS]
    return bits


@compiled
def _add(rows: Uint64Array, words: Uint32Array, digests: Uint32Array, groups: Int32Array, bit: int) -> int:
    """Set a replica's bit of each digest; return how many entries are new to the table."""
    num_new = 0
    for index in range(len(digests)):
        if index + FETCHED_AHEAD < len(digests):
            _fetch(words, digests[index + FETCHED_AHEAD], groups[index + FETCHED_AHEAD])
        high, low = _high(digests[index], groups[index]), _word(digests[index], 2)
        place = _place(rows, high, low)
        if rows[place, HIGH] == NOTHING and rows[place, LOW] == NOTHING:
            rows[place, HIGH], rows[place, LOW] = high, low
            num_new += 1
        rows[place, BITS] |= ONE << np.uint64(bit)
    return num_new


@compiled
def _remove(rows: Uint64Array, digests: Uint32Array, groups: Int32Array, bit: int) -> int:
    """Clear a replica's bit of each digest; return how many were set."""
    num_set = 0
    for index in range(len(digests)):
        place = _place(rows, _high(digests[index], groups[index]), _word(digests[index], 2))
        mask = ONE << np.uint64(bit)
        num_set += 1 if rows[place, BITS] & mask else 0
        rows[place, BITS] &= ~mask
    return num_set


@compiled
def _look_up(rows: Uint64Array, words: Uint32Array, digests: Uint32Array, group: int, out: Uint64Array) -> None:
    """Write the replicas that have each block."""
    for index in range(len(digests)):
        if index + FETCHED_AHEAD < len(digests):
            _fetch(words, digests[index + FETCHED_AHEAD], group)
        out[index] = _bits(rows, digests[index], group)


@inlined
def _note(num_blocks: Int32Array, replicas: np.uint64, number: int) -> None:
    """Write the number for each replica whose bit is set."""
    for replica in range(MOST_REPLICAS):
        if replicas >> np.uint64(replica) & ONE:
            num_blocks[replica] = number


@compiled
def _lead(  # noqa: PLR0913, PLR0917 - three tables, what is looked up, and where it is written
    held: Uint64Array,
    words: Uint32Array,
    young: Uint64Array,
    old: Uint64Array,
    digests: Uint32Array,
    group: int,
    replicas: np.uint64,
    out: Int32Array,
) -> None:
    """See :func:`leading_blocks`. Ends at the first block up to which no replica has all blocks."""
    all_held = all_held_or_promised = replicas
    for index in range(len(digests)):
        if index + FETCHED_AHEAD < len(digests):
            _fetch(words, digests[index + FETCHED_AHEAD], group)
        bits = _bits(held, digests[index], group)
        if all_held & ~bits != NOTHING:
            _note(out[0], all_held & ~bits, index)
            all_held &= bits
        if all_held_or_promised & ~bits != NOTHING:
            bits |= _bits(young, digests[index], group) | _bits(old, digests[index], group)
            if all_held_or_promised & ~bits != NOTHING:
                _note(out[1], all_held_or_promised & ~bits, index)
                all_held_or_promised &= bits
                if all_held_or_promised == NOTHING:
                    return
    _note(out[0], all_held, len(digests))
    _note(out[1], all_held_or_promised, len(digests))


@compiled
def _move(old: Uint64Array, rows: Uint64Array) -> int:
    """Copy the entries of an old table that have replicas into an empty table; return their number."""
    num_entries = 0
    for index in range(len(old)):
        if old[index, BITS] != NOTHING:
            place = _place(rows, old[index, HIGH], old[index, LOW])
            for field in range(NUM_FIELDS):
                rows[place, field] = old[index, field]
            num_entries += 1
    return num_entries


@final
class Residency:
    """Blocks of up to 64 replicas.

    Args:
        num_expected: number of blocks for which memory is allocated at once; the table grows beyond.
    """

    def __init__(self, num_expected: int = 0) -> None:
        as_count(num_expected, "num_expected", most=2**40)
        self._num_entries = 0
        self._allocate(num_expected)

    @property
    def nbytes(self) -> int:
        """Size of the table in bytes."""
        return self._rows.nbytes

    def __len__(self) -> int:
        """Count the blocks that some replica has. O(table)."""
        return int(np.count_nonzero(self._rows[:, BITS]))

    def num_blocks_of(self, replica: int) -> int:
        """Count the blocks that a replica has. O(table)."""
        return int(np.count_nonzero(self._rows[:, BITS] & self._mask(replica)))

    def add(self, digests: Uint32Array, groups: Int32Array, replica: int) -> None:
        """Set a replica's bit of some blocks.

        Args:
            digests: uint32 ``[n, 8]``, the words of the blocks' digests.
            groups: int32 ``[n]``, the blocks' groups.
            replica: number of the replica.
        """
        self._require(digests, groups)
        if self._num_entries + len(digests) > MOST_FULL * len(self._rows):
            self._rebuild(len(digests))
        self._num_entries += int(_add(self._rows, self._words, digests, groups, self._number(replica)))

    def remove(self, digests: Uint32Array, groups: Int32Array, replica: int) -> int:
        """Clear a replica's bit of some blocks; return how many were set. Arguments as of :meth:`add`."""
        self._require(digests, groups)
        return int(_remove(self._rows, digests, groups, self._number(replica)))

    def clear(self, replica: int) -> None:
        """Clear a replica's bit of all blocks. O(table)."""
        self._rows[:, BITS] &= ~self._mask(replica)

    def empty(self) -> None:
        """Remove all blocks of all replicas; the table keeps its memory. O(table)."""
        self._rows.fill(0)
        self._num_entries = 0

    @property
    def arrays(self) -> tuple[Uint64Array, Uint32Array]:
        """The table, for loops of this module, valid until it grows: uint64 ``[places, 3]``, and the same as uint32."""
        return self._rows, self._words

    def look_up(self, digests: Uint32Array, group: int = 0, *, out: Uint64Array | None = None) -> Uint64Array:
        """Return the replicas that have each block, one bit for each: uint64 ``[n]``.

        Args:
            digests: uint32 ``[n, 8]``, the words of the blocks' digests.
            group: the blocks' group.
            out: where they are written; None: a new array.
        """
        out = np.empty(len(digests), np.uint64) if out is None else out
        _look_up(self._rows, self._words, digests, group, out)
        return out

    def _mask(self, replica: int) -> np.uint64:
        return ONE << np.uint64(self._number(replica))

    @staticmethod
    def _number(replica: int) -> int:
        return as_count(replica, "the number of a replica", most=MOST_REPLICAS - 1)

    @staticmethod
    def _require(digests: Uint32Array, groups: Int32Array) -> None:
        if digests.dtype != np.uint32 or digests.shape[1:] != (DIGEST_WORDS,):
            raise ConfigurationError(f"digests must be uint32 [n, 8], got {digests.dtype} {list(digests.shape)}")
        if groups.dtype != np.int32 or groups.shape != (len(digests),):
            raise ConfigurationError(
                f"groups must be int32 [{len(digests)}], one for each digest, got {groups.dtype} {list(groups.shape)}"
            )

    def _allocate(self, num_entries: int) -> None:
        size = SMALLEST
        while MOST_FULL * size < num_entries:
            size *= 2
        self._rows = np.zeros((size, NUM_FIELDS), np.uint64)
        self._words = self._rows.view(np.uint32)

    def _rebuild(self, num_more: int) -> None:
        """Move the entries to a larger table, without tombstones."""
        rows = self._rows
        self._allocate(2 * (len(self) + num_more))
        self._num_entries = int(_move(rows, self._rows))


def leading_blocks(
    held: Residency, promised: tuple[Residency, Residency], digests: Uint32Array, group: int, replicas: int
) -> Int32Array:
    """Count the leading blocks of a prompt that each replica has. Blocks after the longest such prefix are not read.

    Args:
        held: blocks that replicas have.
        promised: two tables of promised blocks.
        digests: uint32 ``[n, 8]``, the words of the prompt's digests.
        group: the blocks' group.
        replicas: the replicas to count for, one bit for each.

    Returns:
        int32 ``[2, 64]``, by number of the replica: leading blocks that it has, and that it has or that are promised.
    """
    out = np.zeros((2, MOST_REPLICAS), np.int32)
    (young, _), (old, _) = (each.arrays for each in promised)
    _lead(*held.arrays, young, old, digests, group, np.uint64(replicas), out)
    return out


@final
class HitLengths:
    """The rule for one model. States that are stored inside an interval, at the end of a prompt, are not counted.

    Args:
        groups: the model's KV-cache groups.

    Attributes:
        numbers: numbers of the groups with prefix caching.
        block_sizes: tokens of a block of each of these groups.
        alignment: hits end at multiples of this number of tokens.
        is_plain: whether a hit is a number of leading blocks: there is one group, and it keeps whole prefixes.

    Raises:
        ConfigurationError: no group has prefix caching, or the names of one cover tokens ahead.
    """

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        refuse_ahead(groups, "an index of replicas has no such names")
        self.numbers = [number for number, group in enumerate(groups) if group.prefix_caching]
        self._groups = [groups[number] for number in self.numbers]
        if not self._groups:
            raise ConfigurationError(f"an index needs a group with prefix caching, got {tuple(groups)}")
        self.block_sizes = [group.block_size for group in self._groups]
        self.alignment = lcm(*self.block_sizes)
        self.is_plain = len(self._groups) == 1 and keeps_whole_prefix(self._groups[0])
        self._ends_hits = not any(map(keeps_whole_prefix, self._groups))

    def num_hit_tokens(self, present: Sequence[BoolArray], most: int) -> int:
        """Return how many tokens of a prompt hit in one replica. O(blocks of all groups).

        Args:
            present: for each cached group, bool ``[blocks]``: which leading blocks of the prompt the replica has.
            most: most tokens of a hit; fewer than the prompt's, since its last token is computed.
        """
        if self.is_plain:  # the blocks before the first missing one
            has = present[0][: most // self.alignment]
            return self.alignment * (len(has) if has.all() else int(has.argmin()))
        ends = np.arange(self.alignment, most + 1, self.alignment)
        is_hit = np.ones(len(ends), bool)
        for group, has in zip(self._groups, present, strict=True):
            if len(ends):
                is_hit &= self._holds(group, has, ends)
        found = np.flatnonzero(is_hit)
        return int(ends[found[-1]]) if len(found) else 0

    def _holds(self, group: GroupSpec, has: BoolArray, ends: Int64Array) -> BoolArray:
        """Return for each end of a hit whether a group has the blocks that the next tokens read: bool ``[ends]``."""
        last = ends // group.block_size - 1
        held: BoolArray
        if keeps_state(group):
            held = has[last]
            return held
        missing = np.maximum.accumulate(np.where(has, NO_POSITION, np.arange(len(has))))[last]
        if keeps_whole_prefix(group):
            return np.asarray(missing == NO_POSITION)
        first = _first_needed(group, ends) // group.block_size
        held = missing < (np.minimum(first, last) if self._ends_hits else first)
        sinks = -(-num_sink_tokens(group) // group.block_size)
        for sink in range(min(sinks, len(has))):
            held &= has[sink] | (last < sink)
        return held


def _first_needed(group: GroupSpec, query: Int64Array) -> Int64Array:
    """Return the first position, sinks aside, that a query or a later one reads: int64, as ``query``."""
    match group:
        case FullAttention() | CrossAttention():
            return np.zeros_like(query)
        case SlidingWindow(window=window):
            return np.maximum(0, query - window + 1)
        case ChunkedLocal(chunk_size=size):
            return query // size * size
        case RecurrentState():
            return np.maximum(0, query - 1)
        case _:
            assert_never(group)
