"""The audits of a pool's features, each of the feature's own arrays."""

from collections.abc import Callable
from typing import Final

import numpy as np

from pagedkv.memory.pool.block_pool import BlockPool
from pagedkv.memory.pool.blocks import NULL_BLOCK
from pagedkv.memory.pool.cached_bounds import first_unbounded
from pagedkv.memory.pool.charge_audit import check_charges
from pagedkv.memory.pool.ghost_audit import check_ghosts
from pagedkv.memory.pool.lease_audit import check_leases
from pagedkv.memory.pool.siblings import first_unlinked

__all__ = ["FEATURE_AUDITS"]


def _check_siblings(pool: BlockPool) -> None:
    unlinked = first_unlinked(pool.arrays)
    assert unlinked == NULL_BLOCK, f"{pool.name}: block {unlinked} is not linked with its siblings"


def _check_bounds(pool: BlockPool) -> None:
    unbounded = first_unbounded(pool.arrays, np.zeros(len(pool.arrays.bounds), np.uint8))
    assert unbounded == NULL_BLOCK, f"{pool.name}: place {unbounded} is not where a bound on cached blocks has it"


FEATURE_AUDITS: Final[tuple[Callable[[BlockPool], None], ...]] = (
    check_leases,
    check_charges,
    check_ghosts,
    _check_siblings,
    _check_bounds,
)
"""Each checks the invariants of a feature, and raises AssertionError. O(blocks)."""
