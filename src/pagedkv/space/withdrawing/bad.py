"""The values of a withdrawal: the bad blocks, what they have spoilt so far, and all of it; and look-ups of rows."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import NULL_BLOCK
from pagedkv.blocks.digests import DIGEST_NBYTES
from pagedkv.blocks.prefix_index import find
from pagedkv.contract.arrays import Int32Array, Uint8Array
from pagedkv.space.state import Group, SpaceState
from pagedkv.tables.rows import AT, LOST_ON_HOST, NUM_DIGESTED, STATUS, SWAPPED, VACANT
from pagedkv.tables.withdrawing import TAINTED

__all__ = [
    "Bad",
    "Extent",
    "Taint",
    "as_bytes",
    "block_in_chain",
    "count_in",
    "digests_of_row",
    "is_on_host",
    "name_bad",
    "pool_of",
]


class Bad(NamedTuple):
    """The blocks that the caller declares bad, and where to search for what depends on them.

    Args:
        state: the space; pool: the pool of the bad blocks; blocks: int32 ``[n]``.
        chains: the groups that keep whole prefixes, if the space has prefix caching.
        rows: the rows that serve a sequence.
    """

    state: SpaceState
    pool: BlockPool
    blocks: Int32Array
    chains: tuple[Group, ...]
    rows: list[int]


class Taint(NamedTuple):
    """What is known to be bad so far.

    Args:
        digests: digests of bad content by lane, their words as bytes.
        firsts: the first bad position of each row that relies on it.
    """

    digests: tuple[frozenset[bytes], ...]
    firsts: dict[int, int]

    def joined(self, other: "Taint") -> "Taint":
        """Return the union of both."""
        firsts = self.firsts | other.firsts
        for row in self.firsts.keys() & other.firsts.keys():
            firsts[row] = min(self.firsts[row], other.firsts[row])
        return Taint(tuple(mine | its for mine, its in zip(self.digests, other.digests, strict=True)), firsts)


class Extent(NamedTuple):
    """All that is bad.

    Args:
        bad: the blocks that were declared bad.
        taint: what depends on them.
        marks: for each group that keeps whole prefixes, by its index, uint8 ``[num_blocks]``: ``TAINTED`` where bad.
        is_everything: whether nothing can be proved sound; then digests and marks are empty.
    """

    bad: Bad
    taint: Taint
    marks: dict[int, Uint8Array]
    is_everything: bool = False

    @property
    def is_anything(self) -> bool:
        """Whether any content that has, or may have, a name is bad."""
        return self.is_everything or any(self.taint.digests)

    def holds_bad(self, pool_name: str, blocks: Int32Array) -> bool:
        """Return whether any of these blocks of a pool is bad."""
        if self.is_everything or (pool_name == self.bad.pool.name and np.isin(blocks, self.bad.blocks).any()):
            return True
        chains = (group for group in self.bad.chains if group.pool.name == pool_name)
        return any((self.marks[group.index][blocks] == TAINTED).any() for group in chains)

    def is_sound(self, group: Group, block: int) -> bool:
        """Return whether a full group shows that a named block of another group continues sound content."""
        if self.is_everything or not self.taint.digests[group.lane]:
            return False
        if group.pool is self.bad.pool and (self.bad.blocks == block).any():
            return False
        same = block_in_chain(self.bad, group, block)
        return same is not None and self.marks[same[0].index][same[1]] != TAINTED


def name_bad(state: SpaceState, pool: BlockPool, blocks: Int32Array) -> Bad:
    """Set up the search for what some bad blocks have spoilt."""
    has_names = state.config.prefix_caching
    chains = tuple(group for group in state.cached_groups if group.keeps_whole_prefix and has_names)
    return Bad(state, pool, blocks, chains, np.flatnonzero(state.rows[:, STATUS] != VACANT).tolist())


def block_in_chain(bad: Bad, group: Group, block: int) -> tuple[Group, int] | None:
    """Find a full group of equal block size that has the content of a named block, and its block with that content."""
    for chain in bad.chains:
        if chain.lane == group.lane:
            same = find(chain.pool.arrays, chain.index + 1, group.pool.arrays.digests[block])
            if same != NULL_BLOCK:
                return chain, same
    return None


# Rows


def is_on_host(state: SpaceState, row: int) -> bool:
    """Return whether a row's blocks are in host memory."""
    return state.rows[row, STATUS] in {SWAPPED, LOST_ON_HOST}


def pool_of(state: SpaceState, group: Group, row: int) -> BlockPool:
    """Return the pool of a row's blocks."""
    pool = group.host_pool if is_on_host(state, row) else group.pool
    assert pool is not None
    return pool


def count_in(state: SpaceState, group: Group, row: int, column: int) -> int:
    """Read a row's column of a group."""
    return int(state.rows[row, int(group.arrays.parameters[AT]) + column])


def digests_of_row(state: SpaceState, group: Group, row: int) -> list[bytes]:
    """Digests of a row's digested blocks, on the device or on the host."""
    table = group.arrays.table[row, : count_in(state, group, row, NUM_DIGESTED)]
    return as_bytes(pool_of(state, group, row).arrays.digests[table])


def as_bytes(digests: npt.NDArray[np.uint32]) -> list[bytes]:
    """Convert digests in words, ``[n, 8]``, to bytes."""
    raw = np.ascontiguousarray(digests).tobytes()
    return [raw[start : start + DIGEST_NBYTES] for start in range(0, len(raw), DIGEST_NBYTES)]
