"""Giving names to what rows complete, across groups: extra keys, digests once a lane, then publication."""

from typing import Final

import numpy as np

from pagedkv.core.blocks import EXTRA, LIFE, NULL_BLOCK, Int32Array
from pagedkv.core.digests import copy_new_digests
from pagedkv.core.publishing import DUPLICATE_FIELDS
from pagedkv.core.rows import AT, NUM_BLOCKS, NUM_DIGESTED, SERIAL
from pagedkv.keys import RequestKeys
from pagedkv.space.prompts import extra_key_of
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import Duplicate, StepLedger

__all__ = ["publish", "tag_blocks"]

MOST_DUPLICATES: Final = 1024  # of one step; the rest are merely not merged


def publish(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Digest and publish every full block of accepted tokens that these rows have completed."""
    if not state.config.prefix_caching:
        return
    for chains, lane in zip(state.chains, state.lanes, strict=True):
        first = lane[0]
        state.loops.digest_new_blocks(
            first.pool.arrays, first.arrays, state.rows, batch, chains, state.extra_keys.arrays
        )
        for group in lane[1:]:
            copy_new_digests(first.pool.arrays, first.arrays, group.pool.arrays, group.arrays, state.rows, batch)
    for group in state.groups:
        found = np.empty((MOST_DUPLICATES, DUPLICATE_FIELDS), np.int32)
        num_found = state.loops.publish_new_blocks(group.pool.arrays, group.arrays, state.rows, batch, found)
        for row, index, block, carrier in found[:num_found].tolist():
            lives = group.pool.arrays.records[[block, carrier], LIFE].tolist()
            serial = int(state.rows[row, SERIAL])
            duplicate = Duplicate(group.index, row, serial, index, block, lives[0], carrier, lives[1])
            if len(ledger.duplicates) < MOST_DUPLICATES:
                ledger.duplicates.append(duplicate)


def tag_blocks(state: SpaceState, row: int, keys: RequestKeys) -> None:
    """Note the extra keys of a row's blocks that are not digested yet."""
    _sweep_keys(state)
    for group in state.groups:
        records = group.pool.arrays.records
        at = int(group.arrays.parameters[AT])
        first, stop = int(state.rows[row, at + NUM_DIGESTED]), int(state.rows[row, at + NUM_BLOCKS])
        reach = max(1, keys.media_reach)
        for index in range(first, min(stop, -(-reach // group.block_size))):
            block = int(group.arrays.table[row, index])
            if block != NULL_BLOCK:
                key = extra_key_of(keys, state.weights_epoch, group.block_size, index)
                records[block, EXTRA] = state.extra_keys.intern(key)


def _sweep_keys(state: SpaceState) -> None:
    """Forget the extra keys that no block carries any more, once there are many."""
    if len(state.extra_keys) < state.keys_before_sweep:
        return
    used = {int(key) for pool in state.all_pools for key in np.unique(pool.arrays.records[:, EXTRA])}
    state.extra_keys.retain(used)
    state.keys_before_sweep = max(state.keys_before_sweep, 2 * len(state.extra_keys))
