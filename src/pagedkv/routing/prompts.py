"""HashedPrompt: the digests of a prompt's blocks for each block size, by which an index looks them up.

PromptMemory keeps those of long prompts that were hashed lately, for prompts that begin with the same tokens. A block's
digest depends on all tokens before it, so hashing cannot be spread over cores, and takes most of the time of a decision
for a long prompt. The next turn of a conversation begins with the tokens of the last one: they are compared, which is
much faster than hashing them, and only the rest is hashed. Tokens and extra keys are compared exactly, so digests are
those that hashing gives.

Prompts are kept in one ring of memory, where a new one takes the place of the oldest. Memory of its own for each prompt
would be returned to the system and mapped anew, which took 0.2 ms for 131,072 tokens. Tokens that cannot be written any
more are not copied: their place in the ring stays unused.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import numpy as np

from pagedkv.blocks.digests import ExtraKeyArrays, ExtraKeyTable, digest_block, digest_prompt, keys_of_blocks
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arguments import as_token_array
from pagedkv.contract.arrays import DIGEST_WORDS, Int32Array, Uint32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import TokenIds

NO_EXTRA_IDS: Final = np.zeros(0, np.int32)
LEAST_TOKENS: Final = 8192
"""Shorter prompts are hashed in less than 50 us."""
MOST_NBYTES: Final = 2**26

Key: TypeAlias = tuple[int, tuple[tuple[int, bytes], ...], bytes]
MOST_OF_A_KEY: Final = 4
FIRST_TOKENS: Final = 4096
"""Most prompts differ here, so the rest is compared only where these are equal."""
REPLACED: Final = 7 / 8
"""A prompt takes the place of a kept one with which it shares this part of its blocks."""
WORD_NBYTES: Final = 4


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
        least_tokens: prompts of so many tokens are kept (:mod:`~pagedkv.routing.prompts`), so that those
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


@dataclass(slots=True, eq=False)
class _Known:
    """A prompt: its place in the ring, as words, and how many of its blocks were recalled last."""

    key: Key
    begin: int
    end: int
    tokens: Int32Array
    digests: Uint32Array
    num_recalled: int = 0


@final
class PromptMemory:
    """Prompts by their block size, their extra keys, and the tokens of their first block.

    Args:
        most_nbytes: bytes of the ring. Longer prompts are not kept.
    """

    def __init__(self, most_nbytes: int) -> None:
        self._ring = np.empty(most_nbytes // WORD_NBYTES, np.uint32)
        self._next = 0
        self._in_ring: deque[_Known] = deque()
        self._by_key: dict[Key, list[_Known]] = {}

    def recall(self, tokens: Int32Array, size: int, encodings: dict[int, bytes], out: Uint32Array) -> int:
        """Write the known digests of a prompt's leading blocks; return the number of these blocks.

        Args:
            tokens: the prompt, int32 ``[n]``; size: tokens of a block.
            encodings: its extra keys, by number of the block.
            out: uint32 ``[blocks, 8]``.

        Cost: O(tokens that are equal).
        """
        best, most = None, 0
        for each in self._by_key.get(_key(tokens, size, encodings), ()):
            num_blocks = min(len(out), len(each.digests), _common(each.tokens, tokens) // size)
            if num_blocks > most:
                best, most = each, num_blocks
        if best is not None:
            out[:most] = best.digests[:most]
            best.num_recalled = most
        return most

    def keep(
        self, tokens: Int32Array, size: int, encodings: dict[int, bytes], digests: Uint32Array, num_recalled: int
    ) -> None:
        """Keep a prompt and copy its digests, in place of the one that it continues.

        Cost: O(blocks); O(tokens) if the array of tokens is a view or can be written, so that tokens are copied.
        """
        num_tokens = len(digests) * size
        num_words = num_tokens + digests.size
        if num_words > len(self._ring):
            return
        key = _key(tokens, size, encodings)
        known = self._by_key.get(key, [])
        continued = (one for one in known if one.num_recalled == num_recalled >= REPLACED * len(one.digests))
        replaced = next(continued, None)
        if replaced is not None:
            known.remove(replaced)
        begin = self._room(num_words)
        middle, end = begin + num_tokens, begin + num_words
        kept = tokens
        if tokens.flags.writeable or tokens.base is not None:
            kept = self._ring[begin:middle].view(np.int32)
            kept[:] = tokens[:num_tokens]
        one = _Known(key, begin, end, kept, self._ring[middle:end].reshape(-1, DIGEST_WORDS))
        one.digests[:] = digests
        self._in_ring.append(one)
        self._by_key.setdefault(key, []).append(one)
        del self._by_key[key][:-MOST_OF_A_KEY]

    def _room(self, num_words: int) -> int:
        """Forget the prompts in the way of so many words, and return where these begin."""
        if self._next + num_words > len(self._ring):
            while self._in_ring and self._in_ring[0].begin >= self._next:
                self._forget_oldest()
            self._next = 0
        begin = self._next
        while self._in_ring and self._in_ring[0].begin < begin + num_words and self._in_ring[0].end > begin:
            self._forget_oldest()
        self._next = begin + num_words
        return begin

    def _forget_oldest(self) -> None:
        one = self._in_ring.popleft()
        known = self._by_key.get(one.key, [])
        if one in known:  # else a later prompt has replaced it
            known.remove(one)
        if not known:
            self._by_key.pop(one.key, None)


def _key(tokens: Int32Array, size: int, encodings: dict[int, bytes]) -> Key:
    return size, tuple(encodings.items()), tokens[:size].tobytes()


def _common(known: Int32Array, tokens: Int32Array) -> int:
    """Count the leading tokens that are equal."""
    length = min(len(known), len(tokens))
    for begin, end in ((0, min(FIRST_TOKENS, length)), (FIRST_TOKENS, length)):
        is_equal = known[begin:end] == tokens[begin:end]
        if not is_equal.all():
            return begin + int(is_equal.argmin())
    return length
