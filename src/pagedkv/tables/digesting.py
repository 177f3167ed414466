"""Digests of the blocks that rows complete: one chain for each row, computed once for all groups of one block size."""

from pagedkv.blocks.blocks import DIGEST_WORDS, PoolArrays
from pagedkv.blocks.contents import copy_digest, digest_content
from pagedkv.blocks.extra_keys import ExtraKeyArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.tables.row_record import digest_to
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
            digest_content(pool, block, chains[row], block_size, extra_keys)
            for word in range(DIGEST_WORDS):
                chains[row, word] = pool.digests[block, word]
            digest_to(rows, row, at, index + 1)


@compiled
def copy_new_digests(
    source_pool: PoolArrays,
    source: GroupArrays,
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
) -> None:
    """Copy the digests that a group of equal block size has just got for the same rows to another group."""
    source_at = source.parameters[AT]
    at = group.parameters[AT]
    for row in batch:
        for index in range(rows[row, at + NUM_DIGESTED], rows[row, source_at + NUM_DIGESTED]):
            copy_digest(source_pool, source.table[row, index], pool, group.table[row, index])
        digest_to(rows, row, at, rows[row, source_at + NUM_DIGESTED])
