"""What an eviction policy is: what it does at some moments of a block's life, and the arrays that it does it with.

Everything else (counts, names, references, when a block is free) is the pool's, and the same for all policies. The next
block to be handed out is the first of the cold list, and only when that is empty the first of the protected list. A
policy decides where in the two a cached block stands, or names the victim itself (``choose_victim``)::

    cold:       without content, newest freed first | cached blocks, the next to be evicted first
    protected:                                        cached blocks, the next to be evicted first

The moments, as the pool tells them:

note_name
    The content of a block in use got a name: it was computed, and may be hit from now on. Its digest and what it
    continues (``PARENT``, ``PARENT_LIFE``) are written.
expect
    Content is about to be named, ``FETCHED_AHEAD`` blocks of its sequence from now: given the first word of its digest.
    A hint, so that the policy's memory is on its way by then: it may come more than once, and never.
note_reuse
    A named block was hit. It is in use now, and in no list.
note_recomputed
    Content was computed once more although this named block has it, since it could not be hit: something else was
    missing that a hit takes, what it continues or another group's blocks. Whoever computed it uses this block now.
enqueue
    Nobody uses a named block any more, nor does a step in flight. The policy links it into one of the two lists, never
    before a block without content, sets its ``QUEUE`` to ``FREE`` and adds one to ``NUM_FREE``: :func:`put_last` does
    all that. It may move other free cached blocks as well.
note_eviction
    A cached block was taken out of its list to make room. Its name is still there; ``note_drop`` follows.
note_drop
    A block is about to lose its name, for whatever reason and wherever it is: what it holds next is other content. If
    it is free, the pool takes it from among the cached blocks next, unless it has.
note_claim
    A cached block was taken out of its list because somebody uses it from now on. If it was spare, ``note_name`` came
    before; if it is hit, ``note_reuse`` follows.
note_request
    A sequence ends: its blocks (ids, head first, null blocks among them) are about to be given back, which may leave
    them in use by others. Told also how many tokens it had generated, -1 if nobody knows. What blocks are given back
    for by themselves (behind a window, by a rollback or a swap) has no such moment.
choose_victim
    A block is wanted, and all free blocks are cached. Given the first in the lists; returns which one is to go. It must
    be a free cached block, and ``note_eviction`` of it follows.

So a block's name begins with ``note_name`` and ends with ``note_drop``. Between the two are hits and releases, in any
order that makes sense: a hit on a block in use has no ``enqueue`` before it.

A policy is *prefix-closed* if it evicts no block while one that continues it is cached: what continues a block that is
gone cannot be hit. Of one sequence the tail is released before the head, so whoever keeps the order of release is.
A policy that is not never causes a wrong hit (links to a block die with its content); blocks that nobody can reach take
up room until it is their turn.

Policies that look at time find the caller's clock in ``CLOCK_US`` (:meth:`~pagedkv.BlockSpace.advance`), if
``HAS_CLOCK``.

Hooks are compiled loops, inlined into whoever calls them; what is long and rare in one is a compiled loop of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from pagedkv.arrays import Float32Array, Int32Array, Int64Array, Uint8Array, Uint32Array
from pagedkv.compilation.compiled import inlined
from pagedkv.pool.blocks import PoolArrays
from pagedkv.pool.free_queue import append

__all__ = [
    "FETCHED_AHEAD",
    "TABLE_FIELDS",
    "Check",
    "Choice",
    "EvictionPolicy",
    "ExpectHook",
    "Hook",
    "PolicyState",
    "RequestHook",
    "check_cold",
    "choose_first",
    "do_nothing",
    "ignore_request",
    "no_state",
    "put_last",
]

TABLE_FIELDS: Final = 2
FETCHED_AHEAD: Final = 4  # blocks: enough for memory to come, few enough to be on its way at once

Hook: TypeAlias = Callable[[PoolArrays, int], None]
"""What is done with a pool and one of its blocks."""

ExpectHook: TypeAlias = Callable[[PoolArrays, int], None]
"""What is done with a pool and the first word of a digest."""

RequestHook: TypeAlias = Callable[[PoolArrays, Int32Array, int], None]
"""What is done with a pool, the blocks of one sequence (int32 ``[any]``, head first), and its number of outputs."""

Choice: TypeAlias = Callable[[PoolArrays, int], int]
"""Which block of a pool is evicted, given the first of the lists."""

Check: TypeAlias = Callable[[str, PoolArrays, list[int], list[int]], None]
"""Proves what a policy promises: given what to call the pool, the pool, and the cold and the protected list from the
front. Raises AssertionError. For ``BlockSpace.check()``."""


class PolicyState(NamedTuple):
    """What a policy keeps for a pool: six arrays, each as long as the policy wants it, or empty.

    Args:
        counts: int64 ``[any]``, numbers of the whole pool; ``PoolArrays.eviction``.
        table: uint32 ``[any, any]``, a row for a block or for whatever else; ``PoolArrays.eviction_table``.
        ranks: uint8 ``[any]``, a few bits for a block; ``PoolArrays.ranks``.
        blocks: int32 ``[any, any]``, numbers of a block; ``PoolArrays.eviction_blocks``.
        runs: int32 ``[any, any]``, numbers of blocks that were released together; ``PoolArrays.eviction_runs``.
        rates: float32 ``[any, any]``, what was learnt; ``PoolArrays.eviction_rates``.
    """

    counts: Int64Array
    table: Uint32Array
    ranks: Uint8Array
    blocks: Int32Array
    runs: Int32Array
    rates: Float32Array


def no_state(_num_blocks: int) -> PolicyState:
    """Make no state."""
    return PolicyState(
        counts=np.zeros(0, np.int64),
        table=np.zeros((0, TABLE_FIELDS), np.uint32),
        ranks=np.zeros(0, np.uint8),
        blocks=np.zeros((0, 0), np.int32),
        runs=np.zeros((0, 0), np.int32),
        rates=np.zeros((0, 0), np.float32),
    )


@inlined
def do_nothing(_pool: PoolArrays, _block: int) -> None:
    """Do nothing."""


@inlined
def ignore_request(_pool: PoolArrays, _blocks: Int32Array, _num_outputs: int) -> None:
    """Do nothing."""


@inlined
def choose_first(_pool: PoolArrays, first: int) -> int:
    """Choose the first of the lists."""
    return first


@inlined
def put_last(pool: PoolArrays, block: int) -> None:
    """Put a block that nobody uses at the back of the cold list."""
    append(pool.records, pool.counts, block)


def check_cold(where: str, _pool: PoolArrays, _cold: list[int], protected: list[int]) -> None:
    """Prove that a policy without a protected list has nothing there."""
    assert not protected, f"{where}: a block is protected, though the policy protects none"


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """One policy. What is not given is LRU's: no state, nothing to note, and released blocks to the back.

    Args:
        name: as in ``SpaceConfig.eviction``.
        arrays: the class of the arrays of pools that evict so, by which loops know the policy when they are compiled: a
            ``PoolArrays`` of its own.
        new_state: makes the state of an empty pool of so many blocks, whose ids begin with 1.
        note_name, expect, note_reuse, note_recomputed, enqueue, note_eviction, note_drop, note_claim, note_request,
            choose_victim: what it does when; see the module.
        check: proves what it promises.
    """

    name: str
    arrays: type[PoolArrays] = field(repr=False)
    new_state: Callable[[int], PolicyState] = field(default=no_state, repr=False)
    note_name: Hook = field(default=do_nothing, repr=False)
    expect: ExpectHook = field(default=do_nothing, repr=False)
    note_reuse: Hook = field(default=do_nothing, repr=False)
    note_recomputed: Hook = field(default=do_nothing, repr=False)
    enqueue: Hook = field(default=put_last, repr=False)
    note_eviction: Hook = field(default=do_nothing, repr=False)
    note_drop: Hook = field(default=do_nothing, repr=False)
    note_claim: Hook = field(default=do_nothing, repr=False)
    note_request: RequestHook = field(default=ignore_request, repr=False)
    choose_victim: Choice = field(default=choose_first, repr=False)
    check: Check = field(default=check_cold, repr=False)
