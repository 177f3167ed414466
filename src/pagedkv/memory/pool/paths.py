"""Paths of prompts through one pool: what is cached of one is followed, and what follows is added, by digests.

What rows do with tables, without rows: for whoever asks which blocks of a trace a pool would keep. A path is an array
of block ids, head first; who walks it holds a reference to each.
"""

from pagedkv.memory.compilation.compiled import inlined
from pagedkv.memory.compilation.instructions import prefetch
from pagedkv.memory.contract.arrays import Int32Array, Uint32Array
from pagedkv.memory.pool.blocks import (
    AHEAD,
    FIRST_WALK_FIELD,
    LAST_WALK_FIELD,
    LIFE,
    LOOKAHEAD,
    NULL_BLOCK,
    SUCCESSOR,
    PoolArrays,
)
from pagedkv.memory.pool.contents import set_digest
from pagedkv.memory.pool.keep_reasons import note_ahead
from pagedkv.memory.pool.life_cycle import acquire_often, drop_name
from pagedkv.memory.pool.prefix_index import find, has_digest, is_child_of, name_block

__all__ = ["add_to_path", "find_child"]


@inlined
def find_child(pool: PoolArrays, name: int, digest: Uint32Array, parent: int) -> int:
    """Find the child of ``parent`` with a digest: the one named last, as a rule; the null block if there is none."""
    block = int(pool.records[parent, SUCCESSOR])
    ahead = int(pool.records[block, AHEAD])
    if ahead > NULL_BLOCK:
        prefetch(pool.records, ahead, FIRST_WALK_FIELD)
        prefetch(pool.records, ahead, LAST_WALK_FIELD)
        prefetch(pool.digests, ahead, 0)
    if not has_digest(pool, block, digest):
        block = int(find(pool, name, digest))
    return block if is_child_of(pool, name, block, parent) else NULL_BLOCK


@inlined
def add_to_path(pool: PoolArrays, name: int, digest: Uint32Array, path: Int32Array, index: int) -> None:
    """Take a block for what follows the first ``index`` of a path, name it by its digest, and write it down there.

    A block that has this name and cannot be reached any more, since what it continues was evicted, loses it.
    """
    block = acquire_often(pool)
    parent = path[index - 1] if index > 0 else NULL_BLOCK
    set_digest(pool, block, digest)
    unreachable = find(pool, name, pool.digests[block])  # as stored: to read `digest` here takes 4 % longer in all
    if unreachable != NULL_BLOCK:
        drop_name(pool, unreachable)
    name_block(pool, name, block, parent, pool.records[parent, LIFE])
    path[index] = block
    if index >= LOOKAHEAD:
        note_ahead(pool.records, path[index - LOOKAHEAD], block)
