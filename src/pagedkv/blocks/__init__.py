"""One pool: its blocks, the queue of free blocks, eviction, and names. This room does not handle sequences.

Reading order: ``blocks`` (the record of a block); ``block_record``, ``links``, ``contents`` and ``keep_reasons``, which
write its columns and decide nothing; ``free_queue`` and ``spare_blocks`` (the order in which free blocks are
allocated); ``moments`` (the hooks of features); ``prefix_index`` (names); ``life_cycle`` (when a block is allocated,
shared, released, evicted). The features are ``eviction``, ``epochs``, ``event_log``, ``ghosts``, ``siblings``,
``cached_bounds``, tenants (``tenant_charges``) and leases (``lease_order``, ``leasing``). They are combined in
``features``, ``lease_victims``, ``tenant_victims`` and ``feature_audits``, and ``sets`` selects those of a pool. Then
come ``block_pool`` (a pool as an object), ``holding`` (references of external readers), ``paths`` (prompts without
rows), and the computation of digests: ``sha_instructions``, ``sha256``, ``digests``, ``extra_keys`` and ``block_keys``.

The names imported here are for rooms of other wings: a pool, its policies, and the matching of prompts in it. The rooms
``tables`` and ``space`` build on this one and import its modules directly.
"""

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.eviction.policy import EvictionPolicy
from pagedkv.blocks.eviction.registry import policy_named
from pagedkv.blocks.life_cycle import release, reuse
from pagedkv.blocks.moments import FETCHED_AHEAD, expect, note_request
from pagedkv.blocks.record import DIGEST_WORDS, NULL_BLOCK, PoolArrays, set_clock
from pagedkv.blocks.sweeps import add_to_path, find_child

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
