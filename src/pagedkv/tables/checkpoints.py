"""Kept states at the ends of prompts: named inside an interval, found again, and continued from.

A recurrent group's block stands for an interval of tokens. While it is partly filled, it is the state that a sequence
advances in place, so it has no name. But the state after the last whole interval of a prompt is worth keeping. Such a
block is named by the *tail* of tokens that it covers. From then on it is not written any more: a row that continues
from it copies it first (:mod:`~pagedkv.tables.growing`)::

    tokens     0 ........ 544 ....... 1088 ... 1248 1249
    blocks     [ interval ][ interval ][  tail  ]
                                               ^ named by its parent's digest, 160, and the 160 tokens
"""

from pagedkv.blocks.block_record import hold_until, note_content
from pagedkv.blocks.blocks import (
    EXTRA,
    NAME,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    PoolArrays,
)
from pagedkv.blocks.contents import set_digest, set_extra, set_parent
from pagedkv.blocks.digests import digest_block
from pagedkv.blocks.extra_keys import ExtraKeyArrays
from pagedkv.blocks.life_cycle import drop_name, release
from pagedkv.blocks.moments import note_copy
from pagedkv.blocks.prefix_index import find, name_block
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.tables.matching import holds_tokens
from pagedkv.tables.rows import AT, BLOCK_SIZE, LAST_STEP, NAME_IN_POOL, NUM_TOKENS, TAIL, TAIL_LIFE, GroupArrays

__all__ = ["drop_tail_names", "find_tail", "name_tail", "resume", "surrender"]


@compiled
def find_tail(
    pool: PoolArrays,
    group: GroupArrays,
    parent: Uint32Array,
    tokens: Int32Array,
    extra_keys: ExtraKeyArrays,
    extra: int,
) -> int:
    """Find the kept state after less than an interval of tokens that follow ``parent``; else the null block."""
    digest_block(parent, tokens, extra_keys, extra, extra_keys.digest)
    block = find(pool, group.parameters[NAME_IN_POOL], extra_keys.digest)
    if block == NULL_BLOCK or pool.records[block, EXTRA] != extra:
        return NULL_BLOCK
    if pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
        return NULL_BLOCK
    return block if holds_tokens(pool, block, tokens, 0, len(tokens)) else NULL_BLOCK


@compiled
def name_tail(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    parent: Uint32Array,
    extra_keys: ExtraKeyArrays,
    extra: int,
) -> int:
    """Name the block that a row has partly filled, with the extra keys of its tail; return it.

    The null block if the row's is named already, or another one has its name.
    """
    block_size = group.parameters[BLOCK_SIZE]
    num_tokens = rows[row, NUM_TOKENS]
    block = group.table[row, num_tokens // block_size]
    if pool.records[block, NAME]:
        return NULL_BLOCK
    name = group.parameters[NAME_IN_POOL]
    tail = pool.tokens[block, : num_tokens % block_size]
    digest_block(parent, tail, extra_keys, extra, extra_keys.digest)
    if find(pool, name, extra_keys.digest) != NULL_BLOCK:
        return NULL_BLOCK
    set_digest(pool, block, extra_keys.digest)
    set_parent(pool, block, parent)
    set_extra(pool.records, block, extra)
    record = rows[row]
    at = group.parameters[AT]
    name_block(pool, name, block, record[at + TAIL], record[at + TAIL_LIFE])
    return int(block)


@compiled
def drop_tail_names(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array) -> None:
    """Remove the names of rows' partly filled blocks, so that the rows continue in place."""
    block_size = group.parameters[BLOCK_SIZE]
    for row in batch:
        num_tokens = rows[row, NUM_TOKENS]
        if num_tokens % block_size == 0:
            continue
        block = group.table[row, num_tokens // block_size]
        if pool.records[block, NAME]:
            drop_name(pool, block)


@compiled
def surrender(pool: PoolArrays, block: int) -> None:
    """Make a checkpoint without other references the next block to be allocated, with its content."""
    drop_name(pool, block)
    release(pool, block, 0)


@compiled
def resume(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, index: int, source: int) -> bool:
    """Let a new row continue from a checkpoint; return whether its own block is to become a copy of ``source``.

    The row has a reference to the checkpoint, which is released, unless the row's own block is the checkpoint.
    """
    own = group.table[row, index]
    note_content(pool.records, own)
    if own == source:
        return False
    note_copy(pool, source, pool, own)
    hold_until(pool.records, own, pool.counts[OPEN_STEP])
    hold_until(pool.records, source, pool.counts[OPEN_STEP])
    release(pool, source, rows[row, LAST_STEP])
    return True
