"""States at the ends of prompts, across groups: where they are to be kept, which there are, and who goes on from one.

:mod:`pagedkv.memory.tables.checkpoints` draws what such a state is. Here is noted which tails are kept behind which
parent, so that a prompt tries those lengths alone. A note is a hint: what it says of a block is true as long as the
block's life is the one that was noted, and a hit is granted for the name and the tokens alone.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pagedkv.memory.contract.arrays import Uint32Array
from pagedkv.memory.contract.keys import RequestKeys
from pagedkv.memory.contract.space_config import SpaceConfig
from pagedkv.memory.contract.spec import keeps_state
from pagedkv.memory.pool.blocks import LIFE, NAME, PoolArrays

__all__ = ["Checkpoints", "Tail", "TailNote", "keys_of_tail"]


class Tail(NamedTuple):
    """What a hit ends inside of: a checkpoint inside an interval, or a block that begins as the prompt goes on.

    Args:
        group: index of the group; block: its block; logical_index: which of the row's it is.
        parent: uint32 ``[8]``, digest of the whole blocks before it.
        num_tokens: its leading tokens that hit.
    """

    group: int
    block: int
    logical_index: int
    parent: Uint32Array
    num_tokens: int


class TailNote(NamedTuple):
    """What is noted of a named tail.

    Args:
        group: index of the group; parent: digest of the whole intervals before it, as bytes of its words.
        length: its tokens.
        life: of the block when it was named.
    """

    group: int
    parent: bytes
    length: int
    life: int


class Checkpoints:
    """Which states are kept inside intervals, and where running prompts want one kept.

    Attributes:
        alignment: positions where hits can end in all groups but states.
        wanted: int32 ``[max_sequences]``, where each row's prompt wants its last state kept; 0: nowhere.
    """

    def __init__(self, config: SpaceConfig) -> None:
        """Note nothing."""
        sizes = [group.block_size for group in config.groups if group.prefix_caching and not keeps_state(group)]
        self.alignment = math.lcm(*sizes)
        self.wanted = np.zeros(config.max_sequences, np.int32)
        self._notes: dict[tuple[str, int], TailNote] = {}
        self._blocks: dict[tuple[int, bytes], dict[int, set[int]]] = {}

    def __bool__(self) -> bool:
        """Whether anything was ever kept."""
        return bool(self._notes)

    def note(self, pool: str, block: int, note: TailNote) -> None:
        """Note a block that was named. O(1)."""
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
        """Tell what tail a block is named for, if it is."""
        note = self._notes.get((pool, block))
        is_alive = note is not None and arrays.records[block, NAME] and arrays.records[block, LIFE] == note.life
        return note if is_alive else None

    def lengths(self, group: int, parent: Uint32Array) -> Iterator[int]:
        """Lengths of the tails that were kept behind a parent, and may be gone by now."""
        return iter(self._blocks.get((group, parent.tobytes()), ()))

    def noted_blocks(self, pool: str) -> Iterator[int]:
        """Blocks of a pool of which anything is noted."""
        return (block for name, block in self._notes if name == pool)


def keys_of_tail(keys: RequestKeys, weights_epoch: str, start: int, stop: int) -> bytes:
    """Encode the extra keys of the positions ``[start, stop)`` of a request, as of a block."""
    whole = keys.first_block_key(weights_epoch) if start == 0 else b""
    return whole + keys.media_key(start, stop) if keys.media else whole
