"""Publishing blocks that rows complete, across groups: extra keys, digests once a lane, then the prefix index.

A block is *named* while it is in the prefix index, under its group and its digest.
"""

import numpy as np

from pagedkv.blocks.block_keys import keys_of_blocks
from pagedkv.blocks.blocks import EXTRA, NAME, NULL_BLOCK
from pagedkv.blocks.contents import set_extras
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.tables.digesting import copy_new_digests
from pagedkv.tables.publishing import NUM_DUPLICATE_FIELDS
from pagedkv.tables.row_record import set_accepted_of
from pagedkv.tables.rows import AT, NUM_ACCEPTED, NUM_BLOCKS, NUM_DIGESTED

__all__ = ["limit_publishing", "publish", "tag", "tag_blocks"]


def publish(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    """Digest and publish every full block of accepted tokens that these rows have completed, within their limits."""
    if not state.config.prefix_caching:
        return
    if not state.limits_publishing:
        _publish(state, ledger, batch)
        return
    accepted = state.rows[batch, NUM_ACCEPTED]
    set_accepted_of(state.rows, batch, np.minimum(accepted, state.publish_limits[batch]))
    _publish(state, ledger, batch)
    set_accepted_of(state.rows, batch, accepted)


def limit_publishing(state: SpaceState, row: int, num_tokens: int) -> None:
    """Limit what a row publishes to its first tokens."""
    state.limits_publishing = True
    state.publish_limits[row] = num_tokens


def _publish(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> None:
    for chains, lane in zip(state.chains, state.lanes, strict=True):
        first = lane[0]
        state.loops.digest_new_blocks(*first.view, batch, chains, state.extra_keys.arrays)
        for group in lane[1:]:
            copy_new_digests(first.pool.arrays, first.arrays, *group.view, batch)
    for group in state.cached_groups:
        for feature in state.features:
            feature.publishing(group, batch)
        num_blocks = state.loops.count_unpublished(group.arrays, state.rows, batch)
        found = np.empty((num_blocks, NUM_DUPLICATE_FIELDS), np.int32)
        num_found = state.loops.publish_new_blocks(*group.view, batch, found)
        if num_found:
            ledger.duplicates[group.index].append(found[:num_found])


def tag_blocks(state: SpaceState, row: int, keys: RequestKeys) -> None:
    """Set the extra keys of a row's blocks that are not digested yet."""
    _sweep_keys(state)
    for group in state.cached_groups:
        at = int(group.arrays.parameters[AT])
        first, stop = int(state.rows[row, at + NUM_DIGESTED]), int(state.rows[row, at + NUM_BLOCKS])
        encodings = keys_of_blocks(keys, state.identity_epoch, group.block_size, first, stop)
        if encodings:
            tag(state, group, group.arrays.table[row, first:stop], first, encodings)


def tag(state: SpaceState, group: Group, blocks: Int32Array, first: int, encodings: dict[int, bytes]) -> None:
    """Set the extra keys of unnamed blocks, the first of which is logical block ``first``."""
    places = [index for index in encodings if index >= first]
    named = blocks[np.array(places, np.intp) - first]
    ids = np.array(state.extra_keys.intern_all([encodings[index] for index in places]), np.int32)
    is_new = (named != NULL_BLOCK) & (group.pool.arrays.records[named, NAME] == 0)  # else it is a kept state
    set_extras(group.pool.arrays, named[is_new], ids[is_new])


def _sweep_keys(state: SpaceState) -> None:
    """Forget the extra keys that no block carries any more, once there are many."""
    if len(state.extra_keys) < state.keys_before_sweep:
        return
    is_used = np.zeros(state.extra_keys.num_ids, np.bool_)
    for pool in state.all_pools:
        is_used[pool.arrays.records[:, EXTRA]] = True
    used = np.flatnonzero(is_used).tolist()
    state.extra_keys.retain(used)
    state.keys_before_sweep = max(state.keys_before_sweep, 2 * len(state.extra_keys))
