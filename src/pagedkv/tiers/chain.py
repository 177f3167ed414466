"""A chain of runs: the entries of a store for a prompt, or for a growing sequence.

A chain has two kinds of entries::

    tokens     0 ...... 32 ...... 64 ...... 96 .. 108
    runs       | run 0   | run 1   | run 2   |          blocks of the groups that keep whole prefixes
    an end                                   |   108 |  the rest of these blocks, and the windows and states at 108

Runs suffice for models in which all groups keep whole prefixes. Other models can continue only at an end, where their
windows and states are stored as well. A hit at an end needs all runs before it.
"""

from collections.abc import Set as AbstractSet
from typing import Final, final

import numpy as np

from pagedkv.blocks.digests import ROOT_DIGEST, hash_block_tokens
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.tiers.identity import Run

__all__ = ["RunChain", "end_key_of"]

END_MASK: Final = int.from_bytes(b"pagedkv end of a chain, version1", "big")
"""The key of an end is the digest XOR this mask, so that an end and a run at one boundary have different keys."""
KEY_NBYTES: Final = 32


def end_key_of(digest: bytes) -> bytes:
    """Return the key of the end after the block with this digest."""
    return (int.from_bytes(digest, "big") ^ END_MASK).to_bytes(KEY_NBYTES, "big")


@final
class RunChain:
    """The runs of one sequence. While the sequence grows, each block is digested once.

    Args:
        block_size: tokens of a block.
        blocks_per_run: blocks of a run.
        keys: adapter, salt and media of the sequence.

    Attributes:
        runs: the complete runs of the tokens so far.
    """

    def __init__(self, block_size: int, blocks_per_run: int, keys: RequestKeys = NO_KEYS) -> None:
        self.runs: list[Run] = []
        self._block_size = block_size
        self._blocks_per_run = blocks_per_run
        self._keys = keys
        self._unsalted = RequestKeys(keys.lora_name, keys.lora_version, b"", keys.media)
        self._digests = [ROOT_DIGEST]
        self._tokens: Int32Array = np.zeros(0, np.int32)

    @property
    def num_blocks(self) -> int:
        """Whole blocks so far."""
        return len(self._digests) - 1

    def extend(self, token_ids: Int32Array) -> None:
        """Set the tokens. From the first block that differs on, blocks and runs are replaced; a prefix changes nothing.

        O(tokens) to compare, and about 3 us for each new block.
        """
        size = self._block_size
        common = min(len(token_ids), len(self._tokens))
        differs = np.flatnonzero(token_ids[:common] != self._tokens[:common])
        if len(differs):
            kept = int(differs[0]) // size
            del self._digests[kept + 1 :]
            del self.runs[kept // self._blocks_per_run :]
        elif len(token_ids) <= len(self._tokens):
            return
        self._tokens = token_ids
        for index in range(self.num_blocks, len(token_ids) // size):
            begin, end = index * size, (index + 1) * size
            extra = self._keys.media_key(begin, end)
            if index == 0:
                extra = self._keys.first_block_key("") + extra
            self._digests.append(hash_block_tokens(self._digests[-1], token_ids[begin:end], extra))
        for number in range(len(self.runs), self.num_blocks // self._blocks_per_run):
            first, last = number * self._blocks_per_run, (number + 1) * self._blocks_per_run
            self.runs.append(self._run(self._digests[last], first, last))

    def num_blocks_without(self, digests: AbstractSet[bytes]) -> int:
        """Count the blocks before the first one whose digest is in ``digests``. O(blocks)."""
        if not digests:
            return self.num_blocks
        return next((place for place, digest in enumerate(self._digests[1:]) if digest in digests), self.num_blocks)

    def end(self, num_blocks: int) -> Run:
        """Return the run of the end after the first ``num_blocks`` blocks, at most :attr:`num_blocks`."""
        first = num_blocks // self._blocks_per_run * self._blocks_per_run
        return self._run(self.end_key(num_blocks), first, num_blocks)

    def end_key(self, num_blocks: int) -> bytes:
        """Return the key of the end after the first ``num_blocks`` blocks."""
        return end_key_of(self._digests[num_blocks])

    def _run(self, key: bytes, first: int, last: int) -> Run:
        begin, end = first * self._block_size, last * self._block_size
        extra = self._unsalted.first_block_key("") + self._unsalted.media_key(begin, end)
        return Run(key, self._digests[first], begin, self._tokens[begin:end].copy(), self._keys.salt, extra)
