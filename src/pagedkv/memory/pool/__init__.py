"""The floor of one pool: its blocks, the queue of free ones, eviction, and names. It knows no sequences.

Reading order: ``blocks`` (what is known of a block); ``block_record``, ``links``, ``contents`` and ``keep_reasons``,
which write some of that and decide nothing; ``free_queue`` and ``spare_blocks`` (in which order content goes);
``moments`` (at which what stands beside the core may act); ``prefix_index`` (names); ``life_cycle`` (when a block is
taken, shared, released, evicted). Beside these the features: ``eviction``, ``epochs``, ``event_log``, ``ghosts``,
``siblings``, ``cached_bounds``, tenants (``tenant_charges``) and leases (``lease_order``, ``leasing``); they meet in
``features``, ``lease_victims``, ``tenant_victims`` and ``feature_audits``, and ``sets`` says what a pool runs. Then
``block_pool`` (a pool as an object), ``holding`` (readers outside), ``paths`` (prompts without rows), and what a name
is made of: ``sha_instructions``, ``sha256``, ``digests``, ``extra_keys`` and ``block_keys``.

What is named here is for rooms of other wings: a pool, its policies, and how prompts are followed in it. ``tables`` and
``space`` stand on this floor, and use its modules as they are.
"""

from pagedkv.memory.pool.block_pool import BlockPool
from pagedkv.memory.pool.blocks import DIGEST_WORDS, NULL_BLOCK, PoolArrays
from pagedkv.memory.pool.clock import set_clock
from pagedkv.memory.pool.eviction.policy import EvictionPolicy
from pagedkv.memory.pool.eviction.registry import policy_named
from pagedkv.memory.pool.life_cycle import release, reuse
from pagedkv.memory.pool.moments import FETCHED_AHEAD, expect, note_request
from pagedkv.memory.pool.paths import add_to_path, find_child

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
