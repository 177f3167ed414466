"""Blocks that are filled from outside: allocated for a prefix before they have its content, named afterwards."""

from pagedkv.blocks.block_record import note_content
from pagedkv.blocks.blocks import LIFE, NAME, NULL_BLOCK, PoolArrays
from pagedkv.blocks.causes import CALLED_OFF
from pagedkv.blocks.contents import set_digest, set_parent, write_down
from pagedkv.blocks.digests import ROOT_WORDS
from pagedkv.blocks.keep_reasons import AT_END, add_reasons, forget_reasons
from pagedkv.blocks.life_cycle import acquire, drop_name
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.tables.publishing import publish_block
from pagedkv.tables.rows import BLOCK_SIZE, FULL, KIND, NUM_SINK_BLOCKS, SHEDS, SPAN, GroupArrays
from pagedkv.tables.rules import first_needed_token, serves

__all__ = ["count_to_load", "publish_loaded", "take_to_load", "unname_unfilled"]


@compiled
def count_to_load(group: GroupArrays, num_hit_tokens: int, num_tokens: int) -> int:
    """Count the blocks after a hit that a hit of ``num_tokens`` needs."""
    block_size = group.parameters[BLOCK_SIZE]
    num_blocks = 0
    for index in range(num_hit_tokens // block_size, num_tokens // block_size):
        num_blocks += serves(group, index, num_tokens)
    return num_blocks


@compiled
def take_to_load(
    pool: PoolArrays, group: GroupArrays, tokens: Int32Array, digests: Uint32Array, num_hit_tokens: int, out: Int32Array
) -> None:
    """Allocate the blocks after a hit that a hit of all tokens needs; the caller has checked that there are enough.

    Args:
        tokens: int32 ``[n]``, whole blocks.
        digests: uint32 ``[n // block_size, 8]``.
        out: int32 ``[blocks after the hit]``; receives their ids, null where the group needs none.
    """
    block_size = group.parameters[BLOCK_SIZE]
    first = num_hit_tokens // block_size
    for index in range(first, len(tokens) // block_size):
        out[index - first] = NULL_BLOCK
        if not serves(group, index, len(tokens)):
            continue
        block = acquire(pool)
        note_content(pool.records, block)
        write_down(pool, block, 0, tokens, index * block_size, block_size)
        set_digest(pool, block, digests[index])
        set_parent(pool, block, digests[index - 1] if index else ROOT_WORDS)
        out[index - first] = block


@compiled
def unname_unfilled(pool: PoolArrays, group: GroupArrays, row: int, num_hit_tokens: int, num_tokens: int) -> None:
    """Remove the names of a row's blocks after its hit that computing position ``num_tokens`` does not read."""
    block_size = group.parameters[BLOCK_SIZE]
    first = first_needed_token(group.parameters[KIND], group.parameters[SPAN], num_tokens) // block_size
    for index in range(max(group.parameters[NUM_SINK_BLOCKS], num_hit_tokens // block_size), first):
        block = group.table[row, index]
        if block != NULL_BLOCK and pool.records[block, NAME]:
            drop_name(pool, block, CALLED_OFF)


@compiled
def publish_loaded(pool: PoolArrays, group: GroupArrays, parent: int, blocks: Int32Array) -> None:
    """Name blocks that were filled, up to the first gap in their chain.

    Args:
        parent: the block of the hit before them, or the null block.
        blocks: int32 ``[n]``, in order.
    """
    by_links = group.parameters[KIND] == FULL
    if by_links and parent != NULL_BLOCK and not pool.records[parent, NAME]:
        return
    for place in range(len(blocks)):
        block = blocks[place]
        if block == NULL_BLOCK:
            parent = NULL_BLOCK
            continue
        carrier = publish_block(pool, group, block, parent, pool.records[parent, LIFE])
        if not pool.records[carrier, NAME]:
            return
        if group.parameters[SHEDS] and carrier == block:
            forget_reasons(pool.records, block)
            add_reasons(pool.records, block, AT_END)
        parent = carrier
