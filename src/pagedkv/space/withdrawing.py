"""Withdrawing content that turned out bad, such as a corrupt load, or the results of a faulty device.

Bad content is what the caller declares bad, and all that continues it, in every group, since that was computed from it.
Equal content counts as the same content, so a row is also found by the digests of its blocks. A row that may have
copied the bad block while that was partly filled is found by the first tokens of its block::

    row a   [A0][A1 bad][A2][A3]      lost from A1 on
    row b   [A0][A1 bad][B2]          lost from A1 on: it shares the block
    cached  [A0][A1 bad][A2][C3]      A0 stays, the rest leaves the prefix index
    windows of the same prompts       stay where the full group shows that they belong to sound content

Content that cannot be proved sound leaves the prefix index: all blocks of a group, if no full-attention group of equal
block size shows what they continue; and all blocks on the host. If no full-attention group has prefix caching, or none
has the bad content, it is not recorded which rows have read it: all rows are lost.

Two passes find what is bad, and change nothing. Then the blocks are unnamed, and the rows are lost::

    blocks --> beginnings -----------> Taint -----> spreading --------------> Extent --> names, rows, tickets, loads
               rows with the blocks,   digests,     until nothing is added:   all that   (withdraw)
               or with blocks that     rows         rows -> their digests     is bad
               begin alike                          -> what continues those
                                                    -> rows that hold that

Cost: O(blocks + rows x blocks of a row) a round.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.blocks.prefix_index import find
from pagedkv.blocks.record import (
    CALLED_OFF,
    EXTRA,
    LIFE,
    NAME,
    NULL_BLOCK,
    PARENT,
    PARENT_LIFE,
    PENDING_STEP,
    REF_COUNT,
    WITHDRAWN,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import Withdrawal
from pagedkv.contract.arrays import DIGEST_NBYTES, Int32Array, Uint8Array
from pagedkv.contract.spec import Row, is_cross
from pagedkv.space.growing import hand_over, stop_relying
from pagedkv.space.loading import tickets_out
from pagedkv.space.rows import (
    AT,
    LOST,
    LOST_ON_HOST,
    MARK,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    SWAPPED,
    VACANT,
)
from pagedkv.space.state import Group, SpaceState

TOKEN_NBYTES: Final = 4


class _Beginning(NamedTuple):
    """The beginning of a bad block in a full group: a row whose block begins in the same way may hold a copy of it.

    Equal beginnings belong to the same content.

    Args:
        place: logical block; parent: digest of the block before it, empty for the first one.
        extra: id of its extra keys; tokens: its tokens up to the first bad one, int32 as bytes.
    """

    place: int
    parent: bytes
    extra: int
    tokens: bytes

    @property
    def num_tokens(self) -> int:
        """Number of these tokens, including the first bad one."""
        return len(self.tokens) // TOKEN_NBYTES


class _Holder(NamedTuple):
    """A row that holds a bad block, and its first bad position."""

    row: int
    first: int


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


def taint_of_beginnings(bad: Bad) -> Taint | None:
    """Return the bad blocks and all that begins like them; None if nothing can be proved sound."""
    names, holders = list(_groups_of_names(bad)), list(_holders(bad))
    if any(_has_unknown_beginning(bad, group, block) for group, block in names) or (holders and not bad.chains):
        return None
    digests = [set[bytes]() for _ in bad.state.lanes]
    for group, block in names:
        digests[group.lane].add(bad.pool.arrays.digests[block].tobytes())
    firsts: dict[int, int] = {}
    for row, first in holders:
        firsts[row] = min(first, firsts.get(row, first))
    taint = Taint(tuple(map(frozenset, digests)), firsts)
    for index, beginning in dict.fromkeys(_beginnings(bad, names, holders)):  # rows that share a block begin alike
        taint = taint.joined(_taint_of(bad, bad.state.groups[index], beginning))
    return taint


def _groups_of_names(bad: Bad) -> Iterator[tuple[Group, int]]:
    """Yield the bad blocks that have names, each with its group."""
    for block in bad.blocks.tolist():
        name = int(bad.pool.arrays.records[block, NAME])
        if name:
            yield bad.state.groups[name - 1], block


def _holders(bad: Bad) -> Iterator[_Holder]:
    """Yield the rows that hold bad blocks, once for each group in which they do."""
    state = bad.state
    for group in state.all_groups:
        for row in bad.rows if group.pool is bad.pool else ():
            held = group.arrays.table[row, : count_in(state, group, row, NUM_BLOCKS)]
            places = np.flatnonzero(np.isin(held, bad.blocks))
            if len(places) and not is_on_host(state, row):
                yield _Holder(row, 0 if is_cross(group.spec) else int(places[0]) * group.block_size)


def _has_unknown_beginning(bad: Bad, group: Group, block: int) -> bool:
    """Return whether the beginning of a named block is unknown: no full group has it, and no row holds it."""
    if block_in_chain(bad, group, block) is not None:
        return False
    table, state = group.arrays.table, bad.state
    return not any(not is_on_host(state, row) and (table[row] == block).any() for row in bad.rows)


def _beginnings(bad: Bad, names: list[tuple[Group, int]], holders: list[_Holder]) -> Iterator[tuple[int, _Beginning]]:
    """Yield the beginnings of bad blocks in groups that keep whole prefixes: index of the group, and the beginning."""
    for group, block in names:
        same = block_in_chain(bad, group, block)
        if same is not None:
            yield same[0].index, _beginning_of_name(*same)
    for row, first in holders:
        if first < bad.state.rows[row, NUM_TOKENS]:
            for chain in bad.chains:
                yield chain.index, _beginning_in_row(bad, chain, row, first)


def _beginning_of_name(chain: Group, block: int) -> _Beginning:
    """Return the beginning of a named block: only its first token, since it may be bad from there on."""
    arrays = chain.pool.arrays
    parent = int(arrays.records[block, PARENT])
    index, ancestor = 0, parent
    while ancestor != NULL_BLOCK:
        index, ancestor = index + 1, int(arrays.records[ancestor, PARENT])
    digest = b"" if parent == NULL_BLOCK else arrays.digests[parent].tobytes()
    return _Beginning(index, digest, int(arrays.records[block, EXTRA]), arrays.tokens[block, :1].tobytes())


def _beginning_in_row(bad: Bad, chain: Group, row: int, first: int) -> _Beginning:
    """Return the beginning of a row's block, up to position ``first``."""
    arrays, table = pool_of(bad.state, chain, row).arrays, chain.arrays.table[row]
    index = first // chain.block_size
    block = int(table[index])
    digest = arrays.digests[table[index - 1]].tobytes() if index else b""
    tokens = arrays.tokens[block, : first % chain.block_size + 1]
    return _Beginning(index, digest, int(arrays.records[block, EXTRA]), tokens.tobytes())


def _taint_of(bad: Bad, chain: Group, beginning: _Beginning) -> Taint:
    """Return every row and named block of a full group with that beginning."""
    position = beginning.place * chain.block_size + beginning.num_tokens - 1
    longer = [row for row in bad.rows if position < bad.state.rows[row, NUM_TOKENS]]
    firsts = {row: position for row in longer if _beginning_in_row(bad, chain, row, position) == beginning}
    digests = [frozenset[bytes]()] * len(bad.state.lanes)
    digests[chain.lane] = _names_that_begin_so(chain, beginning)
    return Taint(tuple(digests), firsts)


def _names_that_begin_so(chain: Group, beginning: _Beginning) -> frozenset[bytes]:
    """Digests of the named blocks of a full group with that beginning."""
    arrays, parent = chain.pool.arrays, NULL_BLOCK
    if beginning.place:
        parent = find(arrays, chain.index + 1, np.frombuffer(beginning.parent, np.uint32))
    records = arrays.records[: len(arrays.tokens)]
    begins_so = (records[:, NAME] == chain.index + 1) & (records[:, EXTRA] == beginning.extra)
    begins_so &= records[:, PARENT] == parent
    begins_so &= (arrays.tokens[:, : beginning.num_tokens] == np.frombuffer(beginning.tokens, np.int32)).all(axis=1)
    return frozenset(as_bytes(arrays.digests[np.flatnonzero(begins_so)]))


def withdraw(state: SpaceState, pool: BlockPool, bad: Int32Array) -> Withdrawal:
    """Unname bad blocks and all blocks that continue them, and lose the rows that rely on them."""
    with state.changing:
        extent = _all_that_is_bad(state, pool, bad)
        names = _names_to_take(state, extent) if extent.is_anything else []
        if extent.is_anything:
            _take_names(state, names)
        firsts = dict(sorted(extent.taint.firsts.items()))
        _lose(state, list(firsts))
        tickets = tuple(ticket for ticket in tickets_out(state) if extent.holds_bad(ticket.pool, state.held[ticket]))
        loads = []
        for load, loading in state.loads.items():
            if any(extent.holds_bad(ticket.pool, state.held[ticket]) for ticket in loading.tickets):
                loading.is_frozen = True
                loads.append(load)
        answer = Withdrawal(tuple(map(Row, firsts)), tuple(firsts.values()), tickets, tuple(loads), len(names))
        if extent.is_anything and state.observers.withdrawn:
            digests = (
                None if extent.is_everything else frozenset(map(_as_digest, frozenset().union(*extent.taint.digests)))
            )
            for tell in state.observers.withdrawn:
                tell(digests)
    return answer


def _as_digest(words: bytes) -> bytes:
    """Return a digest from the bytes of its words."""
    return np.frombuffer(words, np.uint32).astype(">u4").tobytes()


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


def _all_that_is_bad(state: SpaceState, pool: BlockPool, blocks: Int32Array) -> Extent:
    """Find what some bad blocks have spoilt. Changes nothing."""
    bad = name_bad(state, pool, blocks)
    taint = taint_of_beginnings(bad)
    if taint is None:
        everything = Taint((frozenset(),) * len(state.lanes), dict.fromkeys(bad.rows, 0))
        return Extent(bad, everything, {}, is_everything=True)
    return spread(bad, taint)


def _names_to_take(state: SpaceState, extent: Extent) -> list[tuple[BlockPool, int]]:
    """List the named blocks that are bad, or cannot be proved sound."""
    return [
        (pool, block)
        for pool in state.pools.values()
        for block in pool.prefix_index.named_blocks().tolist()
        if not _keeps_its_name(state, extent, pool, block)
    ]


def _keeps_its_name(state: SpaceState, extent: Extent, pool: BlockPool, block: int) -> bool:
    """Return whether a named block is proved sound."""
    group = state.groups[int(pool.arrays.records[block, NAME]) - 1]
    if group.keeps_whole_prefix and extent.taint.digests[group.lane] and not extent.is_everything:
        return bool(extent.marks[group.index][block] != TAINTED) and not _is_orphan(pool, block)
    return extent.is_sound(group, block)


def _take_names(state: SpaceState, names: list[tuple[BlockPool, int]]) -> None:
    """Unname these blocks, and all on the host, where nothing can be proved sound."""
    for pool, block in names:
        drop_name(pool.arrays, block, WITHDRAWN)
    for pool in state.host_pools.values():
        pool.clear_names(WITHDRAWN)


def _is_orphan(pool: BlockPool, block: int) -> bool:
    """Return whether the content that a named block continues is gone, and so is unknown."""
    records = pool.arrays.records
    parent = int(records[block, PARENT])
    return parent != NULL_BLOCK and bool(records[parent, LIFE] != records[block, PARENT_LIFE])


def _lose(state: SpaceState, lost: list[int]) -> None:
    """Lose rows; tokens that they were to compute for other rows are handed over to those."""
    rows = state.rows
    running = [row for row in lost if rows[row, STATUS] == RUNNING]
    mark = state.next_mark()
    rows[running, MARK] = mark
    for row in running:
        if rows[row, NUM_PLANNED] < rows[row, NUM_TOKENS]:
            hand_over(state, row, mark)
            _call_off(state, row)
        stop_relying(state, row)
    rows[running, STATUS] = LOST
    swapped = [row for row in lost if rows[row, STATUS] == SWAPPED]
    rows[swapped, STATUS] = LOST_ON_HOST


def _call_off(state: SpaceState, row: int) -> None:
    """Unname the blocks that a lost row alone was to compute in the open step, since it computes nothing any more."""
    for group in state.cached_groups:
        arrays, records = group.pool.arrays, group.pool.arrays.records
        table = group.arrays.table[row, : int(state.rows[row, int(group.arrays.parameters[AT]) + NUM_BLOCKS])]
        is_pending = records[table, PENDING_STEP] == state.open_step
        for block in table[is_pending & (records[table, NAME] > 0) & (records[table, REF_COUNT] == 1)].tolist():
            drop_name(arrays, block, CALLED_OFF)


_RowDigests: TypeAlias = Mapping[int, list[bytes]]
"""Digests of each row's digested blocks in one group, by row."""


def spread(bad: Bad, taint: Taint) -> Extent:
    """Find all that is bad, given what is known to be bad so far.

    The loop ends: each round but the last adds a digest of a block or a row, or lowers a row's first bad position, and
    no round takes anything back.
    """
    rows = {group.index: {row: digests_of_row(bad.state, group, row) for row in bad.rows} for group in bad.chains}
    while True:
        wider, marks = taint, {}
        for group in bad.chains:
            wider, marks[group.index] = _wider(group, rows[group.index], wider)
        if wider == taint:
            return Extent(bad, taint, marks)
        taint = wider


def _wider(group: Group, rows: _RowDigests, taint: Taint) -> tuple[Taint, Uint8Array]:
    """Add what is bad by the digests of one group that keeps whole prefixes; return also the marks of its blocks."""
    bad = set(taint.digests[group.lane])
    for row, first in taint.firsts.items():
        bad.update(rows[row][first // group.block_size :])
    marks = _marks(group, bad)
    bad.update(as_bytes(group.pool.arrays.digests[np.flatnonzero(marks == TAINTED)]))
    firsts = dict(taint.firsts)
    for row, digests in rows.items():
        place = next((place for place, digest in enumerate(digests) if digest in bad), None)
        if place is not None:
            firsts[row] = min(place * group.block_size, firsts.get(row, place * group.block_size))
    by_lane = enumerate(taint.digests)
    return Taint(tuple(frozenset(bad) if lane == group.lane else its for lane, its in by_lane), firsts), marks


def _marks(group: Group, bad: Iterable[bytes]) -> Uint8Array:
    """Mark the blocks of a group whose digests are bad, and those that continue them: uint8 ``[num_blocks]``."""
    arrays, name = group.pool.arrays, group.index + 1
    marks = np.zeros(group.pool.num_blocks, np.uint8)
    for digest in bad:
        marks[find(arrays, name, np.frombuffer(digest, np.uint32))] = TAINTED
    marks[NULL_BLOCK] = 0
    spread_taint(arrays, name, marks)
    return marks


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


UNKNOWN = 0
SOUND = 1
TAINTED = 2


@compiled
def spread_taint(pool: PoolArrays, name: int, marks: Uint8Array) -> int:
    """Mark the named blocks of a group that continue a tainted one; return how many are tainted.

    Each block is visited once, and followed up to its first ancestor with a known mark.

    Args:
        marks: uint8 ``[num_blocks]``; ``TAINTED`` for blocks that are known to be bad, else ``UNKNOWN``; every named
            block of the group gets a mark.
    """
    records = pool.records
    num_tainted = 0
    for block in range(1, len(marks)):
        if records[block, NAME] != name:
            continue
        ancestor = block
        while marks[ancestor] == UNKNOWN:
            parent = records[ancestor, PARENT]
            if parent == NULL_BLOCK or records[parent, LIFE] != records[ancestor, PARENT_LIFE]:
                break
            ancestor = parent
        mark = marks[ancestor] if marks[ancestor] != UNKNOWN else SOUND
        follower = block
        while marks[follower] == UNKNOWN:
            marks[follower] = mark
            if follower == ancestor:
                break
            follower = records[follower, PARENT]
        num_tainted += marks[block] == TAINTED
    return num_tainted
