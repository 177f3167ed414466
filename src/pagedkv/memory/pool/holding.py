"""References of readers outside the tables: taken and given back for many blocks at a time."""

from pagedkv.memory.compilation.compiled import compiled
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool.blocks import PoolArrays
from pagedkv.memory.pool.life_cycle import claim, release

__all__ = ["claim_all", "release_all"]

NO_STEP = 0  # a reader outside is no part of any step: what it has given back, no step touches for its sake


@compiled
def claim_all(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Take one more reference to each block. It is no hit: the eviction policy does not learn of it."""
    for block in block_ids:
        claim(pool, block)


@compiled
def release_all(pool: PoolArrays, block_ids: Int32Array) -> None:
    """Give one reference to each block back, the last block first, as of a sequence that is freed."""
    for place in range(len(block_ids) - 1, -1, -1):
        release(pool, block_ids[place], NO_STEP)
