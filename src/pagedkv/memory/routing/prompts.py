"""HashedPrompt: the digests of a prompt's blocks for each block size, by which an index looks them up."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from pagedkv.memory.contract.arguments import as_token_array
from pagedkv.memory.contract.arrays import Int32Array, Uint32Array
from pagedkv.memory.contract.keys import NO_KEYS, RequestKeys
from pagedkv.memory.contract.spec import TokenIds
from pagedkv.memory.pool.block_keys import keys_of_blocks
from pagedkv.memory.pool.blocks import DIGEST_WORDS
from pagedkv.memory.pool.digests import digest_prompt
from pagedkv.memory.pool.extra_keys import ExtraKeyTable

__all__ = ["HashedPrompt", "PromptHasher"]

NO_EXTRA_IDS: Final = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class HashedPrompt:
    """A prompt's digests.

    Args:
        num_tokens: tokens of the prompt.
        digests: by block size, uint32 ``[blocks, 8]``.
    """

    num_tokens: int
    digests: dict[int, Uint32Array]


@final
class PromptHasher:
    """Hashes prompts to the same names that the replicas' pools give to their blocks.

    Args:
        block_sizes: block sizes of the groups, in tokens.
        weights_epoch: part of the name of a first block, as in ``SpaceConfig``.
    """

    def __init__(self, block_sizes: Collection[int], weights_epoch: str = "") -> None:
        self._block_sizes = sorted(set(block_sizes))
        self._weights_epoch = weights_epoch
        self._plain = {size: ExtraKeyTable(size).arrays for size in self._block_sizes}

    def hash(self, token_ids: TokenIds, keys: RequestKeys = NO_KEYS) -> HashedPrompt:
        """Hash the full blocks of a prompt, int32 ``[n]``. O(tokens). Raises TokenError: token ids are not int32."""
        tokens = as_token_array(token_ids)
        return HashedPrompt(len(tokens), {size: self._digests(tokens, size, keys) for size in self._block_sizes})

    def _digests(self, tokens: Int32Array, size: int, keys: RequestKeys) -> Uint32Array:
        num_blocks = len(tokens) // size
        digests = np.empty((num_blocks, DIGEST_WORDS), np.uint32)
        encodings = keys_of_blocks(keys, self._weights_epoch, size, 0, num_blocks)
        if not encodings:
            digest_prompt(tokens, size, num_blocks, NO_EXTRA_IDS, self._plain[size], digests)
            return digests
        table = ExtraKeyTable(size)
        extra_ids = np.zeros(max(encodings) + 1, np.int32)
        extra_ids[list(encodings)] = table.intern_all(list(encodings.values()))
        digest_prompt(tokens, size, num_blocks, extra_ids, table.arrays, digests)
        return digests
