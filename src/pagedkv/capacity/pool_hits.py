"""An eviction policy at one capacity, through the pool that serves: it evicts, and its prefix index finds.

Knows nothing of eviction. Each request finds its leading blocks by their digests, takes a reference to each, acquires
and names the rest, and releases all of them, tail first. What makes room, and in which order, is for the production
code to say (:mod:`pagedkv.pool.block_pool`, :mod:`pagedkv.pool.eviction`).
"""

from typing import Final, NamedTuple

import numpy as np

from pagedkv.arrays import Int32Array, Uint32Array
from pagedkv.capacity.block_tree import write_path
from pagedkv.capacity.references import BlockReferences
from pagedkv.compilation.compiled import compiled
from pagedkv.pool.block_pool import BlockPool, acquire, drop_name, release, reuse
from pagedkv.pool.blocks import DIGEST_WORDS, LIFE, NULL_BLOCK, PoolArrays
from pagedkv.pool.eviction.hooks import note_request
from pagedkv.pool.eviction.policy import EvictionPolicy
from pagedkv.pool.eviction.registry import DEFAULT
from pagedkv.pool.prefix_index import find, is_child_of, name_block

__all__ = ["NAME", "PromptScratch", "new_scratch", "pool_hits", "serve_prompt", "serve_trace", "write_digest"]

NAME: Final = 1  # of the one group there is
WORD: Final = 2**32 - 1
SPREAD: Final = 0x9E3779B1  # odd, so that the product, a 32-bit word, differs for each content


class PromptScratch(NamedTuple):
    """Room for one prompt, since compiled loops do not allocate.

    Args:
        contents: int32 ``[longest prompt]``, its blocks by their numbers in the tree.
        block_ids: int32 ``[longest prompt]``, the blocks of the pool that hold them.
        digest: uint32 ``[8]``, the digest looked for.
    """

    contents: Int32Array
    block_ids: Int32Array
    digest: Uint32Array


def pool_hits(references: BlockReferences, capacity: int, policy: EvictionPolicy = DEFAULT) -> int:
    """Count the hits of a pool of ``capacity`` blocks and the null block. O(references), 15 to 100 ns each.

    Args:
        references: the trace.
        capacity: blocks of the cache, at least 1. More than there are distinct blocks are never touched, and not built.
        policy: which of them to evict.
    """
    num_usable = min(capacity, references.num_unique_blocks)
    return serve_trace(BlockPool("cache", num_usable + 1, block_size=1, policy=policy), references)


def serve_trace(pool: BlockPool, references: BlockReferences) -> int:
    """Serve a trace with an empty pool of blocks of one token; return the number of hits. O(references)."""
    scratch = new_scratch(references)
    num_hits = 0
    for last_block, num_blocks, arrival_s, num_outputs in zip(
        references.last_blocks.tolist(),
        references.num_prompt_blocks.tolist(),
        references.arrivals_s.tolist(),
        references.output_lengths.tolist(),
        strict=True,
    ):
        if arrival_s > 0:  # traces without times have none
            pool.advance(arrival_s)
        write_path(references.parents, last_block, scratch.contents[:num_blocks])
        num_hits += serve_prompt(pool.arrays, scratch, min(num_blocks, pool.num_usable), num_outputs)
    return num_hits


def new_scratch(references: BlockReferences) -> PromptScratch:
    """Make room for the longest prompt of a trace."""
    return PromptScratch(
        contents=np.zeros(references.longest_prompt, np.int32),
        block_ids=np.zeros(references.longest_prompt, np.int32),
        digest=np.zeros(DIGEST_WORDS, np.uint32),
    )


@compiled
def serve_prompt(pool: PoolArrays, scratch: PromptScratch, num_blocks: int, num_outputs: int) -> int:
    """Serve the first blocks of a prompt, no more than the pool has; return how many of them hit."""
    num_hits = _reuse_leading(pool, scratch, num_blocks)
    for index in range(num_hits, num_blocks):
        block = acquire(pool)
        parent = scratch.block_ids[index - 1] if index > 0 else NULL_BLOCK
        write_digest(pool.digests[block], scratch.contents[index])
        unreachable = find(pool, NAME, pool.digests[block])
        if unreachable != NULL_BLOCK:
            drop_name(pool, unreachable)  # the policy evicted what it continued
        name_block(pool, NAME, block, parent, pool.records[parent, LIFE])
        scratch.block_ids[index] = block
    note_request(pool, scratch.block_ids[:num_blocks], num_outputs)
    for index in range(num_blocks - 1, -1, -1):
        release(pool, scratch.block_ids[index], 0)
    return num_hits


@compiled
def _reuse_leading(pool: PoolArrays, scratch: PromptScratch, num_blocks: int) -> int:
    """Take a reference to each leading block that is cached; return how many there are."""
    for index in range(num_blocks):
        write_digest(scratch.digest, scratch.contents[index])
        block = find(pool, NAME, scratch.digest)
        parent = scratch.block_ids[index - 1] if index > 0 else NULL_BLOCK
        if block == NULL_BLOCK or not is_child_of(pool, NAME, block, parent):
            return index
        reuse(pool, block)
        scratch.block_ids[index] = block
    return num_blocks


@compiled
def write_digest(digest: Uint32Array, content: int) -> None:
    """Write what stands for the SHA-256 of a chain: the number of its last block, spread out; no other chain has it."""
    digest[0] = int(content) * SPREAD & WORD
    digest[1] = content
