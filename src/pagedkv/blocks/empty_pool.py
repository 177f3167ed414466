"""The arrays of an empty pool: no block is in use or cached."""

import numpy as np

from pagedkv.blocks.block_record import all_free
from pagedkv.blocks.blocks import (
    DIGEST_WORDS,
    EVENT_FIELDS,
    NUM_COUNTS,
    NUM_FIELDS,
    NUM_SENTINELS,
    PLAIN,
    TENANT_FIELDS,
    PoolArrays,
    PoolFeatures,
    aligned_zeros,
)
from pagedkv.blocks.links import link_all
from pagedkv.blocks.step_numbers import begin_numbers

__all__ = ["new_pool_arrays"]


def new_pool_arrays(num_blocks: int, block_size: int, *, caching: bool, features: PoolFeatures = PLAIN) -> PoolArrays:
    """Make the arrays of an empty pool, with every block except the null block in the free queue.

    Cost: O(num_blocks); memory pages of ``tokens`` and ``digests`` are not touched before their first use.
    """
    arrays = PoolArrays(
        records=np.zeros((num_blocks + NUM_SENTINELS, NUM_FIELDS), np.int32),
        tokens=aligned_zeros(num_blocks, block_size if caching else 0),
        digests=np.zeros((num_blocks if caching else 0, DIGEST_WORDS), np.uint32),
        parent_digests=np.zeros((num_blocks if caching and features.keeps_parents else 0, DIGEST_WORDS), np.uint32),
        buckets=np.zeros(1 << (num_blocks * 3 // 4).bit_length() if caching else 1, np.int32),
        counts=np.zeros(NUM_COUNTS, np.int64),
        event_log=np.zeros((0, EVENT_FIELDS), np.uint32),
        eviction=np.zeros(0, np.int64),
        eviction_table=np.zeros((0, 2), np.uint32),
        ranks=np.zeros(0, np.uint8),
        eviction_blocks=np.zeros((0, 0), np.int32),
        eviction_runs=np.zeros((0, 0), np.int32),
        eviction_rates=np.zeros((0, 0), np.float32),
        ghosts=np.zeros((0, 16), np.uint32),
        epochs=np.zeros((num_blocks if features.epochs else 0, 2), np.int32),
        leases=np.zeros(num_blocks if features.leases else 0, np.float64),
        lease_links=np.zeros((num_blocks if features.leases else 0, 2), np.int32),
        siblings=np.zeros((num_blocks if features.siblings else 0, 2), np.int32),
        bounds=np.zeros((0, 4), np.int32),
        tenants=np.zeros((0, TENANT_FIELDS), np.int32),
    )
    all_free(arrays.records, arrays.counts, num_blocks)
    link_all(arrays.records)
    begin_numbers(arrays.counts)
    return arrays
