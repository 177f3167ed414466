"""The audits of a pool's features, each of the feature's own arrays."""

from collections.abc import Callable
from typing import Final

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import LIFE, NAME, NULL_BLOCK, PARENT, PARENT_LIFE
from pagedkv.blocks.cached_bounds import first_unbounded
from pagedkv.blocks.charge_audit import check_charges
from pagedkv.blocks.ghost_audit import check_ghosts
from pagedkv.blocks.lease_audit import check_leases
from pagedkv.blocks.siblings import first_unlinked

__all__ = ["FEATURE_AUDITS"]


def _check_siblings(pool: BlockPool) -> None:
    unlinked = first_unlinked(pool.arrays)
    assert unlinked == NULL_BLOCK, f"{pool.name}: block {unlinked} is not linked with its siblings"


def _check_bounds(pool: BlockPool) -> None:
    unbounded = first_unbounded(pool.arrays, np.zeros(len(pool.arrays.bounds), np.uint8))
    assert unbounded == NULL_BLOCK, f"{pool.name}: place {unbounded} is not where a bound on cached blocks has it"


def _check_parents(pool: BlockPool) -> None:
    arrays, records = pool.arrays, pool.arrays.records[: pool.num_blocks]
    if not len(arrays.parent_digests):
        return
    children = np.flatnonzero(records[:, NAME])
    parents = records[children, PARENT]
    is_there = (parents != NULL_BLOCK) & (records[parents, LIFE] == records[children, PARENT_LIFE])
    children, parents = children[is_there], parents[is_there]
    is_wrong = (arrays.parent_digests[children] != arrays.digests[parents]).any(axis=1)
    assert not is_wrong.any(), f"{pool.name}: block {children[is_wrong][0]} has the digest of another parent"


FEATURE_AUDITS: Final[tuple[Callable[[BlockPool], None], ...]] = (
    check_leases,
    check_charges,
    check_ghosts,
    _check_siblings,
    _check_bounds,
    _check_parents,
)
"""Each checks the invariants of a feature, and raises AssertionError. O(blocks)."""
