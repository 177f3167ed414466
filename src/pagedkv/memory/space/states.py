"""Recurrent states at the ends of prompts, for running rows: keeping one that a plan computes, and continuing from one.

:mod:`pagedkv.memory.tables.checkpoints` draws a kept state; :mod:`pagedkv.memory.space.matching` finds one for a
prompt. A row continues in the same way from a block that hits in part (:mod:`pagedkv.memory.tables.partial_hits`): from
a copy, or from the block itself if it is unreferenced and there is no room for a copy.
"""

import numpy as np

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool.blocks import EXTRA, FREE, LIFE, NULL_BLOCK, NUM_EVENTS, QUEUE
from pagedkv.memory.pool.event_log import set_parent_digest
from pagedkv.memory.pool.keep_reasons import add_reasons_of
from pagedkv.memory.space.checkpoints import TailNote, keys_of_tail
from pagedkv.memory.space.pending import note_reliance
from pagedkv.memory.space.state import Group, SpaceState
from pagedkv.memory.space.steps import StepLedger
from pagedkv.memory.space.tails import Tail
from pagedkv.memory.tables.checkpoints import drop_tail_names, name_tail, resume, surrender
from pagedkv.memory.tables.retaining import AT_END, AT_JUNCTION, PROMPT_END
from pagedkv.memory.tables.rows import AT, FROZEN, NUM_ACCEPTED, NUM_DIGESTED, SHEDS

__all__ = ["checkpoint_of", "claim_tails", "free_tails", "give_way", "keep_states", "resume_states", "take_over"]


def checkpoint_of(state: SpaceState, num_tokens: int, num_hit_tokens: int) -> int:
    """Return the position up to which the last state of a prompt should be kept; 0 if none is needed.

    A chunk should end there. The position lies behind the hit and before the last token, where hits can end in all
    groups but states, and where no state is kept anyway at the end of an interval.
    """
    if state.checkpoints is None:
        return 0
    position = (num_tokens - 1) // state.checkpoints.alignment * state.checkpoints.alignment
    is_kept_anyway = all(position % group.block_size == 0 for group in state.state_groups)
    return 0 if position <= num_hit_tokens or is_kept_anyway else position


def keep_states(state: SpaceState, computing: Int32Array, ends: Int32Array) -> None:
    """Name the states of rows that the new plan computes exactly up to where one is to be kept.

    Does nothing in spaces without such groups.
    """
    if state.checkpoints is None:
        return
    is_there = (state.checkpoints.wanted[computing] == ends) & (state.rows[computing, NUM_ACCEPTED] == ends)
    for row, position in zip(computing[is_there].tolist(), ends[is_there].tolist(), strict=True):
        if state.rows[row, FROZEN]:
            continue
        for group in state.state_groups:
            index, length = divmod(position, group.block_size)
            is_digested = state.rows[row, int(group.arrays.parameters[AT]) + NUM_DIGESTED] == index
            if length and is_digested:
                _keep_state(state, group, row, index, length)
        for group in state.shedding_groups:
            group.ends[row, PROMPT_END] = position


def _keep_state(state: SpaceState, group: Group, row: int, index: int, length: int) -> None:
    assert state.checkpoints is not None
    pool, parent = group.pool, state.chains[group.lane][row]
    extra = _extra_of_tail(state, group, row, index, length)
    num_events = int(pool.arrays.counts[NUM_EVENTS])
    block = name_tail(*group.view, row, parent, state.extra_keys.arrays, extra)
    if block == NULL_BLOCK:
        return
    if pool.arrays.counts[NUM_EVENTS] > num_events and index > 0:
        set_parent_digest(pool.arrays, parent)
    _keep(group, block, AT_END)
    life = int(pool.arrays.records[block, LIFE])
    state.checkpoints.note(pool.name, block, TailNote(group.index, parent.tobytes(), length, life))


def _keep(group: Group, block: int, why: int) -> None:
    """Record why an unreferenced tail stays cached: a prompt ended with that state, or inside that block."""
    if group.arrays.parameters[SHEDS]:
        add_reasons_of(group.pool.arrays.records, block, why)


def _extra_of_tail(state: SpaceState, group: Group, row: int, index: int, length: int) -> int:
    """Return the extra keys' id for a block's first ``length`` tokens: the block's, without media that begin later."""
    start = index * group.block_size
    if row not in state.media_keys:
        return int(group.pool.arrays.records[group.arrays.table[row, index], EXTRA])
    encoding = keys_of_tail(state.media_keys[row], state.identity_epoch, start, start + length)
    return state.extra_keys.intern_all([encoding])[0]


# Continuing from a kept state


def free_tails(state: SpaceState, tails: tuple[Tail, ...]) -> dict[str, int]:
    """Count, by pool, the tails of a hit that are free."""
    counts = dict.fromkeys(state.pools, 0)
    for tail in tails:
        pool = state.groups[tail.group].pool
        counts[pool.name] += int(pool.arrays.records[tail.block, QUEUE] == FREE)
    return counts


def claim_tails(state: SpaceState, ledger: StepLedger, batch: Int32Array, tails: tuple[Tail, ...]) -> None:
    """Reference each tail of a hit for the one new row of a batch, until the row has its blocks."""
    for tail in tails:
        group, blocks = state.groups[tail.group], np.array([tail.block], np.int32)
        for feature in state.features:
            feature.reviving(group.pool, blocks)
        state.loops.reuse_all(group.pool.arrays, blocks)
        _keep(group, tail.block, AT_END if group in state.state_groups else AT_JUNCTION)
        note_reliance(state, ledger, group, batch, blocks)


def take_over(state: SpaceState, tail: Tail) -> None:
    """Let the next new row in a tail's group take the tail's block itself, since there is no room for a copy."""
    surrender(state.groups[tail.group].pool.arrays, tail.block)


def resume_states(state: SpaceState, ledger: StepLedger, row: int, tails: tuple[Tail, ...]) -> None:
    """Let a new row, which has its blocks, continue from its hit's tails: the plan copies those not taken over."""
    for tail in tails:
        group = state.groups[tail.group]
        own = int(group.arrays.table[row, tail.logical_index])
        if resume(*group.view, row, tail.logical_index, tail.block):
            ledger.add_copies(group.pool.name, np.array([[tail.block, own]], np.int32))


def give_way(state: SpaceState, batch: Int32Array) -> None:
    """Let growing rows overwrite their kept states in place if there is no block for a copy."""
    for group in state.state_groups:
        drop_tail_names(*group.view, batch)
