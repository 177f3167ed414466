"""Forking and branching: new rows that share every block of another row, or begin with a prefix of it.

A *branch* begins with a prefix of another row, across groups. All is decided before anything changes: the longest
prefix behind which the row still holds what the next position reads (:func:`~pagedkv.space.forking.longest_prefix`),
and whether there are blocks to copy those inside which the prefix ends. Only one row is branched off; further children
are forks of it, which share these copies.

Full blocks are shared. The block in which the prefix ends is copied at once, not at the first write: the other row has
more tokens in it, perhaps under a name, whereas rows that share a partly filled block otherwise have the same tokens in
it::

    parent   [ 7 ][ 4 ][ 9: a b c d ][ 5: ...
    child    [ 7 ][ 4 ][ 3: a b     ]            two tokens of the third block: block 3 becomes a copy of block 9
"""

import numpy as np

from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import NULL_BLOCK, PENDING_STEP, REF_COUNT, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import PrefixGone, Shortage
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import SequenceError
from pagedkv.space.drafting import require_forkable
from pagedkv.space.growing import copy_block, dependency_start, lower_start, note_reliance
from pagedkv.space.publishing import rewind_tail
from pagedkv.space.replaying import begin_together
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    CACHING,
    FIRST_BLOCK,
    FROZEN,
    LAST_STEP,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_POSITIONS,
    NUM_PUBLISHED,
    NUM_TOKENS,
    PLANNED,
    RUNNING,
    STATUS,
    SURE,
    TAIL,
    TAIL_LIFE,
    TENANT,
    GroupArrays,
    blocks_for,
    note_change,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.space.tenants import charge_to
from pagedkv.space.truncating import missing_content, rewind_chains_of


def inherit(state: SpaceState, parent: int, children: Int32Array) -> None:
    """Copy what new rows share with ``parent`` whatever its length. Their own lengths are set already."""
    rows = state.rows
    state.loops[inherit_rows](rows, state.planned_columns, state.relies_on, state.publish_limits, parent, children)
    if parent in state.media_keys:
        state.media_keys |= dict.fromkeys(children.tolist(), state.media_keys[parent])
        state.media_reach[children] = state.media_reach[parent]
    if state.has_tenants:
        rows[children, TENANT] = rows[parent, TENANT]
    if state.counts_epochs:
        state.oldest_epochs[children] = state.oldest_epochs[parent]
    for group in state.shedding_groups:
        state.ends[group.index][children] = state.ends[group.index][parent]
    for group in state.replaying_groups:
        sure = group.arrays.parameters[SURE]
        rows[children, sure] = rows[parent, sure]


def fork(state: SpaceState, ledger: StepLedger, parent: int, num_children: int) -> Int32Array:
    """Make new rows that share every block of ``parent``.

    Raises:
        TooManySequencesError: there are fewer vacant rows.
        SequenceError: a recurrent state would have to be advanced for several sequences at once, or rolled back.
    """
    rows = state.rows
    if state.is_recurrent and rows[parent, NUM_PLANNED] < rows[parent, NUM_TOKENS]:
        raise SequenceError(
            f"row {parent} has tokens {rows[parent, NUM_PLANNED]} to {rows[parent, NUM_TOKENS]} not planned yet: "
            "its recurrent state can be forked only after plan_step"
        )
    if state.draft_tables:
        require_forkable(state, parent)
    state.require_vacant_rows(num_children)
    with state.changing:
        children = state.take_rows(num_children)
        num_tokens = int(rows[parent, NUM_TOKENS])
        rows[children, NUM_TOKENS] = num_tokens
        rows[children, NUM_ACCEPTED] = int(rows[parent, NUM_ACCEPTED])
        if state.is_overlapped:
            state.num_known[children] = state.num_known[parent]
        inherit(state, parent, children)
        for group in state.groups:
            state.loops[fork_row](*group.view, parent, children)
            table = group.arrays.table[parent, : blocks_for(num_tokens, group.block_size)]
            note_reliance(state, ledger, group, children, table)
        if state.cross_groups:
            _share_encoder(state, ledger, parent, children)
        for chains in state.chains:
            chains[children] = chains[parent]
        if state.receipts is not None:
            state.receipts.forked(parent, children, num_tokens)
        for tell in state.observers.forked:
            tell(parent, children, num_tokens)
    return children


def _share_encoder(state: SpaceState, ledger: StepLedger, parent: int, children: Int32Array) -> None:
    """Let new rows share all blocks of their parent's encoder."""
    for group in state.cross_groups:
        state.loops[fork_row](*group.view, parent, children)
        num_blocks = blocks_for(int(state.rows[parent, group.positions]), group.block_size)
        note_reliance(state, ledger, group, children, group.arrays.table[parent, :num_blocks])


@takes(Like.ROWS, Like.IDS, Like.IDS, Like.IDS, Like.NUMBER, Like.IDS)
@compiled
def inherit_rows(
    rows: Int32Array,
    planned: Int32Array,
    relies_on: Int32Array,
    publish_limits: Int32Array,
    parent: int,
    children: Int32Array,
) -> None:
    """Copy the fields of new rows that equal their parent's at any length; their numbers of tokens are already set.

    Args:
        planned: the columns with how far each group is planned; tokens not planned yet are computed by the parent.
        relies_on, publish_limits: int32 ``[rows]``.
    """
    for child in children:
        rows[child, FROZEN] = rows[parent, FROZEN]
        for column in planned:
            rows[child, column] = rows[child, NUM_TOKENS]
        relies_on[child] = relies_on[parent]
        publish_limits[child] = publish_limits[parent]


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.NUMBER, Like.IDS)
@compiled
def fork_row(pool: PoolArrays, group: GroupArrays, rows: Int32Array, parent: int, children: Int32Array) -> None:
    """Let new rows share every block of ``parent`` that has content. The caller sets the common columns."""
    at = group.parameters[AT]
    length = rows[parent, group.parameters[NUM_POSITIONS]]
    num_blocks = blocks_for(length, group.parameters[BLOCK_SIZE])
    for index in range(num_blocks):
        block = group.table[parent, index]
        if block != NULL_BLOCK:
            pool.records[block, REF_COUNT] += len(children)
    for child in children:
        for index in range(num_blocks):
            group.table[child, index] = group.table[parent, index]
        rows[child, group.parameters[NUM_POSITIONS]] = length
        rows[child, group.parameters[PLANNED]] = length
        rows[child, at + FIRST_BLOCK] = rows[parent, at + FIRST_BLOCK]
        if group.parameters[CACHING]:
            rows[child, at + NUM_DIGESTED] = rows[parent, at + NUM_DIGESTED]
            rows[child, at + NUM_PUBLISHED] = rows[parent, at + NUM_PUBLISHED]
            rows[child, at + TAIL] = rows[parent, at + TAIL]
            rows[child, at + TAIL_LIFE] = rows[parent, at + TAIL_LIFE]
        rows[child, at + NUM_BLOCKS] = num_blocks
        note_change(rows, child, at, 0, num_blocks)


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
    with state.changing:
        if state.has_tenants:
            charge_to(state, tenant)
        children = state.take_rows(1)
        _branch_off(state, ledger, parent, children, length)
        if state.cross_groups:
            _share_encoder(state, ledger, parent, children)
        if num_children > 1:
            children = np.append(children, fork(state, ledger, int(children[0]), num_children - 1))
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
    rows[child, NUM_TOKENS] = length
    rows[child, NUM_ACCEPTED] = min(int(rows[parent, NUM_ACCEPTED]), length)
    inherit(state, parent, children)
    if state.receipts is not None:
        state.receipts.forked(parent, children, length)
    for tell in state.observers.forked:
        tell(parent, children, length)
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
    begin_together(state)
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
        records[own, PENDING_STEP] = last


@compiled
def longest_prefix(group: GroupArrays, rows: Int32Array, row: int, most: int) -> int:
    """Return the most tokens, up to ``most``, after which a new row can continue in one group of a row; 0 if none.

    O(tokens) where windows have moved on or a state has advanced.
    """
    length = most
    while length > 0 and missing_content(group, rows, row, length) != 0:
        length -= 1
    return length


@compiled
def branch_row(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, parent: int, child: int, length: int, copy: Int32Array
) -> int:
    """Give a new row the first ``length`` tokens of another one. The caller sets the common columns.

    Args:
        copy: int32 ``[1, 2]``; becomes (source, destination) if the last block is partly filled.

    Returns how many blocks are copied: 1, or 0 if the prefix ends with a block.
    """
    at = group.parameters[AT]
    block_size = int(group.parameters[BLOCK_SIZE])
    num_full, num_blocks = length // block_size, blocks_for(length, block_size)
    for index in range(num_full):
        block = group.table[parent, index]
        group.table[child, index] = block
        if block != NULL_BLOCK:
            pool.records[block, REF_COUNT] += 1
    if num_blocks > num_full:
        copy[0, 0] = group.table[parent, num_full]
        copy[0, 1] = copy_block(pool, copy[0, 0])
        group.table[child, num_full] = copy[0, 1]
    rows[child, at + NUM_BLOCKS] = num_blocks
    rows[child, at + FIRST_BLOCK] = min(rows[parent, at + FIRST_BLOCK], num_blocks)
    if group.parameters[CACHING]:
        rows[child, at + NUM_DIGESTED] = min(rows[parent, at + NUM_DIGESTED], num_full)
        rows[child, at + NUM_PUBLISHED] = min(rows[parent, at + NUM_PUBLISHED], num_full)
        if rows[parent, at + NUM_PUBLISHED] > num_full:
            rewind_tail(pool, group, rows, child)
        else:
            rows[child, at + TAIL] = rows[parent, at + TAIL]
            rows[child, at + TAIL_LIFE] = rows[parent, at + TAIL_LIFE]
    note_change(rows, child, at, 0, num_blocks)
    return num_blocks - num_full
