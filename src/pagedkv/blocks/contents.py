"""The content of blocks, as far as it is recorded: their tokens, digests and extra keys.

Only this module writes the arrays ``tokens`` and ``digests``, by which hits are verified and found, the array
``parent_digests``, for events, and the column ``EXTRA``. Names are set by :mod:`~pagedkv.blocks.prefix_index`,
and digests computed by :mod:`~pagedkv.blocks.digests`.
"""

import numpy as np

from pagedkv.blocks.blocks import DIGEST_WORDS, EXTRA, PoolArrays
from pagedkv.blocks.digests import ROOT_WORDS, digest_block
from pagedkv.blocks.extra_keys import NO_EXTRA, ExtraKeyArrays
from pagedkv.compilation.compiled import inlined, unsigned
from pagedkv.contract.arrays import Int32Array, Uint32Array

__all__ = [
    "clear_extra",
    "copy_content",
    "copy_digest",
    "digest_content",
    "set_digest",
    "set_digests",
    "set_extra",
    "set_extras",
    "set_parent",
    "set_token",
    "without_root",
    "write_down",
]


@inlined
def set_token(pool: PoolArrays, block: int, slot: int, token: int) -> None:
    """Record one token of a block."""
    pool.tokens[block, unsigned(slot)] = token


@inlined
def write_down(pool: PoolArrays, block: int, slot: int, tokens: Int32Array, first: int, num_tokens: int) -> None:
    """Record ``num_tokens`` of ``tokens``, from index ``first`` on, in a block's slots from ``slot`` on."""
    for place in range(num_tokens):
        pool.tokens[block, slot + place] = tokens[first + place]


@inlined
def copy_content(source: PoolArrays, block: int, destination: PoolArrays, place: int, num_tokens: int) -> None:
    """Copy the recorded extra keys and tokens of a block to another, here or on the other side (host or device)."""
    destination.records[place, EXTRA] = source.records[block, EXTRA]
    for slot in range(num_tokens):
        destination.tokens[place, slot] = source.tokens[block, slot]


@inlined
def clear_extra(records: Int32Array, block: int) -> None:
    """Record that a block has no extra keys."""
    records[block, EXTRA] = NO_EXTRA


@inlined
def set_extra(records: Int32Array, block: int, extra: int) -> None:
    """Record a block's extra keys, by their id."""
    records[block, EXTRA] = extra


def set_extras(pool: PoolArrays, block_ids: Int32Array, extra_ids: Int32Array) -> None:
    """Record the extra keys of several blocks, by their ids."""
    pool.records[block_ids, EXTRA] = extra_ids


@inlined
def digest_content(pool: PoolArrays, block: int, parent: Uint32Array, num_tokens: int, keys: ExtraKeyArrays) -> None:
    """Compute the digest of a block from the digest ``parent``, its leading tokens and its extra keys; record both."""
    digest_block(parent, pool.tokens[block, :num_tokens], keys, pool.records[block, EXTRA], pool.digests[block])
    set_parent(pool, block, parent)


@inlined
def set_digest(pool: PoolArrays, block: int, digest: Uint32Array) -> None:
    """Record a block's digest."""
    for word in range(DIGEST_WORDS):
        pool.digests[block, word] = digest[word]


@inlined
def set_parent(pool: PoolArrays, block: int, digest: Uint32Array) -> None:
    """Record the digest of the block before a block, if the pool keeps it."""
    if len(pool.parent_digests):
        for word in range(DIGEST_WORDS):
            pool.parent_digests[block, word] = digest[word]


@inlined
def copy_digest(source: PoolArrays, block: int, destination: PoolArrays, place: int) -> None:
    """Copy the recorded digests of a block and its parent to another block, in any pool or on the other side."""
    set_digest(destination, place, source.digests[block])
    if len(source.parent_digests):
        set_parent(destination, place, source.parent_digests[block])


def set_digests(pool: PoolArrays, block_ids: Int32Array, chain: Uint32Array) -> None:
    """Record the digests of a sequence's last blocks.

    Args:
        block_ids: int32 ``[blocks]``.
        chain: uint32 ``[at least blocks, 8]``, the digests of the whole sequence.
    """
    first = len(chain) - len(block_ids)
    pool.digests[block_ids] = chain[first:]
    if len(pool.parent_digests):
        pool.parent_digests[block_ids] = np.concatenate([ROOT_WORDS[np.newaxis], chain])[first:-1]


def without_root(parents: Uint32Array) -> Uint32Array:
    """Return digests of parents, uint32 ``[n, 8]``, with zeros for the root: events and snapshots contain them so."""
    return np.where((parents == ROOT_WORDS).all(axis=1, keepdims=True), np.uint32(0), parents)
