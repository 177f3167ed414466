"""T-LRU: of each sequence that ended, the tail that its next turn can afford to compute again is evicted first.

Tail-optimized LRU (Zhang et al., "Tail-Optimized Caching for LLM Inference", arXiv 2510.15152, 2025; SGLang 0.5.23 has
it as ``tlru``). A time to the first token of at most some limit allows a turn to compute a number of tokens, of which
its own question takes a part. The rest is the *tail*: if the last so many tokens of a conversation are gone, its next
turn still keeps the limit. So tails are evicted before anything that a long conversation needs::

    cold:       without content | tails,        least recently used ... most recently used
    protected:                    all before,   least recently used ... most recently used

A block is before the tail if it is so in any sequence that ended with it, for as long as it has its name; what a short
conversation has as its tail may be the beginning of a long one. A sequence that is no longer than a tail is all tail. A
block that was released before its sequence ended counts as tail, and so does one whose lease has ended.

The policy gives hits up for the slowest requests: measure it by the time to the first token, not by hits.
"""

from typing import ClassVar, Final

import numpy as np

from pagedkv.blocks.eviction.policy import EvictionPolicy, PolicyMoments, PolicyState, no_state
from pagedkv.blocks.free_queue import insert_before, protected_sentinel, put_last
from pagedkv.blocks.record import NAME, NULL_BLOCK, FeaturedArrays, PoolArrays
from pagedkv.compilation.compiled import compiled, inlined
from pagedkv.contract.arrays import Int32Array

NUM_TAIL: Final = 0  # the policy's only count: blocks of a tail
BEFORE_TAIL: Final = 1  # a block's rank
DEFAULT_TAIL: Final = 128
"""Blocks of a tail where none is set: 2,048 tokens in blocks of 16."""


def _new_state(num_blocks: int) -> PolicyState:
    """Make a pool in which no block is before a tail."""
    counts = np.array([DEFAULT_TAIL], np.int64)
    return no_state(num_blocks)._replace(counts=counts, ranks=np.zeros(num_blocks + 1, np.uint8))


def set_tail(pool: PoolArrays, num_blocks: int) -> None:
    """Set the length of tails, in blocks."""
    pool.eviction[NUM_TAIL] = num_blocks


@compiled
def _note_request(pool: PoolArrays, blocks: Int32Array, _num_outputs: int) -> None:
    """Mark the blocks of a sequence before its tail, which ends with its last named block."""
    num_named = len(blocks)
    while num_named > 0 and not pool.records[blocks[num_named - 1], NAME]:
        num_named -= 1
    for index in range(num_named - pool.eviction[NUM_TAIL]):
        if pool.records[blocks[index], NAME]:
            pool.ranks[blocks[index]] = BEFORE_TAIL


@inlined
def _enqueue(pool: PoolArrays, block: int) -> None:
    """Put a block at the back of its list."""
    if pool.ranks[block]:
        insert_before(pool.records, pool.counts, protected_sentinel(pool.records), block)
    else:
        put_last(pool, block)


@inlined
def _note_drop(pool: PoolArrays, block: int) -> None:
    """Clear the rank of a block that loses its name."""
    pool.ranks[block] = 0


def _check(where: str, pool: PoolArrays, cold: list[int], protected: list[int]) -> None:
    """Check that the protected list has the free blocks before tails, and that these have names."""
    ranks = pool.ranks
    assert not ranks[cold].any(), f"{where}: a block before a tail is in the cold list"
    assert ranks[protected].all(), f"{where}: a block of a tail is protected"
    assert pool.records[np.flatnonzero(ranks), NAME].all(), f"{where}: a block before a tail has no name"
    assert not ranks[NULL_BLOCK], f"{where}: the null block is before a tail"


class TlruArrays(FeaturedArrays):
    """The arrays of a pool with this policy."""

    __slots__ = ()
    policy: ClassVar = PolicyMoments(note_request=_note_request, enqueue=_enqueue, note_drop=_note_drop)


TLRU: Final = EvictionPolicy("tlru", TlruArrays, new_state=_new_state, check=_check)
