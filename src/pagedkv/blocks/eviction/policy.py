"""The parts of an eviction policy: its functions at the moments of a block's life, and its arrays.

All other state (counts, names, references, places) belongs to the pool and is the same for all policies. The
preconditions of each moment are in :mod:`pagedkv.blocks.eviction.moments`.

A policy is *prefix-closed* if it never evicts a block while a child of it is cached, since a block without its prefix
cannot be hit. The tail of a sequence is released before the head, so a policy that keeps the order of release is
prefix-closed. Other policies never cause a wrong hit (links to a block become invalid with its content), but
unreachable blocks occupy memory until they are evicted.

Policies that depend on time read the caller's clock in ``CLOCK_US`` (:meth:`~pagedkv.BlockSpace.advance`) if
``HAS_CLOCK`` is set.

The functions of a policy are compiled and inlined into their callers. Long code that rarely runs should be a compiled
function of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from pagedkv.blocks.record import PoolArrays
from pagedkv.contract.arrays import Float32Array, Int32Array, Int64Array, Uint8Array, Uint32Array

__all__ = ["TABLE_FIELDS", "Check", "EvictionPolicy", "PolicyState", "check_cold", "no_state"]

TABLE_FIELDS: Final = 2

Check: TypeAlias = Callable[[str, PoolArrays, list[int], list[int]], None]
"""Checks a policy's invariants, given the pool's name, the pool, and the cold and the protected list from the front.
Raises AssertionError. For ``BlockSpace.check()``."""


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
        arrays: the array class of its pools: a ``FeaturedArrays`` whose attribute ``policy`` has the policy's hooks.
            ``FeaturedArrays`` itself is LRU.
        new_state: makes the state of an empty pool, given the number of its blocks; their ids begin with 1.
        check: checks its invariants.
    """

    name: str
    arrays: type[PoolArrays] = field(repr=False)
    new_state: Callable[[int], PolicyState] = field(default=no_state, repr=False)
    check: Check = field(default=check_cold, repr=False)
