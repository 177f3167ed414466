"""The first pass: named blocks and rows with the bad blocks, or with blocks that begin with the same tokens."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from pagedkv.blocks.blocks import EXTRA, NAME, NULL_BLOCK, PARENT
from pagedkv.blocks.prefix_index import find
from pagedkv.space.state import Group
from pagedkv.space.withdrawing.bad import (
    Bad,
    Taint,
    as_bytes,
    block_in_chain,
    count_in,
    is_on_host,
    pool_of,
)
from pagedkv.tables.rows import NUM_BLOCKS, NUM_TOKENS

__all__ = ["taint_of_beginnings"]

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
    for group in state.groups:
        for row in bad.rows if group.pool is bad.pool else ():
            held = group.arrays.table[row, : count_in(state, group, row, NUM_BLOCKS)]
            places = np.flatnonzero(np.isin(held, bad.blocks))
            if len(places) and not is_on_host(state, row):
                yield _Holder(row, int(places[0]) * group.block_size)


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
