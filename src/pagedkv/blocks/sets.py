"""The code that a pool runs. The class of its arrays selects it when a loop is compiled.

Every loop that takes a pool is compiled once for each class. To keep these few, there is one class without features,
for LRU, and for each policy one with all features. All pools of a space have one class, since loops take pools of both
sides.
"""

from pagedkv.blocks import cached_bounds
from pagedkv.blocks.blocks import PLAIN, PoolArrays, PoolFeatures
from pagedkv.blocks.empty_pool import new_pool_arrays
from pagedkv.blocks.event_log import new_log
from pagedkv.blocks.eviction.lru import LRU
from pagedkv.blocks.eviction.policy import EvictionPolicy
from pagedkv.blocks.ghosts import new_ghosts
from pagedkv.blocks.tenant_charges import new_accounts

__all__ = ["new_arrays"]


def new_arrays(
    policy: EvictionPolicy, num_blocks: int, block_size: int, *, caching: bool, features: PoolFeatures
) -> PoolArrays:
    """Make the arrays of an empty pool, of the class that selects its code. O(blocks)."""
    state = policy.new_state(num_blocks - 1)
    arrays = new_pool_arrays(num_blocks, block_size, caching=caching, features=features)
    has_features = features._replace(num_in_sets=0) != PLAIN or policy is not LRU
    kind = policy.arrays if has_features else PoolArrays
    return kind._make(arrays)._replace(
        event_log=new_log(features.events),
        eviction=state.counts,
        eviction_table=state.table,
        ranks=state.ranks,
        eviction_blocks=state.blocks,
        eviction_runs=state.runs,
        eviction_rates=state.rates,
        ghosts=new_ghosts(features.ghosts if caching else 0),
        bounds=cached_bounds.new_bounds(num_blocks, dict(features.bounds)),
        tenants=new_accounts(num_blocks, features.limits),
    )
