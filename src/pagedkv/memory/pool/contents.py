"""What blocks hold, as far as it is known: their tokens, digests and extra keys, and nothing else.

Owns the arrays ``tokens`` and ``digests`` and the column ``EXTRA``: what verifies a hit, and what a name is found by.
Whether a block has a name is :mod:`~pagedkv.memory.pool.prefix_index`'s, how a digest is computed
:mod:`~pagedkv.memory.pool.digests`'.
"""

from pagedkv.memory.compilation.compiled import inlined, unsigned
from pagedkv.memory.contract.arrays import Int32Array, Uint32Array
from pagedkv.memory.pool.blocks import DIGEST_WORDS, EXTRA, PoolArrays
from pagedkv.memory.pool.digests import digest_block
from pagedkv.memory.pool.extra_keys import NO_EXTRA, ExtraKeyArrays

__all__ = [
    "clear_extra",
    "copy_content",
    "copy_digest",
    "digest_content",
    "set_digest",
    "set_digests",
    "set_extra",
    "set_extras",
    "set_token",
    "write_down",
]


@inlined
def set_token(pool: PoolArrays, block: int, slot: int, token: int) -> None:
    """Write down one token of a block."""
    pool.tokens[block, unsigned(slot)] = token


@inlined
def write_down(pool: PoolArrays, block: int, slot: int, tokens: Int32Array, first: int, num_tokens: int) -> None:
    """Write down a run of ``tokens``, from place ``first`` on, in a block's slots from ``slot`` on."""
    for place in range(num_tokens):
        pool.tokens[block, slot + place] = tokens[first + place]


@inlined
def copy_content(source: PoolArrays, block: int, destination: PoolArrays, place: int, num_tokens: int) -> None:
    """Write down that a block becomes a copy of another one, here or on the other side: extra keys and tokens."""
    destination.records[place, EXTRA] = source.records[block, EXTRA]
    for slot in range(num_tokens):
        destination.tokens[place, slot] = source.tokens[block, slot]


@inlined
def clear_extra(records: Int32Array, block: int) -> None:
    """Note that a block has no extra keys."""
    records[block, EXTRA] = NO_EXTRA


@inlined
def set_extra(records: Int32Array, block: int, extra: int) -> None:
    """Note a block's extra keys, by their id."""
    records[block, EXTRA] = extra


def set_extras(pool: PoolArrays, block_ids: Int32Array, extra_ids: Int32Array) -> None:
    """Note the extra keys of several blocks, by their ids."""
    pool.records[block_ids, EXTRA] = extra_ids


@inlined
def digest_content(pool: PoolArrays, block: int, parent: Uint32Array, num_tokens: int, keys: ExtraKeyArrays) -> None:
    """Digest a block's leading tokens, which follow ``parent``, with its extra keys, and write that down."""
    digest_block(parent, pool.tokens[block, :num_tokens], keys, pool.records[block, EXTRA], pool.digests[block])


@inlined
def set_digest(pool: PoolArrays, block: int, digest: Uint32Array) -> None:
    """Write down a block's digest."""
    for word in range(DIGEST_WORDS):
        pool.digests[block, word] = digest[word]


@inlined
def copy_digest(source: PoolArrays, block: int, destination: PoolArrays, place: int) -> None:
    """Write down that a block has the digest of another one, here, in another pool or on the other side."""
    for word in range(DIGEST_WORDS):
        destination.digests[place, word] = source.digests[block, word]


def set_digests(pool: PoolArrays, block_ids: Int32Array, digests: Uint32Array) -> None:
    """Write down the digests of several blocks: uint32 ``[blocks, 8]``."""
    pool.digests[block_ids] = digests
