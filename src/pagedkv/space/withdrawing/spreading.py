"""The second pass: from rows to digests, from digests to the blocks that continue them, and from there to more rows."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from pagedkv.blocks.blocks import NULL_BLOCK
from pagedkv.blocks.prefix_index import find
from pagedkv.contract.arrays import Uint8Array
from pagedkv.space.state import Group
from pagedkv.space.withdrawing.bad import Bad, Extent, Taint, as_bytes, digests_of_row
from pagedkv.tables.withdrawing import TAINTED, spread_taint

__all__ = ["spread"]

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
