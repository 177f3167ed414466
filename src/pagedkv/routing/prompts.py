"""HashedPrompt: the digests of a prompt's blocks for each block size, by which an index looks them up."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from pagedkv.blocks.block_keys import keys_of_blocks
from pagedkv.blocks.blocks import DIGEST_WORDS
from pagedkv.blocks.digests import digest_block, digest_prompt
from pagedkv.blocks.extra_keys import ExtraKeyArrays, ExtraKeyTable
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arguments import as_token_array
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import TokenIds
from pagedkv.routing.prompt_memory import PromptMemory

__all__ = ["HashedPrompt", "PromptHasher"]

NO_EXTRA_IDS: Final = np.zeros(0, np.int32)
LEAST_TOKENS: Final = 8192
"""Shorter prompts are hashed in less than 50 us."""
MOST_NBYTES: Final = 2**26


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
        least_tokens: prompts of so many tokens are kept (:mod:`~pagedkv.routing.prompt_memory`), so that those
            that continue them are hashed from there on.
        most_nbytes: most bytes that are kept.
    """

    def __init__(
        self,
        block_sizes: Collection[int],
        weights_epoch: str = "",
        *,
        least_tokens: int = LEAST_TOKENS,
        most_nbytes: int = MOST_NBYTES,
    ) -> None:
        self._block_sizes = sorted(set(block_sizes))
        self._weights_epoch = weights_epoch
        self._least_tokens = least_tokens
        self._memory = PromptMemory(most_nbytes)
        self._plain = {size: ExtraKeyTable(size).arrays for size in self._block_sizes}

    def hash(self, token_ids: TokenIds, keys: RequestKeys = NO_KEYS) -> HashedPrompt:
        """Hash the full blocks of a prompt, int32 ``[n]``. O(tokens). Raises TokenError: token ids are not int32.

        The digests must not be changed.
        """
        tokens = as_token_array(token_ids)
        return HashedPrompt(len(tokens), {size: self._digests(tokens, size, keys) for size in self._block_sizes})

    def _digests(self, tokens: Int32Array, size: int, keys: RequestKeys) -> Uint32Array:
        num_blocks = len(tokens) // size
        digests = np.empty((num_blocks, DIGEST_WORDS), np.uint32)
        encodings = keys_of_blocks(keys, self._weights_epoch, size, 0, num_blocks)
        extra_ids, extra_keys = NO_EXTRA_IDS, self._plain[size]
        if encodings:
            table = ExtraKeyTable(size)
            extra_ids = np.zeros(max(encodings) + 1, np.int32)
            extra_ids[list(encodings)] = table.intern_all(list(encodings.values()))
            extra_keys = table.arrays
        if len(tokens) < self._least_tokens:
            digest_prompt(tokens, size, num_blocks, extra_ids, extra_keys, digests)
            return digests
        num_known = self._memory.recall(tokens, size, encodings, digests)
        if num_known:
            _continue(tokens, size, num_known, extra_ids, extra_keys, digests)
        else:
            digest_prompt(tokens, size, num_blocks, extra_ids, extra_keys, digests)
        if num_known < num_blocks:
            self._memory.keep(tokens, size, encodings, digests, num_known)
        return digests


@compiled
def _continue(  # noqa: PLR0913, PLR0917 - as digest_prompt, from a block on
    tokens: Int32Array, block_size: int, first: int, extra_ids: Int32Array, extra_keys: ExtraKeyArrays, out: Uint32Array
) -> None:
    """Digest the blocks of a prompt from ``first`` on, 1 or more, into ``out``, which has the digests before."""
    for index in range(first, len(out)):
        extra = extra_ids[index] if index < len(extra_ids) else 0
        block_tokens = tokens[index * block_size : (index + 1) * block_size]
        digest_block(out[index - 1], block_tokens, extra_keys, extra, out[index])
