"""The parts of an eviction policy: the functions by which it acts on a block, and its arrays.

All other state (counts, names, references, places) belongs to the pool and is the same for all policies. The next block
to be allocated is the first of the cold list, or, if that is empty, the first of the protected list. A policy chooses
the position of a cached block in these lists, or returns the victim itself (``choose_victim``)::

    cold:       without content, newest freed first | cached blocks, the next to be evicted first
    protected:                                        cached blocks, the next to be evicted first

For a policy, a block has a name from ``note_name`` to ``note_drop``. In between come hits and releases, in any possible
order: a hit on a block in use, for example, has no ``enqueue`` before it. Spare and leased blocks are excluded: the
policy is called as if their names were dropped, and set again later.

A policy is *prefix-closed* if it never evicts a block while a child of it is cached, since a block without its prefix
cannot be hit. The tail of a sequence is released before the head, so a policy that keeps the order of release is
prefix-closed. Other policies never cause a wrong hit (links to a block become invalid with its content), but
unreachable blocks occupy memory until they are evicted.

Policies that depend on time read the caller's clock in ``CLOCK_US`` (:meth:`~pagedkv.BlockSpace.advance`) if
``HAS_CLOCK`` is set.

The class of the pool's arrays selects the functions (``policy``); a class without any evicts as LRU does. They are
compiled and inlined into their callers. Long code that rarely runs should be a compiled function of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from pagedkv.blocks.free_queue import put_last
from pagedkv.blocks.record import FeaturedArrays, PoolArrays
from pagedkv.compilation.compiled import chosen_by_policy, inlined, nothing
from pagedkv.contract.arrays import Float32Array, Int32Array, Int64Array, Uint8Array, Uint32Array

__all__ = [
    "LRU",
    "Check",
    "Choice",
    "EvictionPolicy",
    "ExpectHook",
    "Hook",
    "PolicyMoments",
    "PolicyState",
    "RequestHook",
    "check_cold",
    "enqueue",
    "expect",
    "no_state",
    "put_last",
]

FETCHED_AHEAD: Final = 4  # blocks: enough to hide the latency of memory, few enough to be fetched at the same time
TABLE_FIELDS: Final = 2

Hook: TypeAlias = Callable[[PoolArrays, int], object]
"""Acts on a pool and one of its blocks."""
ExpectHook: TypeAlias = Callable[[PoolArrays, int], object]
"""Acts on a pool and the first word of a digest."""
RequestHook: TypeAlias = Callable[[PoolArrays, Int32Array, int], object]
"""Acts on a pool, the blocks of one sequence (int32 ``[any]``, head first), and its number of generated tokens."""
Choice: TypeAlias = Callable[[PoolArrays, int], int]
"""Returns a block of a pool, given another one."""
Check: TypeAlias = Callable[[str, PoolArrays, list[int], list[int]], None]
"""Checks a policy's invariants, given the pool's name, the pool, and the cold and the protected list from the front.
Raises AssertionError. For ``BlockSpace.check()``."""


@inlined
def _choose_first(_pool: PoolArrays, first: int) -> int:
    """Return the given block."""
    return first


expect: Final[ExpectHook] = chosen_by_policy("expect", nothing)
note_name: Final[Hook] = chosen_by_policy("note_name", nothing)
note_reuse: Final[Hook] = chosen_by_policy("note_reuse", nothing)
note_recomputed: Final[Hook] = chosen_by_policy("note_recomputed", nothing)
note_request: Final[RequestHook] = chosen_by_policy("note_request", nothing)
enqueue: Final[Hook] = chosen_by_policy("enqueue", put_last)
note_claim: Final[Hook] = chosen_by_policy("note_claim", nothing)
choose_victim: Final[Choice] = chosen_by_policy("choose_victim", _choose_first)
note_eviction: Final[Hook] = chosen_by_policy("note_eviction", nothing)
note_drop: Final[Hook] = chosen_by_policy("note_drop", nothing)


@dataclass(frozen=True, slots=True)
class PolicyMoments:
    """The functions of a policy, in the order of a block's life. The defaults are LRU.

    Args:
        expect: content is about to be named, ``FETCHED_AHEAD`` blocks of its sequence from now. Takes the first word of
            its digest. This is a hint for prefetching the policy's memory: it may come more than once, or never.
        note_name: a block in use was named: its content was computed and may be hit from now on. Its digest and its
            parent (``PARENT``, ``PARENT_LIFE``) are recorded already.
        note_reuse: a named block was hit. It is in use now, and in no list.
        note_recomputed: the content of this named block was computed again, since it could not be hit: another block
            that the hit needs was missing, its parent or one of another group. The row that computed the content uses
            this block now.
        note_request: a sequence ends: its blocks (ids, head first, null blocks among them) are about to be released,
            and other sequences may still use them. Takes also the number of its generated tokens, -1 if unknown. Blocks
            that are released singly (behind a window, by a rollback or a swap) have no such moment.
        enqueue: a named block has no reference any more, and no step in flight uses it. The policy links it into one of
            the two lists, never before a block without content, sets its ``QUEUE`` to ``FREE`` and adds one to
            ``NUM_FREE``; :func:`put_last` does all that. It may move other free cached blocks as well.
        note_claim: a cached block was taken out of its list because it is in use from now on. If it was spare,
            ``note_name`` came before; if it is hit, ``note_reuse`` follows.
        choose_victim: a block is needed, and all free blocks are cached. Takes the first block of the lists and returns
            the victim, which must be a free cached block; ``note_eviction`` of it follows.
        note_eviction: a cached block was taken out of its list to make room. It still has its name; ``note_drop``
            follows.
        note_drop: a block is about to lose its name, for any cause and in any place; its next content is different. If
            it is free and still among the cached blocks, the pool takes it out of them next.
    """

    expect: ExpectHook = field(default=nothing, repr=False)
    note_name: Hook = field(default=nothing, repr=False)
    note_reuse: Hook = field(default=nothing, repr=False)
    note_recomputed: Hook = field(default=nothing, repr=False)
    note_request: RequestHook = field(default=nothing, repr=False)
    enqueue: Hook = field(default=put_last, repr=False)
    note_claim: Hook = field(default=nothing, repr=False)
    choose_victim: Choice = field(default=_choose_first, repr=False)
    note_eviction: Hook = field(default=nothing, repr=False)
    note_drop: Hook = field(default=nothing, repr=False)


class PolicyState(NamedTuple):
    """The state of a policy for one pool: six arrays, each of a size that the policy sets, or empty.

    Args:
        counts: int64 ``[any]``, numbers of the whole pool; ``PoolArrays.eviction``.
        table: uint32 ``[any, any]``, a row for each block or for anything else; ``PoolArrays.eviction_table``.
        ranks: uint8 ``[any]``, a few bits for each block; ``PoolArrays.ranks``.
        blocks: int32 ``[any, any]``, numbers of each block; ``PoolArrays.eviction_blocks``.
        runs: int32 ``[any, any]``, numbers of blocks that were released together; ``PoolArrays.eviction_runs``.
        rates: float32 ``[any, any]``, learnt rates; ``PoolArrays.eviction_rates``.
    """

    counts: Int64Array
    table: Uint32Array
    ranks: Uint8Array
    blocks: Int32Array
    runs: Int32Array
    rates: Float32Array


def no_state(_num_blocks: int) -> PolicyState:
    """Make empty arrays."""
    return PolicyState(
        counts=np.zeros(0, np.int64),
        table=np.zeros((0, TABLE_FIELDS), np.uint32),
        ranks=np.zeros(0, np.uint8),
        blocks=np.zeros((0, 0), np.int32),
        runs=np.zeros((0, 0), np.int32),
        rates=np.zeros((0, 0), np.float32),
    )


def check_cold(where: str, _pool: PoolArrays, _cold: list[int], protected: list[int]) -> None:
    """Check that a policy without a protected list has no block in it."""
    assert not protected, f"{where}: a block is protected, though the policy protects none"


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """One policy.

    Args:
        name: as in ``SpaceConfig.eviction``.
        arrays: the array class of its pools: a ``FeaturedArrays`` whose attribute ``policy`` has its functions.
            ``FeaturedArrays`` itself is LRU.
        new_state: makes the state of an empty pool, given the number of its blocks; their ids begin with 1.
        check: checks its invariants.
    """

    name: str
    arrays: type[PoolArrays] = field(repr=False)
    new_state: Callable[[int], PolicyState] = field(default=no_state, repr=False)
    check: Check = field(default=check_cold, repr=False)


LRU: Final = EvictionPolicy("lru", FeaturedArrays)
"""The cached blocks in one list, by the time of their last release: a hit takes a block out, and its release puts it at
the back. It is prefix-closed, since a row that refers to a block refers to all blocks before it, and releases these
later."""
