"""States at the ends of prompts, across groups: where they are to be kept, and which are kept.

:mod:`pagedkv.tables.checkpoints` draws such a state. This module records the lengths of the tails that are kept
behind each parent, so that a prompt tries only those. A record is a hint: it holds only while the block's life is the
recorded one, and a hit is granted only for equal digest and tokens.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pagedkv.blocks.blocks import LIFE, NAME, PoolArrays
from pagedkv.contract.arrays import Uint32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import keeps_state

__all__ = ["Checkpoints", "TailNote", "keys_of_tail"]


class TailNote(NamedTuple):
    """The record of a named tail.

    Args:
        group: index of the group; parent: digest of the whole intervals before it, as bytes of its words.
        length: its tokens.
        life: life of the block when it was named.
    """

    group: int
    parent: bytes
    length: int
    life: int


class Checkpoints:
    """The states that are kept inside intervals, and the positions up to which running prompts need one.

    Attributes:
        alignment: hits end at multiples of this in all groups but states.
        wanted: int32 ``[max_sequences]``, up to where the last state of each row's prompt is to be kept; 0: nowhere.
    """

    def __init__(self, config: SpaceConfig) -> None:
        """Start without any record."""
        sizes = [group.block_size for group in config.groups if group.prefix_caching and not keeps_state(group)]
        self.alignment = math.lcm(*sizes)
        self.wanted = np.zeros(config.max_sequences, np.int32)
        self._notes: dict[tuple[str, int], TailNote] = {}
        self._blocks: dict[tuple[int, bytes], dict[int, set[int]]] = {}

    def __bool__(self) -> bool:
        """Whether anything was ever kept."""
        return bool(self._notes)

    def note(self, pool: str, block: int, note: TailNote) -> None:
        """Record a block that was named. O(1)."""
        self._forget(pool, block)
        self._notes[pool, block] = note
        self._blocks.setdefault((note.group, note.parent), {}).setdefault(note.length, set()).add(block)

    def _forget(self, pool: str, block: int) -> None:
        note = self._notes.pop((pool, block), None)
        if note is None:
            return
        lengths = self._blocks[note.group, note.parent]
        lengths[note.length].remove(block)
        if not lengths[note.length]:
            del lengths[note.length]
        if not lengths:
            del self._blocks[note.group, note.parent]

    def note_of(self, pool: str, arrays: PoolArrays, block: int) -> TailNote | None:
        """Return the tail that a block is named for, or None."""
        note = self._notes.get((pool, block))
        is_alive = note is not None and arrays.records[block, NAME] and arrays.records[block, LIFE] == note.life
        return note if is_alive else None

    def lengths(self, group: int, parent: Uint32Array) -> Iterator[int]:
        """Lengths of the tails that were kept behind a parent; the tails may be gone."""
        return iter(self._blocks.get((group, parent.tobytes()), ()))

    def noted_blocks(self, pool: str) -> Iterator[int]:
        """Blocks of a pool that have a record."""
        return (block for name, block in self._notes if name == pool)


def keys_of_tail(keys: RequestKeys, weights_epoch: str, start: int, stop: int) -> bytes:
    """Encode the extra keys of the positions ``[start, stop)`` of a request, in the form that blocks have them."""
    whole = keys.first_block_key(weights_epoch) if start == 0 else b""
    return whole + keys.media_key(start, stop) if keys.media else whole
