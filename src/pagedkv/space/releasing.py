"""Freeing sequences, and emptying the whole prefix cache."""

from typing import Final, NamedTuple

import numpy as np

from pagedkv.blocks.blocks import NULL_BLOCK
from pagedkv.blocks.causes import EPOCH, RESET
from pagedkv.blocks.spare_blocks import make_unheld_spare
from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import ConfigurationError
from pagedkv.space.clock import as_lease_end, require_leases
from pagedkv.space.hits import PrefixHit
from pagedkv.space.loading import freeze_loads
from pagedkv.space.pending import hand_over
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.tables.releasing import NO_OUTPUTS
from pagedkv.tables.row_record import freeze
from pagedkv.tables.rows import LOST_ON_HOST, STATUS, SWAPPED, VACANT

__all__ = ["Leaving", "as_leaving", "blocks_of", "free", "reset_prefix_cache", "supersede"]


class Leaving(NamedTuple):
    """Options for rows that are freed.

    Args:
        num_outputs: int32 ``[rows]``, the tokens that each has generated, or empty if unknown.
        goes_first: whether cached blocks that no other row holds are evicted before all others.
        goes_last: whether what they leave is evicted after all other unleased blocks.
        keep_until_s: until when a lease keeps what they leave; None for no lease.
    """

    num_outputs: Int32Array = NO_OUTPUTS
    goes_first: bool = False
    goes_last: bool = False
    keep_until_s: float | None = None


NOTHING_WANTED: Final = Leaving()


def as_leaving(state: SpaceState, superseded_by: object, keep_until_s: object, priority: object) -> Leaving:
    """Check the arguments about what ended sequences leave.

    Raises:
        ConfigurationError: more than one of them is given, or an impossible one.
    """
    if superseded_by is None and keep_until_s is None and type(priority) is int and priority == 0:
        return NOTHING_WANTED
    retention = as_count(priority, "priority", least=-1, most=1)
    if (superseded_by is not None) + (keep_until_s is not None) + (retention != 0) > 1:
        raise ConfigurationError("superseded_by, keep_until_s and priority exclude each other: give one")
    if retention == 1:
        require_leases(state)
    end = None if keep_until_s is None else as_lease_end(state, keep_until_s)
    return Leaving(NO_OUTPUTS, superseded_by is not None or retention < 0, retention == 1, end)


def free(state: SpaceState, batch: Int32Array, mark: int, leaving: Leaving) -> None:
    """Free the rows of a checked batch and release all their blocks, in the batch's order."""
    rows = state.rows
    state.is_changing = True
    for observer in state.observers.leaving:
        observer.leaving(batch)
    num_unplanned, num_on_host = state.loops.count_leaving(rows, batch, state.row_scratch)
    for row in state.row_scratch[:num_unplanned].tolist():
        hand_over(state, row, mark)
    on_device, on_host, outputs = batch, batch[:0], leaving.num_outputs
    if num_on_host:
        is_there = (rows[batch, STATUS] == SWAPPED) | (rows[batch, STATUS] == LOST_ON_HOST)
        on_device, on_host = batch[~is_there], batch[is_there]
        outputs = outputs[~is_there] if len(outputs) else NO_OUTPUTS
    for feature in state.features:
        feature.leaving(on_device)
    for feature in state.features:
        feature.freeing(batch, leaving)
    left = [(group, blocks_of(group, on_device)) for group in state.groups if leaving.goes_first]
    for group in state.groups:
        state.loops.release_rows(*group.view, on_device, outputs)
        if group.host_pool is not None and num_on_host:
            state.loops.release_rows(group.host_pool.arrays, group.arrays, rows, on_host, NO_OUTPUTS)
    for group, blocks in left:
        make_unheld_spare(group.pool.arrays, blocks)
    state.vacate(batch)
    for observer in state.observers.freed:
        observer.freed(batch)
    state.is_changing = False


def blocks_of(group: Group, batch: Int32Array) -> Int32Array:
    """Return the blocks of rows in a group, with repeats, the tail of all sequences first: int32 ``[any]``."""
    entries = group.arrays.table[batch].T[::-1].ravel()
    blocks: Int32Array = entries[entries != NULL_BLOCK]
    return blocks


def supersede(state: SpaceState, hit: PrefixHit) -> None:
    """Evict the unreferenced and unleased blocks of a hit before all other cached blocks, the tail first."""
    state.is_changing = True
    for group in state.cached_groups:
        tails = [tail.block for tail in hit.tails if tail.group == group.index]
        blocks = np.append(hit.block_ids[group.index], np.array(tails, np.int32))[::-1]
        make_unheld_spare(group.pool.arrays, blocks[blocks != NULL_BLOCK].astype(np.int32))
    state.is_changing = False


def reset_prefix_cache(state: SpaceState, ledger: StepLedger, weights_epoch: str | None = None) -> None:
    """Empty the prefix index; running sequences keep their blocks but publish nothing from now on.

    Their content was computed before the reset (with the old weights, if these change), so no later sequence may hit
    it. ``weights_epoch``: the version of the weights from now on, if these change.
    """
    state.is_changing = True
    for pool in state.all_pools:
        pool.clear_names(RESET if weights_epoch is None else EPOCH)
    freeze(state.rows, state.rows[:, STATUS] != VACANT)
    ledger.forget_duplicates()
    freeze_loads(state)
    if weights_epoch is not None:
        state.begin_epoch(weights_epoch)
    state.is_changing = False
