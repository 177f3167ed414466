"""Digests of the blocks that rows complete: one chain a row, computed once for all groups of one block size."""

from pagedkv.arrays import Int32Array, Uint32Array
from pagedkv.compilation.compiled import compiled
from pagedkv.pool.blocks import DIGEST_WORDS, EXTRA, PoolArrays
from pagedkv.pool.digests import digest_block
from pagedkv.pool.extra_keys import ExtraKeyArrays
from pagedkv.tables.rows import AT, BLOCK_SIZE, FROZEN, NUM_ACCEPTED, NUM_DIGESTED, GroupArrays

__all__ = ["copy_new_digests", "digest_new_blocks"]


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
