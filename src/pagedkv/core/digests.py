"""Identity of a block: a SHA-256 chain over parent, tokens and extra keys, the same on every machine.

The message of a block, all integers little-endian::

    parent digest (32 bytes) | number of tokens, uint32 | tokens, int32 each | extra keys, as encoded

The parent of a sequence's first block is ``ROOT_DIGEST``, the hash of this encoding's name; a change of
the encoding changes that name. ``hash_block_tokens`` and ``hash_request_tokens`` are the plain reference,
used by people and by other tiers; the compiled loops below give the same bytes (tested) for whole
batches of rows, without a Python object a block.
"""

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.core.blocks import DIGEST_WORDS, EXTRA, Int32Array, PoolArrays, Uint32Array
from pagedkv.core.compiled import compiled, inlined
from pagedkv.core.extra_keys import ExtraKeyArrays
from pagedkv.core.rows import (
    AT,
    BLOCK_SIZE,
    FROZEN,
    NUM_ACCEPTED,
    NUM_DIGESTED,
    GroupArrays,
)
from pagedkv.core.sha256 import sha256_message
from pagedkv.core.tokens import as_token_array
from pagedkv.errors import ConfigurationError
from pagedkv.keys import NO_KEYS, RequestKeys
from pagedkv.spec import TokenIds

__all__ = ["ROOT_DIGEST", "hash_block_tokens", "hash_request_tokens"]

ROOT_DIGEST: Final = hashlib.sha256(b"pagedkv block chain 1").digest()
ROOT_WORDS: Final = np.frombuffer(ROOT_DIGEST, ">u4").astype(np.uint32)
DIGEST_NBYTES: Final = 32


def hash_block_tokens(parent_digest: bytes, token_ids: TokenIds, extra_keys: bytes = b"") -> bytes:
    """Digest of one full block.

    Args:
        parent_digest: digest of the block before it; ``ROOT_DIGEST`` for a first block.
        token_ids: the block's tokens, int32 ``[block_size]``.
        extra_keys: encoded keys (:class:`~pagedkv.keys.RequestKeys`), empty for most blocks.

    >>> hash_block_tokens(ROOT_DIGEST, [1, 2, 3, 4]).hex()[:16]
    'a4e76dd5e10ec71c'
    """
    tokens = as_token_array(token_ids).astype("<i4")
    message = parent_digest + len(tokens).to_bytes(4, "little") + tokens.tobytes() + extra_keys
    return hashlib.sha256(message).digest()


def hash_request_tokens(
    token_ids: TokenIds,
    block_size: int,
    keys: RequestKeys = NO_KEYS,
    weights_epoch: str = "",
) -> list[bytes]:
    """Digests of all full blocks of a request, first to last. O(tokens)."""
    if block_size < 1:
        raise ConfigurationError(f"block_size must be at least 1 token, got {block_size}")
    tokens = as_token_array(token_ids)
    digests: list[bytes] = []
    parent = ROOT_DIGEST
    for start in range(0, len(tokens) - block_size + 1, block_size):
        extra = keys.media_key(start, start + block_size)
        if start == 0:
            extra = keys.first_block_key(weights_epoch) + extra
        parent = hash_block_tokens(parent, tokens[start : start + block_size], extra)
        digests.append(parent)
    return digests


def words_of_digests(digests: npt.ArrayLike, num_blocks: int) -> Uint32Array:
    """Turn digests brought by a caller (uint8 ``[num_blocks, 32]``) into words, ``[num_blocks, 8]``."""
    as_bytes = np.ascontiguousarray(digests, np.uint8).reshape(num_blocks, DIGEST_NBYTES)
    return as_bytes.view(">u4").astype(np.uint32)


@inlined
def digest_block(
    parent: Uint32Array,
    tokens: Int32Array,
    extra_keys: ExtraKeyArrays,
    extra: int,
    out: Uint32Array,
) -> None:
    """Digest one block into ``out``."""
    message = extra_keys.message
    words = message.view(np.uint32)
    for word in range(DIGEST_WORDS):
        value = parent[word]
        words[word] = (
            (value >> np.uint32(24))
            | ((value >> np.uint32(8)) & np.uint32(0xFF00))
            | ((value << np.uint32(8)) & np.uint32(0xFF0000))
            | (value << np.uint32(24))
        )
    words[DIGEST_WORDS] = len(tokens)
    signed = words.view(np.int32)
    for index in range(len(tokens)):
        signed[DIGEST_WORDS + 1 + index] = tokens[index]
    length = DIGEST_NBYTES + 4 + 4 * len(tokens)
    begin, end = extra_keys.bounds[extra]
    for index in range(end - begin):
        message[length + index] = extra_keys.data[begin + index]
    sha256_message(message, length + end - begin, out)


@compiled
def digest_prompt(
    tokens: Int32Array,
    block_size: int,
    num_blocks: int,
    extra_ids: Int32Array,
    extra_keys: ExtraKeyArrays,
    out: Uint32Array,
) -> None:
    """Digest the first ``num_blocks`` full blocks of a prompt into ``out``."""
    parent = ROOT_WORDS
    for index in range(num_blocks):
        extra = extra_ids[index] if index < len(extra_ids) else 0
        block_tokens = tokens[index * block_size : (index + 1) * block_size]
        digest_block(parent, block_tokens, extra_keys, extra, out[index])
        parent = out[index]


@compiled
def digest_new_blocks(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    chains: Uint32Array,
    extra_keys: ExtraKeyArrays,
) -> None:
    """Digest every full block of accepted tokens that a batch of rows has completed.

    ``chains[row]`` is the digest of the row's last digested block, or the root.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    for row in batch:
        if rows[row, FROZEN]:
            continue
        for index in range(rows[row, at + NUM_DIGESTED], rows[row, NUM_ACCEPTED] // block_size):
            block = group.table[row, index]
            digest = pool.digests[block]
            block_tokens = pool.tokens[block, :block_size]
            digest_block(chains[row], block_tokens, extra_keys, pool.records[block, EXTRA], digest)
            for word in range(DIGEST_WORDS):
                chains[row, word] = digest[word]
            rows[row, at + NUM_DIGESTED] = index + 1


@compiled
def copy_new_digests(
    source_pool: PoolArrays,
    source: GroupArrays,
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
) -> None:
    """Give a group the digests that a group of equal block size has just got for the same rows."""
    source_at = source.parameters[AT]
    at = group.parameters[AT]
    for row in batch:
        for index in range(rows[row, at + NUM_DIGESTED], rows[row, source_at + NUM_DIGESTED]):
            for word in range(DIGEST_WORDS):
                pool.digests[group.table[row, index], word] = source_pool.digests[source.table[row, index], word]
        rows[row, at + NUM_DIGESTED] = rows[row, source_at + NUM_DIGESTED]
