"""States inside a chunk: kept at a position that the engine names, while the step goes on beyond it.

A step leaves the state at its end in the row's own block, and the state at every end of an interval in a block of its
own. To keep any other, a chunk must end there (:mod:`pagedkv.space.states`), unless the kernel can write the state
after a position in the middle of what it computes. Then the engine names that position and gets a block for it::

    computed    start ......... position .............. end
    table       [ interval              ][ interval        ]
    kept                       ^ in a block that no table refers to

The block is taken when the position is named, and held by a ticket of the space until the step is over. It gets its
name with the plan, if the plan computes that position, by the tail of tokens that it covers, as a prompt's last state
does. From then on nothing differs: rows go on from a copy, and an aborted step withdraws the name.
"""

import numpy as np

from pagedkv.blocks.digests import ROOT_WORDS, ExtraKeyArrays
from pagedkv.blocks.epochs import copy_epochs
from pagedkv.blocks.life_cycle import acquire
from pagedkv.blocks.record import AT_END, IN_USE, KEPT, LIFE, NULL_BLOCK, OPEN_STEP, PENDING_STEP, QUEUE, PoolArrays
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import KeptState, Shortage
from pagedkv.contract.arrays import Int32Array, Uint32Array
from pagedkv.contract.spec import StepId
from pagedkv.errors import TokenError
from pagedkv.space.loading import give_back, take_ticket
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    FROZEN,
    NUM_ACCEPTED,
    NUM_DIGESTED,
    NUM_PLANNED,
    PROMPT_END,
    SHEDS,
    GroupArrays,
)
from pagedkv.space.state import Group, KeptInside, SpaceState, TailNote
from pagedkv.space.states import extra_of_tail, name_by_tail
from pagedkv.space.steps import InFlightStep
from pagedkv.space.tenants import charge_to, keep_caps


def keep_states(state: SpaceState, row: int, position: int) -> tuple[KeptState, ...] | Shortage:
    """Take a block for the state at a position that the open step is to compute, in each group that keeps none there.

    Raises:
        TokenError: the position is planned already, or the state before it was left by a step; nothing was changed.
    """
    if position <= state.rows[row, NUM_PLANNED]:
        raise TokenError(
            f"the state at {position} of row {row} is no part of the open step: {state.rows[row, NUM_PLANNED]} tokens "
            "are planned already"
        )
    groups = [group for group in state.state_groups if position % group.block_size]
    parents = [_parent_of(state, group, row, position) for group in groups]
    tenant, needed = state.room.tenant_of(row), dict.fromkeys(state.pools, 0)
    for group in groups:
        needed[group.pool.name] += 1
    shortage = state.room.find_shortage({tenant: needed})
    if shortage is not None:
        return shortage
    checkpoints, kept = state.checkpoints, []
    assert checkpoints is not None
    with state.changing:
        if state.has_tenants:
            charge_to(state, tenant)
        checkpoints.ends[row] = position
        for group, parent in zip(groups, parents, strict=True):
            block = take_for_state(group.pool.arrays)
            ticket = take_ticket(state, group.pool.name, np.array([block], np.int32))
            serial = int(state.serials[row])
            checkpoints.inside.append(KeptInside(row, serial, position, group.index, block, parent, ticket))
            kept.append(KeptState(group.index, group.pool.name, block))
        if state.has_tenants:
            keep_caps(state, tenant)
    return tuple(kept)


def _parent_of(state: SpaceState, group: Group, row: int, position: int) -> Uint32Array | None:
    """Return the digest of what comes before the interval of a position; None if that is still to be appended."""
    index = position // group.block_size
    num_digested = int(state.rows[row, int(group.arrays.parameters[AT]) + NUM_DIGESTED])
    if index == 0:
        return ROOT_WORDS
    if num_digested <= index:
        return state.chains[group.lane][row].copy() if num_digested == index else None
    before = int(group.arrays.table[row, index - 1])
    if before != NULL_BLOCK:
        digest: Uint32Array = group.pool.arrays.digests[before].copy()
        return digest
    assert state.checkpoints is not None
    if (known := state.checkpoints.begun.get(row, {}).get((group.index, index))) is not None:
        return known
    raise TokenError(
        f"the state at {position} of row {row} cannot be kept: the one at {index * group.block_size} was left by an "
        "earlier step; name a position before the tokens of its chunk are appended"
    )


def name_inside(state: SpaceState, step: InFlightStep) -> None:
    """Name the states that a plan computes at positions that were named; give the other blocks back."""
    checkpoints = state.checkpoints
    assert checkpoints is not None
    planned = {
        row: (start, end)
        for row, start, end in zip(step.rows.tolist(), step.starts.tolist(), step.ends.tolist(), strict=True)
        if row in checkpoints.ends
    }
    for row, position in checkpoints.ends.items():
        if _is_computed(state, planned.get(row), row, position):
            for group in state.shedding_groups:  # windows are kept there as well
                state.ends[group.index][row, PROMPT_END] = position
    waiting = [kept for kept in checkpoints.inside if kept.step is None]
    for kept in waiting:
        is_alive = state.serials[kept.row] == kept.serial
        if is_alive and _is_computed(state, planned.get(kept.row), kept.row, kept.position):
            kept.step = step.plan.step_id
            _name(state, kept)
        else:
            _give_back(state, kept)
    checkpoints.ends.clear()


def _is_computed(state: SpaceState, planned: tuple[int, int] | None, row: int, position: int) -> bool:
    """Whether a plan computes a position of a row for good, before the end of its range, and the row publishes it."""
    if planned is None or not planned[0] < position <= planned[1] or state.rows[row, FROZEN]:
        return False
    return bool(position <= min(state.rows[row, NUM_ACCEPTED], state.publish_limits[row]))


def _name(state: SpaceState, kept: KeptInside) -> None:
    group, row = state.groups[kept.group], kept.row
    index, length = divmod(kept.position, group.block_size)
    parent = kept.parent if kept.parent is not None else _parent_of(state, group, row, kept.position)
    assert parent is not None, f"row {row} has fewer digests than accepted tokens"
    extra = extra_of_tail(state, group, row, index, length)
    pool, keys = group.pool.arrays, state.extra_keys.arrays
    if name_kept(pool, group.arrays, row, kept.position, kept.block, parent, keys, extra):
        assert state.checkpoints is not None
        note = TailNote(group.index, parent.tobytes(), length, int(pool.records[kept.block, LIFE]))
        state.checkpoints.note(group.pool.name, kept.block, note)


def forget_named(state: SpaceState, batch: Int32Array) -> None:
    """Forget what was named in the open step for rows that are rolled back, and how they began."""
    checkpoints = state.checkpoints
    assert checkpoints is not None
    rows = set(batch.tolist())
    for kept in [kept for kept in checkpoints.inside if kept.step is None and kept.row in rows]:
        _give_back(state, kept)
    for row in rows:
        checkpoints.ends.pop(row, None)
        checkpoints.begun.pop(row, None)


def end_inside(state: SpaceState, step_ids: set[StepId]) -> None:
    """Give back the references to kept states of steps that are over: those that have a name stay cached."""
    assert state.checkpoints is not None
    for kept in [kept for kept in state.checkpoints.inside if kept.step in step_ids]:
        _give_back(state, kept)


def _give_back(state: SpaceState, kept: KeptInside) -> None:
    assert state.checkpoints is not None
    state.checkpoints.inside.remove(kept)
    give_back(state, kept.ticket)


@compiled
def take_for_state(pool: PoolArrays) -> int:
    """Take a free block for a state that the open step computes."""
    block = acquire(pool)
    pool.records[block, QUEUE] = IN_USE
    pool.records[block, PENDING_STEP] = pool.counts[OPEN_STEP]
    return int(block)


@compiled
def name_kept(
    pool: PoolArrays,
    group: GroupArrays,
    row: int,
    num_tokens: int,
    block: int,
    parent: Uint32Array,
    extra_keys: ExtraKeyArrays,
    extra: int,
) -> bool:
    """Name a block for the state after a row's first ``num_tokens``, unless another block has that name."""
    index = num_tokens // group.parameters[BLOCK_SIZE]
    own, length = group.table[row, index], num_tokens % group.parameters[BLOCK_SIZE]
    for place in range(length):
        pool.tokens[block, place] = pool.tokens[own, place]
    before = group.table[row, index - 1] if index else NULL_BLOCK
    life = pool.records[before, LIFE]
    if not name_by_tail(pool, group, block, length, parent, extra_keys, extra, before, life):
        return False
    if len(pool.epochs):
        copy_epochs(pool, own, pool, block)
    if group.parameters[SHEDS]:
        pool.records[block, KEPT] |= AT_END
    return True
