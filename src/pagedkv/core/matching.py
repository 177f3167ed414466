"""Finding content: how far a prompt is cached, verified token by token.

A question: nothing here changes anything. In a group that keeps its whole prefix, each block remembers
its latest successor, so a long hit costs one comparison of tokens a block and no hashing; only at a
branch is a digest computed and looked up. In a group whose prefix may be partly gone (windows, chunks,
recurrent states) the blocks that a hit needs are looked up by digest, from the right end.
"""

from pagedkv.core.blocks import (
    EXTRA,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    SUCCESSOR,
    Int32Array,
    PoolArrays,
    Uint32Array,
)
from pagedkv.core.compiled import compiled, inlined
from pagedkv.core.digests import ROOT_WORDS, digest_block
from pagedkv.core.extra_keys import ExtraKeyArrays
from pagedkv.core.prefix_index import find, is_child_of
from pagedkv.core.rows import BLOCK_SIZE, KIND, NAME_IN_POOL, NUM_SINK_BLOCKS, SHARES_IN_STEP, SPAN, GroupArrays
from pagedkv.core.rules import first_block_of_hit, first_needed_token

__all__ = ["longest_servable", "match_chain"]


@inlined
def holds_tokens(pool: PoolArrays, block: int, tokens: Int32Array, start: int, block_size: int, extra: int) -> bool:
    """Compare a block's tokens and extra keys with those of a prompt from ``start`` on."""
    if pool.records[block, EXTRA] != extra:
        return False
    difference = 0
    for index in range(block_size):
        difference |= pool.tokens[block, index] ^ tokens[start + index]
    return difference == 0


@compiled
def match_chain(
    pool: PoolArrays,
    group: GroupArrays,
    tokens: Int32Array,
    extra_ids: Int32Array,
    extra_keys: ExtraKeyArrays,
    digests: Uint32Array,
    out: Int32Array,
) -> tuple[int, int]:
    """Follow a prompt through a group that keeps whole prefixes.

    Returns how many blocks hit, and how many of them come before the first that the open step still computes.

    Args:
        digests: the prompt's digests if the caller brought them, else empty.
        out: int32 ``[most blocks that may hit]``; the blocks that hit.
    """
    name = group.parameters[NAME_IN_POOL]
    block_size = group.parameters[BLOCK_SIZE]
    digest = extra_keys.digest
    open_step = pool.counts[OPEN_STEP]
    num_settled = -1
    parent = NULL_BLOCK
    for index in range(len(out)):
        start = index * block_size
        extra = extra_ids[index] if index < len(extra_ids) else 0
        if extra < 0:
            return index, num_settled if num_settled >= 0 else index
        block = pool.records[parent, SUCCESSOR]
        if not (is_child_of(pool, name, block, parent) and holds_tokens(pool, block, tokens, start, block_size, extra)):
            if len(digests):
                block = find(pool, name, digests[index])
            else:
                above = ROOT_WORDS if index == 0 else pool.digests[parent]
                digest_block(above, tokens[start : start + block_size], extra_keys, extra, digest)
                block = find(pool, name, digest)
            if not (
                is_child_of(pool, name, block, parent) and holds_tokens(pool, block, tokens, start, block_size, extra)
            ):
                return index, num_settled if num_settled >= 0 else index
        if pool.records[block, PENDING_STEP] == open_step:
            if not group.parameters[SHARES_IN_STEP]:
                return index, index
            if num_settled < 0:
                num_settled = index
        out[index] = block
        parent = block
    return len(out), num_settled if num_settled >= 0 else len(out)


@compiled
def find_block(
    pool: PoolArrays, group: GroupArrays, tokens: Int32Array, extra_ids: Int32Array, digests: Uint32Array, index: int
) -> int:
    """Look up logical block ``index`` of a prompt by digest; the null block if it cannot be served."""
    block_size = group.parameters[BLOCK_SIZE]
    block = find(pool, group.parameters[NAME_IN_POOL], digests[index])
    extra = extra_ids[index] if index < len(extra_ids) else 0
    if block == NULL_BLOCK or not holds_tokens(pool, block, tokens, index * block_size, block_size, extra):
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
) -> int:
    """Tell the longest prefix of at most ``limit`` tokens for which a group still has what is needed."""
    block_size = group.parameters[BLOCK_SIZE]
    length = limit // block_size * block_size
    while length > 0:
        missing = missing_block(pool, group, tokens, extra_ids, digests, length, length)
        if missing < 0:
            return int(length)
        # Every shorter prefix that reaches into the missing block needs it as well.
        length = missing * block_size
    return 0


@compiled
def first_block_to_hold(group: GroupArrays, length: int, compute_from: int) -> int:
    """First logical block (sinks apart) that a hit must hold.

    A hit on tokens that the open step still computes, from position ``compute_from`` on, holds what computing
    them takes, so that it can take the computation over.
    """
    block_size = group.parameters[BLOCK_SIZE]
    first = first_block_of_hit(group.parameters[KIND], group.parameters[SPAN], length, block_size)
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
    """Name a logical block that a hit of ``length`` tokens must hold and that is not there, or -1."""
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
) -> int:
    """Write the blocks that serve a hit of ``length`` tokens; null where none is needed.

    Returns how many logical blocks come before the first that the open step still computes.
    """
    first = first_block_to_hold(group, length, compute_from)
    num_sinks = group.parameters[NUM_SINK_BLOCKS]
    num_settled = len(out)
    for index in range(len(out) - 1, -1, -1):
        needed = index >= first or index < num_sinks
        out[index] = find_block(pool, group, tokens, extra_ids, digests, index) if needed else NULL_BLOCK
        if out[index] != NULL_BLOCK and pool.records[out[index], PENDING_STEP] == pool.counts[OPEN_STEP]:
            num_settled = index
    return num_settled
