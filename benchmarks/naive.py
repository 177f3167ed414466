"""A yardstick of our own: the usual object-a-block manager, as simple as it can be.

A Python object a block, a list of ids a sequence, a deque of free blocks, a dict from digest to block: the
shape that most engines have. It has no copy-on-write, windows, swap or verification of hits, so it does less
work; the ratio to it is what arrays and compiled loops bring on the machine at hand.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["NaiveManager"]


@dataclass(slots=True)
class Block:
    """One block."""

    block_id: int
    ref_count: int = 0
    digest: bytes | None = None


@dataclass(slots=True)
class NaiveSequence:
    """One sequence: its tokens and its blocks."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    last_digest: bytes = b""


class NaiveManager:
    """Allocate, append and free, with prefix caching, one Python object a block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Build the blocks."""
        self.block_size = block_size
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_ids = deque(range(num_blocks))
        self.by_digest: dict[bytes, int] = {}

    def allocate(self, tokens: npt.NDArray[np.int32]) -> tuple[NaiveSequence, int]:
        """Allocate a prompt; return the sequence and the number of tokens that hit."""
        sequence = NaiveSequence(tokens.tolist())
        num_hit_blocks = 0
        hitting = True
        for start in range(0, len(tokens), self.block_size):
            piece = tokens[start : start + self.block_size]
            digest = None
            if len(piece) == self.block_size:
                digest = hashlib.sha256(sequence.last_digest + piece.tobytes()).digest()
                sequence.last_digest = digest
            known = self.by_digest.get(digest) if digest and hitting and start + self.block_size < len(tokens) else None
            if known is None:
                hitting = False
                sequence.blocks.append(self._take(digest))
            else:
                num_hit_blocks += 1
                if self.blocks[known].ref_count == 0:
                    self.free_ids.remove(known)
                self.blocks[known].ref_count += 1
                sequence.blocks.append(known)
        return sequence, num_hit_blocks * self.block_size

    def append(self, sequence: NaiveSequence, token: int) -> None:
        """Append one token."""
        if len(sequence.tokens) % self.block_size == 0:
            sequence.blocks.append(self._take(None))
        sequence.tokens.append(token)
        if len(sequence.tokens) % self.block_size == 0:
            piece = np.array(sequence.tokens[-self.block_size :], np.int32)
            sequence.last_digest = hashlib.sha256(sequence.last_digest + piece.tobytes()).digest()
            self._name(sequence.blocks[-1], sequence.last_digest)

    def free(self, sequence: NaiveSequence) -> None:
        """Give a sequence's blocks back, tail first."""
        for block_id in reversed(sequence.blocks):
            self.blocks[block_id].ref_count -= 1
            if self.blocks[block_id].ref_count == 0:
                self.free_ids.append(block_id)
        sequence.blocks.clear()

    def _take(self, digest: bytes | None) -> int:
        block = self.blocks[self.free_ids.popleft()]
        if block.digest is not None and self.by_digest.get(block.digest) == block.block_id:
            del self.by_digest[block.digest]
        block.ref_count = 1
        block.digest = None
        if digest is not None:
            self._name(block.block_id, digest)
        return block.block_id

    def _name(self, block_id: int, digest: bytes) -> None:
        self.blocks[block_id].digest = digest
        self.by_digest.setdefault(digest, block_id)
