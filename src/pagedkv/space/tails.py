"""Tail: a block inside which a hit ends, as it travels from a match to the row that continues from it."""

from typing import NamedTuple

from pagedkv.contract.arrays import Uint32Array

__all__ = ["Tail"]


class Tail(NamedTuple):
    """A block inside which a hit ends: a checkpoint inside an interval, or a block that hits in part.

    Args:
        group: index of the group; block: the block; logical_index: its index in the row's table.
        parent: uint32 ``[8]``, digest of the whole blocks before it.
        num_tokens: its leading tokens that hit.
    """

    group: int
    block: int
    logical_index: int
    parent: Uint32Array
    num_tokens: int
