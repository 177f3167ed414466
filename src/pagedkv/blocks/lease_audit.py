"""The audit of leases: every leased block is named, and every free one is at its place in the order of leases."""

from typing import Final

import numpy as np

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.blocks import (
    FREE,
    KEPT,
    NAME,
    NULL_BLOCK,
    NUM_LEASED,
    OPEN_STEP,
    PENDING_STEP,
    QUEUE,
    SPARE,
    PoolArrays,
)
from pagedkv.blocks.free_queue import free_leased
from pagedkv.blocks.lease_order import first_misplaced
from pagedkv.blocks.leasing import is_leased
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array

__all__ = ["check_leases"]

FAULTS: Final = (
    "",
    "a block without a lease waits among leased ones",
    "a leased block waits elsewhere, or has no name",
    "a cached block is computed by no step",
)
NONE, NOT_LEASED, LEASED_ELSEWHERE, PENDING_IN_NO_STEP = range(len(FAULTS))


def check_leases(pool: BlockPool) -> None:
    """Check the leases. Raises AssertionError with the first contradiction. O(blocks)."""
    misplaced = first_misplaced(pool.arrays)
    assert misplaced == NULL_BLOCK, f"{pool.name}: leased block {misplaced} is not where the order of leases has it"
    fault = _leased_fault(pool.arrays, np.flatnonzero(free_leased(pool.arrays)).astype(np.int32))
    assert fault == NONE, f"{pool.name}: {FAULTS[fault]}"


@compiled
def _leased_fault(pool: PoolArrays, leased: Int32Array) -> int:
    """Check that the free leased blocks are exactly those counted and listed, and that every leased block is named."""
    records = pool.records
    for block in leased:
        if records[block, QUEUE] != FREE or not is_leased(pool, block) or records[block, KEPT] == SPARE:
            return NOT_LEASED
        if records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
            return PENDING_IN_NO_STEP
    num_leased = 0
    for block in range(1, len(pool.leases)):
        if is_leased(pool, block):
            num_leased += records[block, QUEUE] == FREE
            if not records[block, NAME]:
                return LEASED_ELSEWHERE
    is_counted = num_leased == len(leased) and num_leased == pool.counts[NUM_LEASED]
    return NONE if is_counted else LEASED_ELSEWHERE
