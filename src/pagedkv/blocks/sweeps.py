"""Sweeps over all blocks of a pool that remove many names, O(blocks) each.

Paths of prompts through one pool: find the cached blocks of a prompt and add the blocks that follow, by digest.

This does without rows what rows do with tables, for simulations of the blocks of a trace that a pool would keep. A path
is an array of block ids, head first; its owner holds a reference to each.
"""

from pagedkv.blocks.digests import set_digest
from pagedkv.blocks.life_cycle import acquire_often, drop_name, lose_name
from pagedkv.blocks.prefix_index import find, has_digest, is_child_of, name_block
from pagedkv.blocks.record import (
    AHEAD,
    CALLED_OFF,
    FIRST_WALK_FIELD,
    LAST_WALK_FIELD,
    LIFE,
    LOOKAHEAD,
    NAME,
    NULL_BLOCK,
    NUM_SENTINELS,
    OLDEST,
    OTHER_EPOCH,
    PENDING_STEP,
    RESET,
    SUCCESSOR,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined, prefetch
from pagedkv.contract.arrays import Int32Array, Uint32Array


@compiled
def drop_all_names(pool: PoolArrays, cause: int = RESET) -> int:
    """Remove all names; return how many blocks had one."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME]:
            lose_name(pool, block, cause)
            num_dropped += 1
    return num_dropped


@compiled
def withdraw_since(pool: PoolArrays, step: int) -> int:
    """Remove the names of content that ``step`` or a later one was to compute; return how many."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME] and pool.records[block, PENDING_STEP] >= step:
            drop_name(pool, block, CALLED_OFF)
            num_dropped += 1
    return num_dropped


@compiled
def drop_stale(pool: PoolArrays, bound: int) -> int:
    """Remove the names of content with contributions of weights older than epoch ``bound``; return how many."""
    num_dropped = 0
    for block in range(1, len(pool.records) - NUM_SENTINELS):
        if pool.records[block, NAME] and pool.epochs[block, OLDEST] < bound:
            drop_name(pool, block, OTHER_EPOCH)
            num_dropped += 1
    return num_dropped


@inlined
def find_child(pool: PoolArrays, name: int, digest: Uint32Array, parent: int) -> int:
    """Find the child of ``parent`` with a digest, usually the last named one; the null block if there is none."""
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
    """Allocate a block for what follows the first ``index`` blocks of a path, name it by its digest, and append it.

    If another block has this name and is unreachable, since its parent was evicted, that block loses the name.
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
        pool.records[path[index - LOOKAHEAD], AHEAD] = block
