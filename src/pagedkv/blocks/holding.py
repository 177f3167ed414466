"""References of external readers, taken and released for many blocks at a time."""

from pagedkv.blocks.blocks import PoolArrays
from pagedkv.blocks.life_cycle import claim, release
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array

__all__ = ["claim_all", "release_all"]

NO_STEP = 0  # an external reader is part of no step, so a block that it releases waits for none on its account


@compiled
def claim_all(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Take one more reference to each block. It is not a hit, so the eviction policy is not notified."""
    for block in block_ids:
        claim(pool, block)


@compiled
def release_all(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Release one reference to each block, the last block first, as for a freed sequence."""
    for place in range(len(block_ids) - 1, -1, -1):
        release(pool, block_ids[place], NO_STEP)
