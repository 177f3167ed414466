"""Which module writes each column of the records of blocks and rows.

A column of an array of records is ``array.COLUMN``. An array without entries for columns is written as a whole by one
module, or by the modules of one folder. All other modules call these. ``tests/test_owners.py`` compares this table with
every assignment in the sources, and docs/design.md prints it.
"""

from typing import Final

__all__ = ["OWNERS"]

OWNERS: Final = {
    # The record of a block: pagedkv.memory.pool.blocks has the layout.
    "records.QUEUE": "pool.block_record",
    "records.REF_COUNT": "pool.block_record",
    "records.HOLD_STEP": "pool.block_record",  # of a free leased block: RELEASED
    "records.PENDING_STEP": "pool.block_record",
    "records.LIFE": "pool.block_record",
    "records.NEXT": "pool.links",
    "records.PREVIOUS": "pool.links",
    "records.NAME": "pool.prefix_index",
    "records.BUCKET_NEXT": "pool.prefix_index",
    "records.PARENT": "pool.prefix_index",
    "records.PARENT_LIFE": "pool.prefix_index",
    "records.SUCCESSOR": "pool.prefix_index",
    "records.AHEAD": "pool.keep_reasons",  # of a block of a window group: KEPT
    "records.EXTRA": "pool.contents",
    "tokens": "pool.contents",
    "digests": "pool.contents",
    "parent_digests": "pool.contents",
    "buckets": "pool.prefix_index",
    "siblings": "pool.siblings",
    "event_log": "pool.event_log",
    "ghosts": "pool.ghosts",
    "epochs": "pool.epochs",
    "leases": "pool.lease_order",
    "lease_links": "pool.links",
    "bounds": "pool.cached_bounds",
    "tenants": "pool.tenant_charges",
    "eviction": "pool.eviction",
    "eviction_table": "pool.eviction",
    "eviction_blocks": "pool.eviction",
    "eviction_runs": "pool.eviction",
    "eviction_rates": "pool.eviction",
    "ranks": "pool.eviction",
    # The counts of a pool.
    "counts.NUM_FREE": "pool.block_record",
    "counts.NUM_CACHED": "pool.block_record",
    "counts.NUM_DEFERRED": "pool.block_record",
    "counts.NUM_NAMED": "pool.prefix_index",
    "counts.NUM_EVICTED": "pool.life_cycle",
    "counts.NUM_HIT_BLOCKS": "pool.life_cycle",
    "counts.NUM_ACQUIRED": "pool.life_cycle",
    "counts.NUM_EVENTS": "pool.event_log",
    "counts.OPEN_STEP": "pool.step_numbers",
    "counts.SETTLED_STEP": "pool.step_numbers",
    "counts.CLOCK_US": "pool.clock",
    "counts.HAS_CLOCK": "pool.clock",
    "counts.NUM_LEASED": "pool.leasing",
    "counts.NUM_RELEASED": "pool.lease_order",
    "counts.IN_ORDER": "pool.block_pool",
    "counts.IN_SETS": "pool.block_pool",
    # The record of a row: pagedkv.memory.tables.rows has the layout.
    "rows": "tables.row_record",
    "table": "tables.row_record",
}
