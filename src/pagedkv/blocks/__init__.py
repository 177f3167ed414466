"""One pool: its blocks, the queue of free blocks, eviction, and names. This room does not handle sequences.

Reading order: ``record`` (the record of a block, and which code a pool runs), ``free_queue`` (the order in which free
blocks are allocated), ``prefix_index`` (names), ``life_cycle`` (when a block is allocated, shared, released, evicted;
it calls each feature where it acts). The features are ``eviction``, ``epochs``, ``event_log``, ``ghosts``,
``siblings``, ``cached_bounds``, tenants (``tenant_charges``) and leases (``leasing``, in the order of ``treap``);
``victims`` is where tenants and leases meet. Then come ``sweeps`` (over all blocks), ``block_pool`` (a pool as an
object), ``auditing`` (its invariants), and the computation of digests: ``sha256`` and ``digests``.

The names imported here are for rooms of other wings: a pool, its policies, and the matching of prompts in it. The room
``space`` builds on this one and imports its modules directly.
"""

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.eviction.policy import FETCHED_AHEAD, EvictionPolicy, expect, note_request
from pagedkv.blocks.eviction.registry import policy_named
from pagedkv.blocks.life_cycle import release, reuse
from pagedkv.blocks.record import NULL_BLOCK, PoolArrays, set_clock
from pagedkv.blocks.sweeps import add_to_path, find_child
from pagedkv.contract.arrays import DIGEST_WORDS

__all__ = [
    "DIGEST_WORDS",
    "FETCHED_AHEAD",
    "NULL_BLOCK",
    "BlockPool",
    "EvictionPolicy",
    "PoolArrays",
    "add_to_path",
    "expect",
    "find_child",
    "note_request",
    "policy_named",
    "release",
    "reuse",
    "set_clock",
]
