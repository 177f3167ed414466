"""Ghosts: a pool's records of content that is no longer cached, with the cause of its loss.

The table :attr:`PoolArrays.ghosts <pagedkv.blocks.record.PoolArrays>` serves both
``explain`` and eviction policies. A name that is removed leaves a ghost, and the ghost is removed when the content is
named again. A ghost contains only a fragment of a digest, so finding one means "probably this content", and is never
evidence for a hit.

The table is bounded and set-associative. The digest's first word chooses a set, which is one cache line; if the set is
full, its oldest ghost is overwritten. A set stores the clock of its latest overwritten ghost. As long as it has
overwritten none, content without a ghost was certainly never stored::

    set, 16 words    | clock of the latest ghost lost, or 0 | ghost | ghost | ghost | ghost | ghost |
    ghost, 3 words   | second word of the digest | third word, with the group, but for 4 bits: the cause | clock |

A ghost takes 12.8 bytes. Clocks count the blocks that the pool has allocated, in 32 bits, so greater ages are reported
too small. Places are numbered (``set * GHOSTS_A_SET + way``), and a ghost never moves, so that a policy can keep data
of each ghost in a table of its own; :func:`remember` and :func:`find_ghost` return the place.
"""

from typing import Final

import numpy as np

from pagedkv.blocks.record import NAME, NUM_ACQUIRED, PoolArrays, aligned_zeros
from pagedkv.compilation.compiled import compiled, featured, inlined
from pagedkv.contract.arrays import Uint32Array

CAUSE_MASK: Final = 15

# A set.
FORGOTTEN: Final = 0  # clock of the latest ghost that was overwritten by another
FIRST_GHOST: Final = 1
GHOST_WORDS: Final = 3
GHOSTS_A_SET: Final = 5
SET_WORDS: Final = FIRST_GHOST + GHOSTS_A_SET * GHOST_WORDS  # 16: a cache line

# Words of a ghost.
FRAGMENT: Final = 0
GROUP_AND_CAUSE: Final = 1
CLOCK: Final = 2

CLOCK_MASK: Final = 2**32 - 1
FRAGMENT_MASK: Final = CLOCK_MASK ^ CAUSE_MASK
GROUP_SPREAD: Final = 0x85EBCA60  # keeps equal digests of different groups apart
NOWHERE: Final = -1


def new_ghosts(num_ghosts: int) -> Uint32Array:
    """Make an empty table for at least ``num_ghosts`` ghosts; an empty array for 0."""
    return aligned_zeros(-(-num_ghosts // GHOSTS_A_SET), SET_WORDS).view(np.uint32)


@inlined
def _set_of(pool: PoolArrays, first_word: int) -> int:
    """Return the set of a digest."""
    return (int(first_word) * len(pool.ghosts)) >> 32


@inlined
def _fragment(name: int, third_word: int) -> int:
    """Mix the third word of a digest with the name of its group; the bits of the cause are 0."""
    return (int(third_word) ^ (int(name) * GROUP_SPREAD)) & FRAGMENT_MASK


@inlined
def _word_of(place: int) -> int:
    """Return the index of the first word of a ghost in its set."""
    return FIRST_GHOST + GHOST_WORDS * (place % GHOSTS_A_SET)


@compiled
def find_ghost(pool: PoolArrays, name: int, digest: Uint32Array) -> int:
    """Find the ghost of the content that a group had under a digest; -1 if there is none. Changes nothing. O(1)."""
    if len(pool.ghosts) == 0:
        return NOWHERE
    number = _set_of(pool, digest[0])
    ghosts = pool.ghosts[number]
    fragment = _fragment(name, digest[2])
    for way in range(GHOSTS_A_SET):
        word = _word_of(way)
        tagged = int(ghosts[word + GROUP_AND_CAUSE])
        if tagged and ghosts[word + FRAGMENT] == digest[1] and tagged & FRAGMENT_MASK == fragment:
            return number * GHOSTS_A_SET + way
    return NOWHERE


@inlined
def ghost_cause(pool: PoolArrays, place: int) -> int:
    """Return the cause of the ghost at a place."""
    return int(pool.ghosts[place // GHOSTS_A_SET, _word_of(place) + GROUP_AND_CAUSE]) & CAUSE_MASK


@inlined
def ghost_age(pool: PoolArrays, place: int) -> int:
    """Return how many blocks the pool has allocated since the ghost at a place was made."""
    return (
        int(pool.counts[NUM_ACQUIRED]) - int(pool.ghosts[place // GHOSTS_A_SET, _word_of(place) + CLOCK])
    ) & CLOCK_MASK


@inlined
def is_ghost(pool: PoolArrays, place: int) -> bool:
    """Whether there is a ghost at a place."""
    return bool(pool.ghosts[place // GHOSTS_A_SET, _word_of(place) + GROUP_AND_CAUSE] != 0)


@inlined
def are_same(pool: PoolArrays, place: int, other: int) -> bool:
    """Whether the ghosts at two places of one set are of the same content."""
    ghosts = pool.ghosts[place // GHOSTS_A_SET]
    left, right = _word_of(place), _word_of(other)
    mine, others = int(ghosts[left + GROUP_AND_CAUSE]), int(ghosts[right + GROUP_AND_CAUSE])
    is_same = ghosts[left + FRAGMENT] == ghosts[right + FRAGMENT] and (mine | CAUSE_MASK) == (others | CAUSE_MASK)
    return bool(is_same and mine != 0 and others != 0)


@inlined
def has_forgotten(pool: PoolArrays, digest: Uint32Array) -> bool:
    """Whether a ghost of this digest may have been overwritten; always true without ghosts."""
    return len(pool.ghosts) == 0 or pool.ghosts[_set_of(pool, digest[0]), FORGOTTEN] != 0


@featured
@compiled
def remember(pool: PoolArrays, block: int, cause: int) -> int:
    """Make the ghost of a block that is about to lose its name; return its place, -1 without ghosts. O(1)."""
    if len(pool.ghosts) == 0:
        return NOWHERE
    digest = pool.digests[block]
    number = _set_of(pool, digest[0])
    way = _way_for_another(pool, number)
    ghosts, word = pool.ghosts[number], _word_of(way)
    ghosts[word + FRAGMENT] = digest[1]
    ghosts[word + GROUP_AND_CAUSE] = _fragment(pool.records[block, NAME], digest[2]) | cause
    ghosts[word + CLOCK] = int(pool.counts[NUM_ACQUIRED]) & CLOCK_MASK
    return number * GHOSTS_A_SET + way


@inlined
def _way_for_another(pool: PoolArrays, number: int) -> int:
    """Find an empty place in a set, or the place of its oldest ghost, recording that this one is lost."""
    ghosts = pool.ghosts[number]
    now = int(pool.counts[NUM_ACQUIRED])
    oldest, most = 0, -1
    for way in range(GHOSTS_A_SET):
        word = _word_of(way)
        if ghosts[word + GROUP_AND_CAUSE] == 0:
            return way
        age = (now - int(ghosts[word + CLOCK])) & CLOCK_MASK
        if age > most:
            oldest, most = way, age
    ghosts[FORGOTTEN] = max(1, int(ghosts[_word_of(oldest) + CLOCK]))
    return oldest


@featured
@compiled
def recall(pool: PoolArrays, block: int) -> int:
    """Remove the ghost of content that was just named again; return its former place, -1 if there was none. O(1).

    Data that is kept beside ghosts is valid at that place until the next ghost is made.
    """
    place = find_ghost(pool, pool.records[block, NAME], pool.digests[block])
    if place != NOWHERE:
        word = _word_of(place)
        pool.ghosts[place // GHOSTS_A_SET, word : word + GHOST_WORDS] = 0
    return place
