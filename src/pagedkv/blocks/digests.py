"""Identity of a block: a SHA-256 chain over parent, tokens and extra keys, the same on every machine.

The message of a block, all integers little-endian::

    parent digest (32 bytes) | number of tokens, uint32 | tokens, int32 each | extra keys, as encoded

The parent of a sequence's first block is ``ROOT_DIGEST``, the hash of this encoding's name; a change of
the encoding changes that name. ``hash_block_tokens`` and ``hash_request_tokens`` are the plain reference,
for users and for other cache tiers. The compiled loops below give the same bytes (tested) for whole
batches of rows, without a Python object for each block.
"""

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.blocks import DIGEST_WORDS
from pagedkv.blocks.extra_keys import ExtraKeyArrays
from pagedkv.blocks.sha256 import sha256_message
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arguments import as_count, as_token_array
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import ConfigurationError

__all__ = ["ROOT_DIGEST", "hash_block_tokens", "hash_request_tokens"]

ROOT_DIGEST: Final = hashlib.sha256(b"pagedkv block chain 1").digest()
ROOT_WORDS: Final = np.frombuffer(ROOT_DIGEST, ">u4").astype(np.uint32)
DIGEST_NBYTES: Final = 32


def hash_block_tokens(parent_digest: bytes, token_ids: TokenIds, extra_keys: bytes = b"") -> bytes:
    """Digest of one full block.

    Args:
        parent_digest: digest of the block before it; ``ROOT_DIGEST`` for a first block.
        token_ids: the block's tokens, int32 ``[block_size]``.
        extra_keys: encoded keys (:class:`~pagedkv.contract.keys.RequestKeys`), empty for most blocks.

    Raises:
        ConfigurationError: a parent's digest that is not 32 bytes, or extra keys that are not bytes.
        TokenError: token ids that are not int32.

    >>> hash_block_tokens(ROOT_DIGEST, [1, 2, 3, 4]).hex()[:16]
    'a4e76dd5e10ec71c'
    """
    if not isinstance(parent_digest, bytes) or len(parent_digest) != DIGEST_NBYTES:
        raise ConfigurationError(
            f"parent_digest comes first, {DIGEST_NBYTES} bytes, ROOT_DIGEST for a first block; got {parent_digest!r}"
        )
    if not isinstance(extra_keys, bytes):
        raise ConfigurationError(f"extra_keys must be encoded keys, as bytes, got {extra_keys!r}")
    tokens = as_token_array(token_ids).astype("<i4")
    message = parent_digest + len(tokens).to_bytes(4, "little") + tokens.tobytes() + extra_keys
    return hashlib.sha256(message).digest()


def hash_request_tokens(
    token_ids: TokenIds,
    block_size: int,
    keys: RequestKeys = NO_KEYS,
    weights_epoch: str = "",
) -> list[bytes]:
    """Digests of all full blocks of a request, first to last. O(tokens).

    In other libraries, the function of this name takes the block size first, or a hash function before it.

    Raises:
        ConfigurationError: a block size below 1, keys that are no RequestKeys, or arguments in another order.
        TokenError: token ids that are not int32.
    """
    if callable(token_ids) or isinstance(token_ids, int | np.integer) or not isinstance(block_size, int | np.integer):
        raise ConfigurationError(
            "the order is hash_request_tokens(token_ids, block_size, keys, weights_epoch), without a hash function: "
            f"got {_kind(token_ids)} for token_ids and {_kind(block_size)} for block_size"
        )
    block_size = as_count(block_size, "block_size", least=1)
    if not isinstance(keys, RequestKeys) or not isinstance(weights_epoch, str):
        raise ConfigurationError(f"keys must be RequestKeys and weights_epoch text, got {keys!r} and {weights_epoch!r}")
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


def _kind(argument: object) -> str:
    return f"{argument!r}" if isinstance(argument, int) else type(argument).__name__


def words_of_digests(digests: npt.ArrayLike, num_blocks: int) -> Uint32Array:
    """Turn digests from a caller (uint8 ``[num_blocks, 32]``) into words, ``[num_blocks, 8]``."""
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
