"""Branching: new rows that begin with a prefix of another row, across groups.

All is decided before anything changes: the longest prefix behind which the row still holds what the next position reads
(:func:`~pagedkv.tables.branching.longest_prefix`), and whether there are blocks to copy those inside which the
prefix ends. Only one row is branched off; further children are forks of it, which share these copies.
"""

import numpy as np

from pagedkv.blocks.block_record import set_pending_of
from pagedkv.blocks.blocks import PENDING_STEP
from pagedkv.contract.answers import PrefixGone, Shortage
from pagedkv.contract.arrays import Int32Array
from pagedkv.space.forking import fork, inherit
from pagedkv.space.pending import note_reliance
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.space.truncating import rewind_chains_of
from pagedkv.tables.branching import branch_row, longest_prefix
from pagedkv.tables.pending import dependency_start, lower_start
from pagedkv.tables.row_record import set_lengths
from pagedkv.tables.rows import (
    AT,
    LAST_STEP,
    NUM_ACCEPTED,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    blocks_for,
)

__all__ = ["branch"]


def branch(
    state: SpaceState, ledger: StepLedger, parent: int, num_children: int, length: int
) -> Int32Array | Shortage | PrefixGone:
    """Make new rows of the first ``length`` tokens of ``parent``, fewer than it has, or return why that is impossible.

    Raises:
        TooManySequencesError: there are fewer vacant rows.
    """
    state.require_vacant_rows(num_children)
    longest = _longest_prefix(state, parent, length)
    if longest < length:
        return PrefixGone(length, longest)
    needed = dict.fromkeys(state.pools, 0)
    for group in state.groups:
        needed[group.pool.name] += length % group.block_size > 0
    tenant = state.room.tenant_of(parent)
    shortage = state.room.find_shortage({tenant: needed})
    if shortage is not None:
        return shortage
    state.is_changing = True
    for feature in state.features:
        feature.taking(tenant)
    children = state.take_rows(1)
    _branch_off(state, ledger, parent, children, length)
    if num_children > 1:
        children = np.append(children, fork(state, ledger, int(children[0]), num_children - 1))
    state.is_changing = False
    return children


def _longest_prefix(state: SpaceState, row: int, most: int) -> int:
    """Return the longest prefix, of at most ``most`` tokens, from which another row can continue in every group."""
    inside, outside = _uncomputed_from(state, row)
    if state.is_recurrent:  # a state cannot be forked before it is computed
        most = min(most, inside, outside)
    if state.draft_tables and state.rows[row, NUM_PLANNED] > state.rows[row, NUM_ACCEPTED]:
        most = min(most, int(state.rows[row, NUM_ACCEPTED]))  # later states are draft states, which are not shared
    while True:
        longest = outside if outside < most <= inside else most  # as for rolling back: HIT_UNCOMPUTED
        for group in state.groups:
            longest = longest_prefix(group.arrays, state.rows, row, longest)
        if longest == most:
            return longest
        most = longest


def _uncomputed_from(state: SpaceState, row: int) -> tuple[int, int]:
    """Return the first position of a row that the open step computes, for this or another row; its length if none.

    The first number is for groups without starts of their own, the second for groups with them.
    """
    starts = [int(state.rows[row, NUM_PLANNED]), int(state.rows[row, NUM_TOKENS])]
    for group in state.groups:
        start = int(state.rows[row, group.planned])
        if state.relies_on[row] >= state.open_step:
            start = min(start, dependency_start(group.arrays, state.rows, row))
        starts[group.has_own_start] = min(starts[group.has_own_start], start)
    return starts[0], starts[1]


def _branch_off(state: SpaceState, ledger: StepLedger, parent: int, children: Int32Array, length: int) -> None:
    """Give one new row the prefix. It computes the tokens that its copies lack, which the open step computes."""
    rows, child = state.rows, int(children[0])
    set_lengths(rows, child, length, min(int(rows[parent, NUM_ACCEPTED]), length))
    inherit(state, parent, children)
    for observer in state.observers.forked:
        observer.forked(parent, children, length)
    state.num_known[child] = min(int(state.num_known[parent]), length)
    starts = [_copy_lacks_from(state, group, parent, length) for group in state.groups]
    copy = np.empty((1, 2), np.int32)
    for group in state.groups:
        table = group.arrays.table[parent, : blocks_for(length, group.block_size)]
        note_reliance(state, ledger, group, children, table)
    for group, start in zip(state.groups, starts, strict=True):
        if branch_row(*group.view, parent, child, length, copy):
            ledger.add_copies(group.pool.name, copy)
            if start == length:
                _leave_open_step(state, group, parent, int(copy[0, 1]))
    for group, start in zip(state.groups, starts, strict=True):
        lower_start(group.arrays, rows, child, start)
    for chains, lane in zip(state.chains, state.lanes, strict=True):
        digested = int(lane[0].arrays.parameters[AT]) + NUM_DIGESTED
        chains[child] = chains[parent]
        if state.config.prefix_caching and rows[child, digested] < rows[parent, digested]:
            rewind_chains_of(state, lane, chains, children.copy())


def _copy_lacks_from(state: SpaceState, group: Group, parent: int, length: int) -> int:
    """Return the first position below ``length`` that a copy made before the open step would lack; else ``length``."""
    index = length // group.block_size
    block = group.arrays.table[parent, index]
    if length % group.block_size == 0 or group.pool.arrays.records[block, PENDING_STEP] < state.open_step:
        return length
    rows, first = state.rows, index * group.block_size
    holds = (group.arrays.table[:, index] == block) & (rows[:, STATUS] == RUNNING) & (rows[:, NUM_TOKENS] > first)
    return min(length, max(first, int(rows[holds, group.planned].min())))


def _leave_open_step(state: SpaceState, group: Group, parent: int, own: int) -> None:
    """Note that the copy does not wait for the open step, which writes only behind the prefix."""
    records = group.pool.arrays.records
    if records[own, PENDING_STEP] == state.open_step:
        relied_on = int(state.relies_on[parent])
        last = max(int(state.rows[parent, LAST_STEP]), relied_on if relied_on < state.open_step else 0)
        set_pending_of(records, own, last)
