"""Rings of blocks in a policy's table: circular lists, doubly linked, each with a sentinel of its own.

The table has a row for every block, and rows for sentinels behind them. A block is in at most one ring.
"""

from typing import Final

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Uint32Array

# Columns of the table. 0, the id of the null block, which is in no ring, means none.
OLDER: Final = 0
YOUNGER: Final = 1
NO_PLACE: Final = 0


@compiled
def link_youngest(table: Uint32Array, sentinel: int, block: int) -> None:
    """Add a block, which is in no ring, at the back of a ring."""
    youngest = table[sentinel, OLDER]
    table[block, OLDER] = youngest
    table[block, YOUNGER] = sentinel
    table[youngest, YOUNGER] = block
    table[sentinel, OLDER] = block


@compiled
def unlink_if_linked(table: Uint32Array, block: int) -> None:
    """Take a block out of its ring, if it is in one."""
    older, younger = table[block, OLDER], table[block, YOUNGER]
    if older != NO_PLACE:
        table[older, YOUNGER] = younger
        table[younger, OLDER] = older
        table[block, OLDER] = NO_PLACE
        table[block, YOUNGER] = NO_PLACE


def blocks_of_ring(where: str, table: Uint32Array, sentinel: int) -> list[int]:
    """Read a ring, the oldest block first. Raises AssertionError if it is broken; for ``check()``."""
    ring = [sentinel]
    while (younger := int(table[ring[-1], YOUNGER])) != sentinel:
        assert younger != NO_PLACE, f"{where}: block {ring[-1]} is followed by none"
        assert len(ring) < len(table), f"{where}: a ring does not close"
        assert table[younger, OLDER] == ring[-1], f"{where}: a ring has other links forward than backward"
        ring.append(younger)
    assert table[sentinel, OLDER] == ring[-1], f"{where}: a ring has other links forward than backward"
    return ring[1:]
