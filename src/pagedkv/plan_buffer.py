"""The layout of a plan as one buffer of int32 words, little-endian: one packet to a GPU, one message to other ranks.

Defines the position of every part, and checks that a buffer from outside is a valid plan. The meaning of the parts is
described in :mod:`pagedkv.contract.plan`; its objects are views of such a buffer. There are P pools and G
tables: one a group, followed by the second tables of groups that keep draft states::

    word  0  MAGIC  VERSION  NUM_WORDS  NUM_PARTS  STEP_LOW  STEP_HIGH  NUM_POOLS  NUM_TABLES
          8  FINGERPRINT of the space's configuration, 16 bytes (:mod:`pagedkv.fingerprint`)
         12  NUM_GROUPS  CHECKSUM_KIND  CHECKSUM_LOW  CHECKSUM_HIGH
         16  the directory: one line a part; a part has the same line in all plans of a space:
             KIND          OWNER OFFSET LENGTH      arrays of LENGTH words each
             POOL_NAMES    0                        1  for each pool the bytes of its name, then its UTF-8, padded
             SWAPS_OUT     0 .. P-1                 2  src_ids, dst_ids
             SWAPS_IN      0 .. P-1                 2  src_ids, dst_ids
             COPIES        0 .. P-1                 2  src_ids, dst_ids
             RUNS          table g                  3  rows, starts, counts     (two lines for
             ENTRIES       table g                  1  block_ids                 each table)
             COMPUTE       0                        3  rows, starts, ends
             NEW_BLOCKS    0 .. P-1                 1  block_ids
             UNKNOWN       0                        2  counts, steps_back: as many as ranges, or none
             STARTS        group g                  1  starts    (a line for each group outside prefix caching)
             DRAFT_STATES  0                        1  firsts: as many as ranges, or none   (a line where any group
                                                       keeps draft states)
             ENDS          group g                  1  ends      (a line for each group of cross-attention)
     16 + 4 x NUM_PARTS
             the arrays, in the order of the directory, each padded with zeros to a multiple of 4 words, so that each
             begins at a multiple of 16 bytes; a part without words has OFFSET 0

The pool names (a few words a plan) make a buffer readable without its configuration. The fingerprint prevents a device
from carrying out a plan of another configuration. A change of an existing part raises VERSION; new kinds of parts are
added as new lines at the end.

The checksum covers all words, its own two as zeros. Whoever restores a plan checks it, so that a buffer that was spoilt
on its way is refused; it does not protect from someone who means to deceive. Its kind is ``XXH3`` (XXH3-64) where the
writer has the package ``xxhash``, and then the reader needs it as well; else ``SUMS``: the sum of all words, and the
sum of each word times its place from 1 on, its halves of 32 bits folded together. It is computed when a step is
planned, which for 1,024 rows, 12.5 KB, then takes 18.7 us instead of 16.0 with XXH3, and some 7 us more with sums, and
again where a plan is restored.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arguments import LARGEST_SIZE
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.extras import needing
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.errors import PlanError
from pagedkv.fingerprint import fingerprint

__all__ = [
    "PlanLayout",
    "add_moves",
    "open_buffer",
    "padded",
    "read_directory",
    "read_fingerprint",
    "read_step_id",
    "seal",
]

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.integer]
Directory: TypeAlias = list[list[int]]
"""For each part: kind, owner, offset and length."""

# Words of the header.
MAGIC: Final = 0
VERSION: Final = 1
NUM_WORDS: Final = 2
NUM_PARTS: Final = 3
STEP_LOW: Final = 4
STEP_HIGH: Final = 5
NUM_POOLS: Final = 6
NUM_TABLES: Final = 7
FINGERPRINT: Final = 8
NUM_GROUPS: Final = 12
CHECKSUM_KIND: Final = 13
CHECKSUM_LOW: Final = 14
CHECKSUM_HIGH: Final = 15
HEADER_WORDS: Final = 16

# Words of a line of the directory.
KIND: Final = 0
OWNER: Final = 1
OFFSET: Final = 2
LENGTH: Final = 3
LINE_WORDS: Final = 4

# Kinds of parts.
POOL_NAMES: Final = 1
SWAPS_OUT: Final = 2
SWAPS_IN: Final = 3
COPIES: Final = 4
RUNS: Final = 5
ENTRIES: Final = 6
COMPUTE: Final = 7
NEW_BLOCKS: Final = 8
STARTS: Final = 9
UNKNOWN: Final = 10
DRAFT_STATES: Final = 11
ENDS: Final = 12

ONE_VALUE_PER_RANGE: Final = frozenset({STARTS, UNKNOWN, DRAFT_STATES, ENDS})
ARRAYS_OF_KIND: Final = (0, 1, 2, 2, 2, 3, 1, 3, 1, 1, 2, 1, 1)
MAGIC_WORD: Final = int.from_bytes(b"pkvP", "little")
CURRENT_VERSION: Final = 5
XXH3: Final = 1
SUMS: Final = 2
ALIGNMENT: Final = 4  # words: 16 bytes, which a GPU thread loads at once
WORD_NBYTES: Final = 4
LOW_WORD: Final = 2**32 - 1


def padded(num_words: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-num_words // ALIGNMENT) * ALIGNMENT


def _num_fixed_parts(num_pools: int, num_tables: int) -> int:
    """Count the parts that every plan has: all except STARTS, DRAFT_STATES and ENDS."""
    return 3 + 4 * num_pools + 2 * num_tables


@lru_cache(maxsize=16)
def _parts(
    num_pools: int, num_tables: int, outsiders: tuple[int, ...], crossing: tuple[int, ...], *, has_draft_states: bool
) -> tuple[tuple[int, int], ...]:
    """Kind and owner of every part, in the order of the directory."""
    moves = [(kind, pool) for kind in (SWAPS_OUT, SWAPS_IN, COPIES) for pool in range(num_pools)]
    writes = [(kind, table) for table in range(num_tables) for kind in (RUNS, ENTRIES)]
    new = [(NEW_BLOCKS, pool) for pool in range(num_pools)]
    starts = [(STARTS, group) for group in outsiders]
    draft_states = [(DRAFT_STATES, 0)] if has_draft_states else []
    ends = [(ENDS, group) for group in crossing]
    return ((POOL_NAMES, 0), *moves, *writes, (COMPUTE, 0), *new, (UNKNOWN, 0), *starts, *draft_states, *ends)


class PlanLayout:
    """The parts of the buffer that are equal in all plans of one space.

    Attributes:
        pool_names: the pools, in the order of the directory.
        fingerprint: of the space's configuration.
        lines: the line of each part in the directory, by kind and owner.
        template: header, directory and names as words, without any other part.
    """

    def __init__(self, config: SpaceConfig) -> None:
        """Lay out the directory for the pools and tables of a configuration."""
        self.pool_names = config.pool_names
        self.fingerprint = fingerprint(config)
        num_tables = len(config.groups) + len(config.drafting)
        has_draft_states = len(config.drafting) > 0
        parts = _parts(
            len(self.pool_names), num_tables, config.own_starts, config.crossing, has_draft_states=has_draft_states
        )
        self.lines = {part: line for line, part in enumerate(parts)}
        names = _names_as_words(self.pool_names)
        directory_end = HEADER_WORDS + LINE_WORDS * len(parts)
        template = np.zeros(directory_end + padded(len(names)), np.int32)
        template[:FINGERPRINT] = [
            MAGIC_WORD, CURRENT_VERSION, len(template), len(parts), 0, 0, len(self.pool_names), num_tables
        ]  # fmt: skip
        template[FINGERPRINT:NUM_GROUPS] = np.frombuffer(self.fingerprint, np.int32)
        template[NUM_GROUPS], template[CHECKSUM_KIND] = len(config.groups), SUMS if _xxh3() is None else XXH3
        lines = template[HEADER_WORDS:directory_end].reshape(-1, LINE_WORDS)
        lines[:, : OWNER + 1] = parts
        lines[0, OFFSET:] = directory_end, len(names)
        template[directory_end : directory_end + len(names)] = names
        self.template = template

    def new_buffer(self, step_id: int, num_words: int) -> Int32Array:
        """Make the buffer of a step's plan, with room for ``num_words`` words of parts that are added later."""
        template = self.template
        buffer = np.empty(len(template) + num_words, np.int32)
        buffer[: len(template)] = template
        buffer[STEP_LOW] = (step_id & 0xFFFF_FFFF) - ((step_id & 0x8000_0000) << 1)
        buffer[STEP_HIGH] = step_id >> 32
        return buffer


@cache
def _xxh3() -> Callable[[Int32Array], int] | None:
    """Return XXH3-64 as a function; None if the package is not installed."""
    try:
        return cast("Callable[[Int32Array], int]", import_module("xxhash").xxh3_64_intdigest)
    except ModuleNotFoundError:
        return None


def seal(words: Int32Array) -> None:
    """Write the checksum of a complete plan, in whose place there are zeros. O(words)."""
    struct.pack_into("<Q", words.data, WORD_NBYTES * CHECKSUM_LOW, _checksum(words, int(words[CHECKSUM_KIND])))


def _checksum(words: Int32Array, kind: int) -> int:
    """Compute the checksum of the words of a plan that is not sealed.

    Raises:
        PlanError: there is no such kind.
        MissingExtraError: it is XXH3, and the package xxhash is not installed.
    """
    if kind == SUMS:
        numbers = words.view(np.uint32).astype(np.uint64)
        weighted = int(np.dot(numbers, np.arange(1, len(numbers) + 1, dtype=np.uint64)))
        return (int(numbers.sum()) & LOW_WORD) | ((weighted ^ weighted >> 32) & LOW_WORD) << 32
    if kind != XXH3:
        raise PlanError(f"the plan has a checksum of kind {kind}, which this library does not know")
    if (digest := _xxh3()) is None:
        with needing("tiers", "this plan's checksum"):
            digest = import_module("xxhash").xxh3_64_intdigest
    return int(digest(words))


def _names_as_words(names: Sequence[str]) -> Int32Array:
    packed = bytearray()
    for name in names:
        encoded = name.encode(errors="surrogatepass")
        packed += len(encoded).to_bytes(WORD_NBYTES, "little") + encoded + bytes(-len(encoded) % WORD_NBYTES)
    return np.frombuffer(bytes(packed), np.int32)


def add_moves(buffer: Int32Array, line: int, pairs: Mapping[int, int]) -> None:
    """Append moves, given as destination -> source, to a buffer; an empty mapping appends nothing."""
    if not pairs:
        return
    entry = HEADER_WORDS + LINE_WORDS * line
    offset, length = int(buffer[NUM_WORDS]), len(pairs)
    end = offset + ARRAYS_OF_KIND[COPIES] * padded(length)
    buffer[offset:end] = 0
    buffer[offset : offset + length] = list(pairs.values())
    buffer[offset + padded(length) :][:length] = list(pairs)
    buffer[entry + OFFSET], buffer[entry + LENGTH], buffer[NUM_WORDS] = offset, length, end


def read_step_id(buffer: Int32Array) -> int:
    """Join the two halves of a step's number."""
    return (int(buffer[STEP_HIGH]) << 32) + (int(buffer[STEP_LOW]) & 0xFFFF_FFFF)


def read_fingerprint(buffer: Int32Array) -> bytes:
    """Read the fingerprint of a plan's configuration."""
    return buffer[FINGERPRINT:NUM_GROUPS].tobytes()


def read_directory(buffer: Int32Array) -> Directory:
    """Read the directory of a buffer that was checked to be a plan."""
    end = HEADER_WORDS + LINE_WORDS * int(buffer[NUM_PARTS])
    directory: Directory = buffer[HEADER_WORDS:end].reshape(-1, LINE_WORDS).tolist()
    return directory


def open_buffer(source: Buffer) -> tuple[Int32Array, tuple[str, ...]]:
    """View any object that holds bytes as the read-only words of a plan, and check all of it.

    Returns the words and the names of the pools.

    Raises:
        PlanError: which check failed, with the numbers.
        MissingExtraError: the checksum is XXH3, and the package xxhash is not installed.
    """
    words = _as_words(source)
    _check_seal(words)
    _check_header(words)
    directory = read_directory(words)
    _check_directory(words, directory)
    _check_values(words, directory)
    return words, _read_names(words, directory)


def _as_words(source: Buffer) -> Int32Array:
    if isinstance(source, np.ndarray) and source.dtype.kind not in "iu":
        raise PlanError(f"a plan's buffer must be of integers or bytes, got {source.dtype}")
    try:
        octets = np.frombuffer(source, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise PlanError(f"a plan's buffer must be contiguous bytes: {error}") from error
    if len(octets) % WORD_NBYTES or len(octets) < WORD_NBYTES * HEADER_WORDS:
        raise PlanError(f"a plan is at least {HEADER_WORDS} words of 4 bytes, got {len(octets)} bytes")
    words: Int32Array = octets.view(np.int32)
    words.flags.writeable = False
    return words


def _check_seal(words: Int32Array) -> None:
    """Check that the buffer is a whole plan of this version, and that no word has changed since it was written."""
    magic, version, num_words = words[: NUM_WORDS + 1].tolist()
    if magic != MAGIC_WORD:
        raise PlanError(f"this is no plan: it begins with {magic:#x} instead of {MAGIC_WORD:#x}")
    if version != CURRENT_VERSION:
        raise PlanError(f"the plan has version {version} of the layout, this library reads version {CURRENT_VERSION}")
    if num_words != len(words):
        raise PlanError(f"the plan has {num_words} words, but the buffer {len(words)}")
    unsealed = words.copy()
    unsealed[CHECKSUM_LOW : CHECKSUM_HIGH + 1] = 0
    (written,) = struct.unpack_from("<Q", words.data, WORD_NBYTES * CHECKSUM_LOW)
    checksum = _checksum(unsealed, int(words[CHECKSUM_KIND]))
    if checksum != written:
        raise PlanError(f"the plan was spoilt on its way: its checksum is {checksum:#x}, not {written:#x}")


def _check_header(words: Int32Array) -> None:
    num_parts, _, step_high, num_pools, num_tables = words[NUM_PARTS:FINGERPRINT].tolist()
    num_groups = int(words[NUM_GROUPS])
    if step_high < 0 or num_pools < 1 or not num_pools <= num_groups <= num_tables:
        raise PlanError(
            f"no plan has {num_pools} pools, {num_groups} groups, {num_tables} tables and a step of which {step_high} "
            "is a half"
        )
    # These numbers come from outside: check them before a directory of their size is built.
    num_others = num_parts - _num_fixed_parts(num_pools, num_tables)
    if num_parts * LINE_WORDS + HEADER_WORDS > len(words) or not 0 <= num_others < 2 * num_tables:
        raise PlanError(
            f"{num_parts} parts do not fit {len(words)} words with {num_pools} pools and {num_tables} tables"
        )


def _check_directory(words: Int32Array, directory: Directory) -> None:
    """Check that every part has the kind and owner of its line, and begins where the one before it ends."""
    end = HEADER_WORDS + LINE_WORDS * len(directory)
    num_pools, num_tables = int(words[NUM_POOLS]), int(words[NUM_TABLES])
    others = directory[_num_fixed_parts(num_pools, num_tables) :]
    crossing = [owner for kind, owner, _, _ in others if kind == ENDS]
    has_draft_states = any(kind == DRAFT_STATES for kind, *_ in others)
    outsiders = [owner for _, owner, _, _ in others[: len(others) - has_draft_states - len(crossing)]]
    if outsiders != sorted(set(outsiders) & set(range(num_tables))) or len(outsiders) == num_tables:
        raise PlanError(f"the directory names groups {outsiders} as outside prefix caching, of {num_tables} tables")
    if crossing != sorted(set(crossing) & set(outsiders)):
        raise PlanError(f"the directory names groups {crossing} as cross-attention, but {outsiders} have starts")
    expected = _parts(num_pools, num_tables, tuple(outsiders), tuple(crossing), has_draft_states=has_draft_states)
    for (kind, owner, offset, length), part in zip(directory, expected, strict=True):
        if (kind, owner) != part:
            raise PlanError(f"the directory names part {kind} of {owner} where part {part[0]} of {part[1]} belongs")
        begin = end if length else 0
        end += ARRAYS_OF_KIND[kind] * padded(length)
        if length < 0 or offset != begin or end > len(words):
            raise PlanError(
                f"part {kind} of {owner} has {length} words from word {offset} on; it begins at {begin}, and the plan "
                f"ends at {len(words)}"
            )
    if end != len(words):
        raise PlanError(f"the parts end at word {end}, but the plan at {len(words)}")


def _check_values(words: Int32Array, directory: Directory) -> None:
    """Check that no number is negative, that runs have as many entries as counted, and that no range is empty."""
    _, _, offset, length = directory[0]
    numbers = words[offset + padded(length) :]
    if numbers.min(initial=0) < 0:
        raise PlanError(f"word {len(words) - len(numbers) + int(numbers.argmin())} is negative: {numbers.min()}")
    for (kind, owner, offset, length), following in pairwise(directory):
        if kind == RUNS and length + following[LENGTH] > 0:
            _check_runs(owner, words[offset + 2 * padded(length) :][:length], following[LENGTH])
        elif kind == COMPUTE:
            starts, ends = (words[offset + place * padded(length) :][:length] for place in (1, 2))
            if not (starts < ends).all():
                place = int((starts >= ends).argmax())
                raise PlanError(f"range {place} begins at {starts[place]} and ends at {ends[place]}")
    _check_values_of_ranges(words, directory)


def _check_values_of_ranges(words: Int32Array, directory: Directory) -> None:
    """Check that each array with one value a range has as many values as ranges, none beyond its range's end."""
    _, _, compute, num_ranges = next(line for line in directory if line[KIND] == COMPUTE)
    common = words[compute + 2 * padded(num_ranges) :][:num_ranges]
    values_of = {}
    for kind, owner, offset, length in directory:
        if kind not in ONE_VALUE_PER_RANGE or (kind not in {STARTS, ENDS} and length == 0):
            continue
        if length != num_ranges:
            raise PlanError(_wrong_number_of_values(kind, owner, length, num_ranges))
        values_of[kind, owner] = words[offset : offset + length]
    for (kind, owner), values in values_of.items():
        ends = values_of.get((ENDS, owner), common) if kind in {STARTS, ENDS} else common
        if (values > ends).any():
            place = int((values > ends).argmax())
            raise PlanError(_value_beyond_end(kind, owner, place, int(values[place]), int(ends[place])))


def _wrong_number_of_values(kind: int, owner: int, length: int, num_ranges: int) -> str:
    if kind in {STARTS, ENDS}:
        what = "starts" if kind == STARTS else "ends"
        return f"group {owner} has {length} {what}, but {num_ranges} ranges are computed"
    what = "unknown tokens" if kind == UNKNOWN else "draft states"
    return f"the part of {what} has {length} values, but {num_ranges} ranges are computed"


def _value_beyond_end(kind: int, owner: int, place: int, values: int, end: int) -> str:
    if kind == STARTS:
        return f"range {place} begins at {values} in group {owner}, and ends at {end}"
    if kind == UNKNOWN:
        return f"range {place} ends at {end} with {values} unknown tokens"
    return f"range {place} ends at {end}, before its first draft state, {values}"


def _check_runs(group: int, counts: Int32Array, num_entries: int) -> None:
    num_counted, shortest = counts.sum(dtype=np.int64), counts.min(initial=LARGEST_SIZE)
    if shortest < 1 or num_counted != num_entries:
        what = f"the runs of group {group} count {num_counted} entries, the shortest {shortest}"
        raise PlanError(f"{what}, but {num_entries} are there")


def _read_names(buffer: Int32Array, directory: Directory) -> tuple[str, ...]:
    """Read the names of the pools.

    Raises:
        PlanError: their lengths do not add up, or they are no UTF-8.
    """
    _, _, offset, length = directory[0]
    packed = buffer[offset : offset + length].tobytes()
    names = []
    start = 0
    for pool in range(int(buffer[NUM_POOLS])):
        nbytes = int.from_bytes(packed[start : start + WORD_NBYTES], "little")
        name = packed[start + WORD_NBYTES : start + WORD_NBYTES + nbytes]
        if len(name) != nbytes or start + WORD_NBYTES > len(packed):
            raise PlanError(f"the name of pool {pool} takes {nbytes} bytes, but only {len(name)} are left")
        try:
            names.append(name.decode(errors="surrogatepass"))
        except UnicodeDecodeError as error:
            raise PlanError(f"the name of pool {pool} is not UTF-8: {error}") from error
        start += WORD_NBYTES + nbytes + -nbytes % WORD_NBYTES
    if start != len(packed):
        raise PlanError(f"the names of {len(names)} pools take {start} bytes, but their part has {len(packed)}")
    return tuple(names)
