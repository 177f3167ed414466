"""What an eviction policy is: what it does at the moments of a block's life, and the arrays that it does it with.

Everything else (counts, names, references, when a block is free) is the pool's, and the same for all policies.
:mod:`pagedkv.memory.pool.eviction.moments` says what each moment may presume.

A policy is *prefix-closed* if it evicts no block while one that continues it is cached: what continues a block that is
gone cannot be hit. Of one sequence the tail is released before the head, so whoever keeps the order of release is.
A policy that is not never causes a wrong hit (links to a block die with its content); blocks that nobody can reach take
up room until it is their turn.

Policies that look at time find the caller's clock in ``CLOCK_US`` (:meth:`~pagedkv.BlockSpace.advance`), if
``HAS_CLOCK``.

What a policy does at its moments are compiled loops, inlined into whatever calls them; what is long and rare in one is
a compiled loop of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from pagedkv.memory.contract.arrays import Float32Array, Int32Array, Int64Array, Uint8Array, Uint32Array
from pagedkv.memory.pool.blocks import PoolArrays

__all__ = ["TABLE_FIELDS", "Check", "EvictionPolicy", "PolicyState", "check_cold", "no_state"]

TABLE_FIELDS: Final = 2

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


def check_cold(where: str, _pool: PoolArrays, _cold: list[int], protected: list[int]) -> None:
    """Prove that a policy without a protected list has nothing there."""
    assert not protected, f"{where}: a block is protected, though the policy protects none"


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """One policy.

    Args:
        name: as in ``SpaceConfig.eviction``.
        arrays: the class of the arrays of pools that evict so: a ``FeaturedArrays`` of its own, whose ``policy`` says
            what is done when. ``FeaturedArrays`` itself does what LRU does.
        new_state: makes the state of an empty pool of so many blocks, whose ids begin with 1.
        check: proves what it promises.
    """

    name: str
    arrays: type[PoolArrays] = field(repr=False)
    new_state: Callable[[int], PolicyState] = field(default=no_state, repr=False)
    check: Check = field(default=check_cold, repr=False)
