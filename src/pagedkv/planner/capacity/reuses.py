"""Finds blocks that are used again: hits depend on these alone, and they take far fewer rows than the references.

A *reuse* is a block together with two consecutive requests that use it. All blocks reused between the same two requests
are consecutive on the path that both prompts share, so one row counts them::

    request 0   a b c d
    request 1   a b x            0 -> 1: a b
    request 2   a b c            1 -> 2: a b     0 -> 2: c

In a request with two rows the head was last used by a later request than the tail, never the reverse, since a request
that uses a block uses all blocks before it. Mooncake's conversation trace has 288,500 references, 105,710 reuses of
blocks, and 16,708 rows.
"""

from typing import Final, NamedTuple

import numpy as np

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.planner.capacity.block_tree import ROOT

__all__ = ["Reuses", "find_reuses"]

NEVER = -1  # not used yet
ROWS_A_CALL: Final = 2**18
LONGEST_PROMPT: Final = 2**24  # blocks: the most tokens that a prompt may have


class Reuses(NamedTuple):
    """Rows ordered by ``later``, then by ``earlier``: tail before head.

    Args:
        earlier: int32 ``[n]``, a request.
        later: int32 ``[n]``, the next request that uses the same blocks.
        num_blocks: int32 ``[n]``, blocks reused between the two, at least 1.
    """

    earlier: Int32Array
    later: Int32Array
    num_blocks: Int32Array


def find_reuses(parents: Int32Array, last_blocks: Int32Array) -> Reuses:
    """Find all reuses of a trace. O(references), about 1 ns each.

    Args:
        parents: int32 ``[1 + blocks]``, the tree of blocks.
        last_blocks: int32 ``[requests]``, the last block of each prompt.

    >>> reuses = find_reuses(np.array([0, 0, 1, 2, 3, 2], np.int32), np.array([4, 5, 3], np.int32))
    >>> list(zip(*(column.tolist() for column in reuses)))
    [(0, 1, 2), (0, 2, 1), (1, 2, 2)]
    """
    last_uses = np.full(len(parents), NEVER, np.int32)
    rows = np.empty((max(ROWS_A_CALL, min(len(parents), LONGEST_PROMPT)), 2), np.int32)
    found = [np.empty((0, 2), np.int32)]
    counts = np.zeros(len(last_blocks), np.int64)
    request = 0
    while request < len(last_blocks):
        stop = _use_prompts(parents, last_uses, last_blocks, request, rows, counts)
        found.append(rows[: counts[request:stop].sum()].copy())
        request = stop
    earlier, num_blocks = np.concatenate(found).T.copy()
    later = np.repeat(np.arange(len(last_blocks), dtype=np.int32), counts)
    return Reuses(earlier, later, num_blocks)


@compiled
def _use_prompts(  # noqa: PLR0913, PLR0917 - a compiled loop takes arrays and numbers separately
    parents: Int32Array,
    last_uses: Int32Array,
    last_blocks: Int32Array,
    first: int,
    pairs: Int32Array,
    num_reused: Int64Array,
) -> int:
    """Walk prompts from ``first`` on while there is room for another's pairs; return the first prompt not walked."""
    num_pairs = 0
    for request in range(first, len(last_blocks)):
        block, length = last_blocks[request], 0
        while block != ROOT:
            length += 1
            block = parents[block]
        if num_pairs + length > len(pairs):
            return request
        num_reused[request] = _use_prompt(parents, last_uses, last_blocks[request], request, pairs[num_pairs:])
        num_pairs += num_reused[request]
    return len(last_blocks)


@compiled
def _use_prompt(parents: Int32Array, last_uses: Int32Array, last_block: int, request: int, pairs: Int32Array) -> int:
    """Walk a prompt from tail to head, record this use, and write ``(earlier request, blocks)``; return the pairs."""
    num_pairs = 0
    block = last_block
    while block != ROOT:
        earlier = last_uses[block]
        last_uses[block] = request
        if num_pairs > 0 and pairs[num_pairs - 1, 0] == earlier:
            pairs[num_pairs - 1, 1] += 1
        elif earlier != NEVER:
            pairs[num_pairs, 0] = earlier
            pairs[num_pairs, 1] = 1
            num_pairs += 1
        block = parents[block]
    return num_pairs
