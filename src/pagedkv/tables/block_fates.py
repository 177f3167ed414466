"""The fate of a prompt's missing blocks: their ghosts, and the content that is cached in their place.

Nothing here changes any state, except for the record of a newly admitted row.
"""

from typing import Final, NamedTuple

from pagedkv.blocks.blocks import EXTRA, NULL_BLOCK, SUCCESSOR, PoolArrays
from pagedkv.blocks.causes import (
    CALLED_OFF,
    DISMISSED,
    EPOCH,
    EVICTED,
    INVALIDATED,
    OVERWRITTEN,
    RESET,
    SHED,
    WITHDRAWN,
)
from pagedkv.blocks.digests import ROOT_WORDS, digest_block
from pagedkv.blocks.extra_keys import ExtraKeyArrays
from pagedkv.blocks.ghosts import find_ghost, ghost_age, ghost_cause, has_forgotten
from pagedkv.blocks.prefix_index import find, is_child_of
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array, Int64Array, Uint32Array
from pagedkv.contract.miss_causes import MissCause, number_of
from pagedkv.tables.rows import BLOCK_SIZE, HIT_ALIGNMENT, NAME_IN_POOL, GroupArrays

__all__ = [
    "AGE",
    "CAUSE",
    "CAUSE_OF_GHOST",
    "FORGOTTEN",
    "GENERATION",
    "GROUP",
    "HAS_TOKEN",
    "NAMED",
    "NEVER",
    "NUM_FIELDS",
    "NUM_HIT",
    "NUM_TOKENS",
    "OF_ROW",
    "POSITION",
    "TOKEN",
    "BookArrays",
    "digest_behind",
    "find_fates",
    "record_miss",
]

# Fates of a block without a ghost; for a ghost its cause is the fate.
NEVER: Final = 0
NAMED: Final = -1  # it is cached
FORGOTTEN: Final = -2  # it may have been cached

CAUSE_OF_GHOST: Final = {
    EVICTED: MissCause.EVICTED,
    SHED: MissCause.SUPERSEDED,
    OVERWRITTEN: MissCause.OVERWRITTEN,
    CALLED_OFF: MissCause.CALLED_OFF,
    WITHDRAWN: MissCause.WITHDRAWN,
    RESET: MissCause.RESET,
    EPOCH: MissCause.OTHER_EPOCH,
    INVALIDATED: MissCause.INVALIDATED,
    DISMISSED: MissCause.FORGOTTEN,
}
NUMBERS_OF_GHOSTS: Final = tuple(number_of(CAUSE_OF_GHOST.get(cause, MissCause.UNKNOWN)) for cause in range(16))

# Fields of a record: an explanation as numbers, and the row.
GENERATION: Final = 0  # 0: there is none
OF_ROW: Final = 1
NUM_TOKENS: Final = 2
NUM_HIT: Final = 3
CAUSE: Final = 4
POSITION: Final = 5
GROUP: Final = 6  # from 1 on; 0: none
HAS_TOKEN: Final = 7
TOKEN: Final = 8
AGE: Final = 9  # from 1 on; 0: none
NUM_FIELDS: Final = 10

NOT_FULL: Final = number_of(MissCause.NOT_FULL)
BOUNDED: Final = number_of(MissCause.BOUNDED)
CHANGED: Final = number_of(MissCause.CHANGED_TOKENS)
NEVER_STORED: Final = number_of(MissCause.NEVER_STORED)
UNKNOWN: Final = number_of(MissCause.UNKNOWN)


@compiled
def digest_behind(
    tokens: Int32Array,
    block_size: int,
    first: int,
    extra_ids: Int32Array,
    extra_keys: ExtraKeyArrays,
    digests: Uint32Array,
) -> None:
    """Digest the logical blocks of a prompt from ``first`` on; those before have digests already.

    Args:
        extra_ids: int32 ``[n]``, ids of the extra keys of each block.
        digests: uint32 ``[n, 8]``.
    """
    for index in range(first, len(digests)):
        above = digests[index - 1] if index else ROOT_WORDS
        block_tokens = tokens[index * block_size : (index + 1) * block_size]
        digest_block(above, block_tokens, extra_keys, extra_ids[index], digests[index])


@compiled
def find_fates(pool: PoolArrays, name: int, digests: Uint32Array, out: Int32Array) -> None:
    """Find the fate of each block.

    Args:
        digests: uint32 ``[n, 8]``.
        out: int32 ``[n]``; receives causes of :mod:`pagedkv.blocks.causes`, or the fates above.
    """
    for index in range(len(out)):
        place = find_ghost(pool, name, digests[index])
        if place >= 0:
            out[index] = ghost_cause(pool, place)
        elif find(pool, name, digests[index]) != NULL_BLOCK:
            out[index] = NAMED
        elif has_forgotten(pool, digests[index]):
            out[index] = FORGOTTEN
        else:
            out[index] = NEVER


class BookArrays(NamedTuple):
    """The recorded explanations.

    Args:
        current: int64 ``[max_sequences, NUM_FIELDS]``, of each row's latest admitted sequence.
        past: int64 ``[most, NUM_FIELDS]``, a ring of earlier ones.
        num_past: int64 ``[1]``, number of all records ever put into the ring.
    """

    current: Int64Array
    past: Int64Array
    num_past: Int64Array


@compiled
def record_miss(
    pool: PoolArrays,
    group: GroupArrays,
    extra_keys: ExtraKeyArrays,
    tokens: Int32Array,
    hits: Int32Array,
    max_hit_tokens: int,
    row: int,
    serials: Int32Array,
    book: BookArrays,
) -> bool:
    """Record why a prompt's hit ends, given that it ends in the chain of the only group that keeps whole prefixes.

    The missing block has no extra keys of its own. Returns whether the record is complete; it is not if the missing
    block is named, or is cached under other keys.

    Args:
        tokens: int32 ``[n]``, the prompt.
        max_hit_tokens: how many of them may hit.
        hits: int32, the blocks that hit.
        serials: int32 ``[max_sequences]``, the generation of each row.
    """
    record = book.current[row]
    if record[GENERATION]:
        place = book.num_past[0] % len(book.past)
        for field in range(NUM_FIELDS):
            book.past[place, field] = record[field]
        book.num_past[0] += 1
    block_size, alignment = group.parameters[BLOCK_SIZE], group.parameters[HIT_ALIGNMENT]
    num_hits = len(hits)
    record[:] = 0
    record[GENERATION] = serials[row]
    record[OF_ROW] = row
    record[NUM_TOKENS] = len(tokens)
    record[NUM_HIT] = record[POSITION] = num_hits * block_size
    if num_hits * block_size >= (len(tokens) - 1) // alignment * alignment:
        record[CAUSE] = NOT_FULL
        return True
    if num_hits * block_size >= min(len(tokens) - 1, max_hit_tokens) // alignment * alignment:
        record[CAUSE] = BOUNDED
        return True
    record[GROUP] = group.parameters[NAME_IN_POOL]
    parent = hits[num_hits - 1] if num_hits else NULL_BLOCK
    above = pool.digests[parent] if num_hits else ROOT_WORDS
    wanted = tokens[num_hits * block_size : (num_hits + 1) * block_size]
    digest_block(above, wanted, extra_keys, 0, extra_keys.digest)
    return _record_fate(pool, group.parameters[NAME_IN_POOL], parent, wanted, extra_keys.digest, record)


@inlined
def _record_fate(
    pool: PoolArrays, name: int, parent: int, wanted: Int32Array, digest: Uint32Array, record: Int64Array
) -> bool:
    """Record the fate of a block; return whether the record is complete."""
    place = find_ghost(pool, name, digest)
    if place >= 0:
        record[CAUSE] = NUMBERS_OF_GHOSTS[ghost_cause(pool, place)]
        record[AGE] = 1 + ghost_age(pool, place)
        return True
    if find(pool, name, digest) != NULL_BLOCK:
        return False
    other = pool.records[parent, SUCCESSOR]
    if other != NULL_BLOCK and is_child_of(pool, name, other, parent):
        common = 0
        while common < len(wanted) and pool.tokens[other, common] == wanted[common]:
            common += 1
        if common == len(wanted):
            return False
        if pool.records[other, EXTRA] == 0 and record[POSITION] + common > 0:
            record[CAUSE] = CHANGED
            record[POSITION] += common
            record[HAS_TOKEN] = 1
            record[TOKEN] = pool.tokens[other, common]
            return True
    record[CAUSE] = UNKNOWN if has_forgotten(pool, digest) else NEVER_STORED
    return True
