"""Hits that end inside a block: how many leading tokens of a cached block a prompt shares.

A hit of whole blocks ends where a prompt leaves a cached chain, or at the last boundary before its own end. The next
block of that chain may still begin with the prompt's next tokens. Such a block is the *source*: the plan copies it into
the block that the sequence writes next, and computing begins after the equal tokens::

    cached   [A0 A1 A2 A3][B0 B1 B2 B3][C0 C1 C2 C3]
    prompt    A0 A1 A2 A3  B0 B1 X  Y                     4 tokens hit in a whole block, 2 inside the next one
    row      [A0 A1 A2 A3][B0 B1 x  y ]                   its own block: a copy, of which 2 tokens count

Nothing here changes any state. The copy, and the reference to the source until then, are handled like those of states
that are kept inside intervals (:mod:`pagedkv.tables.checkpoints`).
"""

from typing import Final

from pagedkv.blocks.blocks import EXTRA, NAME, NULL_BLOCK, OPEN_STEP, PENDING_STEP, SUCCESSOR, PoolArrays
from pagedkv.blocks.digests import digest_block
from pagedkv.blocks.extra_keys import ExtraKeyArrays
from pagedkv.blocks.prefix_index import has_digest, is_child_of
from pagedkv.blocks.siblings import OLDER
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.tables.rows import BLOCK_SIZE, NAME_IN_POOL, GroupArrays

__all__ = ["begins_as_child", "begins_behind", "count_equal", "follows", "is_source"]

MOST_CHILDREN: Final = 16  # children of a block that are compared, beginning with the one named last


@inlined
def is_source(pool: PoolArrays, group: GroupArrays, block: int, extra: int) -> bool:
    """Whether a block can be copied: it has a name in this group, these extra keys, and content.

    A block that the open plan computes has no content yet: it is written after the copies of that plan.
    """
    record = pool.records[block]
    return bool(
        record[NAME] == group.parameters[NAME_IN_POOL]
        and record[EXTRA] == extra
        and record[PENDING_STEP] != pool.counts[OPEN_STEP]
    )


@compiled
def count_equal(pool: PoolArrays, block: int, tokens: Int32Array, start: int, stop: int) -> int:
    """Count the leading tokens of a block that equal those of a prompt at ``[start, stop)``."""
    num_equal = 0
    while start + num_equal < stop and pool.tokens[block, num_equal] == tokens[start + num_equal]:
        num_equal += 1
    return num_equal


@compiled
def begins_as_child(
    pool: PoolArrays, group: GroupArrays, parent: int, tokens: Int32Array, start: int, stop: int, extra: int
) -> tuple[int, int]:
    """Find the best source among the children of the verified block ``parent``, in a group that keeps whole prefixes.

    Returns the block, and the number of its leading tokens that equal a prompt's at ``[start, stop)``; 0 if none does.
    """
    best, num_tokens = NULL_BLOCK, 0
    child = int(pool.records[parent, SUCCESSOR])
    for _ in range(MOST_CHILDREN):
        if child == NULL_BLOCK or num_tokens == stop - start:
            break
        if is_child_of(pool, group.parameters[NAME_IN_POOL], child, parent) and is_source(pool, group, child, extra):
            num_equal = count_equal(pool, child, tokens, start, stop)
            if num_equal > num_tokens:
                best, num_tokens = child, num_equal
        child = int(pool.siblings[child, OLDER])
    return best, num_tokens


@compiled
def begins_behind(
    pool: PoolArrays,
    group: GroupArrays,
    above: int,
    block: int,
    parent: Uint32Array,
    tokens: Int32Array,
    start: int,
    stop: int,
    extra_keys: ExtraKeyArrays,
    extra: int,
) -> tuple[int, int]:
    """Find the best block to copy after the digest ``parent``, in a group that may have lost the prefix.

    The candidates are ``block``, which another group has, and the children of ``above`` in this group; both may be
    null. Their digests are computed anew from ``parent``: with its prefix gone, a candidate may follow anything.
    """
    best, num_tokens = NULL_BLOCK, 0
    child = int(pool.records[above, SUCCESSOR]) if above != NULL_BLOCK or start == 0 else NULL_BLOCK
    candidate = block
    for _ in range(MOST_CHILDREN + 1):
        if candidate != NULL_BLOCK and is_source(pool, group, candidate, extra):
            num_equal = count_equal(pool, candidate, tokens, start, stop)
            if num_equal > num_tokens and follows(pool, group, candidate, parent, extra_keys, extra):
                best, num_tokens = candidate, num_equal
        if child == NULL_BLOCK or num_tokens == stop - start:
            break
        candidate = child
        child = int(pool.siblings[child, OLDER])
    return best, num_tokens


@compiled
def follows(
    pool: PoolArrays, group: GroupArrays, block: int, parent: Uint32Array, extra_keys: ExtraKeyArrays, extra: int
) -> bool:
    """Whether a full block's digest is that of its tokens after a parent's digest."""
    digest_block(parent, pool.tokens[block, : group.parameters[BLOCK_SIZE]], extra_keys, extra, extra_keys.digest)
    return has_digest(pool, block, extra_keys.digest)
