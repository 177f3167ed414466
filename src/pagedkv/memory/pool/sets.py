"""The sets of code that pools run: the class of a pool's arrays says which, when a loop is compiled.

Two sets for a policy would be made of every loop that takes a pool; so there is one without any feature, for LRU, and
one with all of them for each policy. A space's pools have one class, since loops take pools of both sides.
"""

from pagedkv.memory.pool import cached_bounds
from pagedkv.memory.pool.blocks import PLAIN, PoolArrays, PoolFeatures
from pagedkv.memory.pool.empty_pool import new_pool_arrays
from pagedkv.memory.pool.event_log import new_log
from pagedkv.memory.pool.eviction.lru import LRU
from pagedkv.memory.pool.eviction.policy import EvictionPolicy
from pagedkv.memory.pool.ghosts import new_ghosts
from pagedkv.memory.pool.tenant_charges import new_accounts

__all__ = ["new_arrays"]


def new_arrays(
    policy: EvictionPolicy, num_blocks: int, block_size: int, *, caching: bool, features: PoolFeatures
) -> PoolArrays:
    """Make the arrays of an empty pool, of the class that says what it runs. O(blocks)."""
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
