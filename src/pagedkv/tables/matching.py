"""Matching: how far a prompt is cached, verified token by token.

Nothing here changes any state. In a group that keeps its whole prefix, each block stores its latest successor, so a
long hit costs one comparison of tokens a block and no hashing; a digest is computed and looked up only where chains
branch. In a group that may have lost parts of a prefix (windows, chunks, recurrent states), the blocks that a hit needs
are looked up by digest, from the right end.
"""

from pagedkv.blocks.blocks import (
    AHEAD,
    EXTRA,
    FIRST_WALK_FIELD,
    FREE,
    LAST_WALK_FIELD,
    LOOKAHEAD,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    SUCCESSOR,
    PoolArrays,
)
from pagedkv.blocks.digests import ROOT_WORDS, digest_block
from pagedkv.blocks.extra_keys import ExtraKeyArrays
from pagedkv.blocks.prefix_index import find, is_child_of
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.compilation.instructions import PIECE, prefetch, same_piece
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.tables.rows import (
    BLOCK_SIZE,
    ENDS_HITS,
    KIND,
    NAME_IN_POOL,
    NUM_SINK_BLOCKS,
    SHARES_IN_STEP,
    SPAN,
    GroupArrays,
)
from pagedkv.tables.rules import first_block_of_hit, first_needed_token

__all__ = ["collect_servable", "count_free", "first_other_block", "longest_servable", "match_chain", "missing_block"]


@inlined
def holds_tokens(pool: PoolArrays, block: int, tokens: Int32Array, start: int, block_size: int) -> bool:
    """Whether a block's tokens are those of a prompt from ``start`` on."""
    num_in_pieces = block_size // PIECE * PIECE
    for place in range(0, num_in_pieces, PIECE):
        if not same_piece(pool.tokens, block, place, tokens, start + place):
            return False
    difference = 0
    for place in range(num_in_pieces, block_size):
        difference |= pool.tokens[block, place] ^ tokens[start + place]
    return difference == 0


@inlined
def is_continuation(
    pool: PoolArrays, name: int, block: int, parent: int, tokens: Int32Array, start: int, block_size: int, extra: int
) -> bool:
    """Whether a block is a child of ``parent`` and has the tokens of a prompt from ``start`` on, and its extra keys."""
    return (
        is_child_of(pool, name, block, parent)
        and pool.records[unsigned(block), EXTRA] == extra
        and holds_tokens(pool, block, tokens, start, block_size)
    )


@compiled
def match_chain(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    extra_keys: ExtraKeyArrays,
    digests: Uint32Array,
    out: Int32Array,
) -> tuple[int, int, int]:
    """Follow a prompt through a group that keeps whole prefixes.

    Returns how many blocks hit, how many of these come before the first that the open step still computes, and how
    many of them are free.

    Args:
        digests: the prompt's digests if the caller supplied them, else empty.
        out: int32 ``[most blocks that may hit]``; receives the blocks that hit.
    """
    records, open_step = pool.records, pool.counts[OPEN_STEP]
    name, block_size = group.parameters[NAME_IN_POOL], group.parameters[BLOCK_SIZE]
    num_hits, num_settled, num_free, parent = 0, -1, 0, NULL_BLOCK
    for index in range(len(out)):
        start = index * block_size
        extra = extra_ids[index] if index < len(extra_ids) else 0
        if extra < 0:
            break
        block = int(records[unsigned(parent), SUCCESSOR])
        _fetch_ahead(pool, block)
        if not is_continuation(pool, name, block, parent, tokens, start, block_size, extra):
            block = _find_child(pool, group, tokens, extra, extra_keys, digests, index, parent)
            if block == NULL_BLOCK:
                break
        if records[unsigned(block), PENDING_STEP] == open_step:
            if not group.parameters[SHARES_IN_STEP]:
                break
            if num_settled < 0:
                num_settled = index
        elif num_settled >= 0:
            break  # the row that takes over the pending blocks would compute this one again
        if records[unsigned(block), QUEUE] == FREE:
            num_free += 1
        out[index] = block
        num_hits = index + 1
        parent = block
    return num_hits, num_settled if num_settled >= 0 else num_hits, num_free


@inlined
def _fetch_ahead(pool: PoolArrays, block: int) -> None:
    """Prefetch a block further down the chain, unless the chain is contiguous in memory."""
    ahead = int(pool.records[unsigned(block), AHEAD])
    if ahead != block + LOOKAHEAD and ahead > NULL_BLOCK:  # a spare block has no hint
        prefetch(pool.records, ahead, FIRST_WALK_FIELD)  # 36 bytes, in one cache line or two
        prefetch(pool.records, ahead, LAST_WALK_FIELD)
        prefetch(pool.tokens, ahead, 0)


@compiled
def _find_child(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra: int,
    extra_keys: ExtraKeyArrays,
    digests: Uint32Array,
    index: int,
    parent: int,
) -> int:
    """Look up the child of ``parent`` with the content of logical block ``index``; the null block if there is none."""
    name = group.parameters[NAME_IN_POOL]
    block_size = group.parameters[BLOCK_SIZE]
    start = index * block_size
    if len(digests):
        block = find(pool, name, digests[index])
    else:
        above = ROOT_WORDS if index == 0 else pool.digests[parent]
        digest_block(above, tokens[start : start + block_size], extra_keys, extra, extra_keys.digest)
        block = find(pool, name, extra_keys.digest)
    if is_continuation(pool, name, block, parent, tokens, start, block_size, extra):
        return block
    return NULL_BLOCK


@compiled
def first_other_block(pool: PoolArrays, group: GroupArrays, blocks: Int32Array, tokens: Int32Array) -> int:
    """Find the first logical block with other tokens than a prompt, or -1; no block may be null."""
    block_size = group.parameters[BLOCK_SIZE]
    for index in range(len(blocks)):
        if index + LOOKAHEAD < len(blocks):
            prefetch(pool.tokens, blocks[index + LOOKAHEAD], 0)
        if not holds_tokens(pool, blocks[index], tokens, index * block_size, block_size):
            return index
    return -1


@compiled
def count_free(records: Int32Array, blocks: Int32Array) -> int:
    """Count the free ones among some blocks; null blocks do not count."""
    num_free = 0
    for block in blocks:
        if block != NULL_BLOCK and records[block, QUEUE] == FREE:
            num_free += 1
    return num_free


@compiled
def find_block(
    pool: PoolArrays, group: GroupArrays, tokens: Int32Array, extra_ids: Int32Array, digests: Uint32Array, index: int
) -> int:
    """Look up logical block ``index`` of a prompt by its digest; the null block if it cannot be hit."""
    block_size = group.parameters[BLOCK_SIZE]
    block = find(pool, group.parameters[NAME_IN_POOL], digests[index])
    extra = extra_ids[index] if index < len(extra_ids) else 0
    if block == NULL_BLOCK or pool.records[block, EXTRA] != extra:
        return NULL_BLOCK
    if not holds_tokens(pool, block, tokens, index * block_size, block_size):
        return NULL_BLOCK
    if not group.parameters[SHARES_IN_STEP] and pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
        return NULL_BLOCK
    return block


@compiled
def longest_servable(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    digests: Uint32Array,
    limit: int,
    seen: Int32Array,
) -> int:
    """Return the longest prefix of at most ``limit`` tokens for which a group still has all needed blocks.

    Args:
        seen: int32 ``[2]``: the first of the blocks below an earlier limit that are known to be cached, and how many
            sink blocks are. At first: how many blocks the prompt has, and 0. If limits only fall from call to call,
            every block is looked up once, however many calls there are.
    """
    block_size = group.parameters[BLOCK_SIZE]
    length = limit // block_size * block_size
    while length > 0:
        missing = _first_unseen_missing(pool, group, tokens, extra_ids, digests, length, seen)
        if missing < 0:
            return int(length)
        # Every shorter prefix that reaches into the missing block needs it as well.
        length = missing * block_size
    return 0


@compiled
def _first_unseen_missing(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    digests: Uint32Array,
    length: int,
    seen: Int32Array,
) -> int:
    """Find a missing block as :func:`missing_block` does, past those that are known to be cached."""
    first = first_block_to_hold(group, length, length)
    seen[0] = min(seen[0], length // group.parameters[BLOCK_SIZE])
    for index in range(seen[0] - 1, first - 1, -1):
        if find_block(pool, group, tokens, extra_ids, digests, index) == NULL_BLOCK:
            return index
        seen[0] = index
    for index in range(seen[1], min(group.parameters[NUM_SINK_BLOCKS], first)):
        if find_block(pool, group, tokens, extra_ids, digests, index) == NULL_BLOCK:
            return index
        seen[1] = index + 1
    return -1


@compiled
def first_block_to_hold(group: GroupArrays, length: int, compute_from: int) -> int:
    """Return the first logical block (sinks aside) that a hit must refer to.

    If the open step still computes tokens of the hit, from position ``compute_from`` on, the hit also refers to the
    blocks that computing them reads, so that its row can take over the computation.
    """
    block_size = group.parameters[BLOCK_SIZE]
    first = first_block_of_hit(
        group.parameters[KIND], group.parameters[SPAN], length, block_size, group.parameters[ENDS_HITS]
    )
    needed = first_needed_token(group.parameters[KIND], group.parameters[SPAN], compute_from)
    return int(min(first, needed // block_size))


@compiled
def missing_block(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    digests: Uint32Array,
    length: int,
    compute_from: int,
) -> int:
    """Find a logical block that a hit of ``length`` tokens must refer to and that is not cached, or -1."""
    block_size = group.parameters[BLOCK_SIZE]
    first = first_block_to_hold(group, length, compute_from)
    for index in range(length // block_size - 1, first - 1, -1):
        if find_block(pool, group, tokens, extra_ids, digests, index) == NULL_BLOCK:
            return index
    for index in range(min(group.parameters[NUM_SINK_BLOCKS], first)):
        if find_block(pool, group, tokens, extra_ids, digests, index) == NULL_BLOCK:
            return index
    return -1


@compiled
def collect_servable(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    digests: Uint32Array,
    length: int,
    compute_from: int,
    out: Int32Array,
    seen: Int32Array,
) -> int:
    """Write the blocks of a hit of ``length`` tokens, null where none is needed.

    Returns how many logical blocks come before the first that the open step still computes, or -1 if a block is
    missing. ``compute_from`` may fall from call to call; then only what is needed in addition is looked up.

    Args:
        out: int32 ``[length // block_size]``, zeros at first.
        seen: int32 ``[2]``, the first block behind the sinks that was looked up, and the first that the open step
            computes; at first ``len(out)`` both.
    """
    first = min(first_block_to_hold(group, length, compute_from), len(out))
    num_sinks = min(group.parameters[NUM_SINK_BLOCKS], first)
    for index in range(seen[0] - 1, first - 1, -1):
        if not _collect(pool, group, tokens, extra_ids, digests, index, out, seen):
            return -1
        seen[0] = index
    for index in range(num_sinks):
        if out[index] == NULL_BLOCK and not _collect(pool, group, tokens, extra_ids, digests, index, out, seen):
            return -1
    return int(seen[1])


@compiled
def _collect(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    digests: Uint32Array,
    index: int,
    out: Int32Array,
    seen: Int32Array,
) -> bool:
    """Look one block up, write it, and note if it is pending; return whether there is one."""
    block = find_block(pool, group, tokens, extra_ids, digests, index)
    out[index] = block
    if block == NULL_BLOCK:
        return False
    if pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
        seen[1] = min(seen[1], index)
    return True
