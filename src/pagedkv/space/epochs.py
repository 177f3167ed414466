"""Counted epochs of the model's weights: which epochs contributed to a row's content, and what may still be hit.

A new epoch stops nothing. Rows keep what older weights computed for them and continue with the new ones, so a row holds
a chain of ranges::

    epoch     3   3   3   4   4   7          which weights computed each block of a row
    oldest    3   3   3   3   3   3          what contributed to it: the range that the block keeps
    newest    3   3   3   4   4   7

Content may be hit if its oldest epoch is at most ``max_epoch_lag`` epochs back. A match does not check that: when an
epoch begins, older blocks leave the prefix index, and rows that hold any are frozen, since nothing that they compute
could ever be hit. The epoch is no part of a digest here, so a chain continues through epochs; externally, a block is
identified by its digest and its range (:class:`~pagedkv.StoredBlock`).

Blocks are dated by the epochs of the weights that contribute to the rows' content (:mod:`pagedkv.blocks.epochs`). A
plan dates the blocks that it computes. Until then, a block that the open step computes from its first token on has the
oldest epoch of its row, if that has any, so that rows sharing the block know the age of its prefix.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.epochs import date
from pagedkv.blocks.record import NAME, NEWEST, NULL_BLOCK, OLDEST, OPEN_STEP, PENDING_STEP, UNDATED, PoolArrays
from pagedkv.blocks.sweeps import drop_stale
from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import EpochSpan, Load
from pagedkv.contract.arguments import as_epoch
from pagedkv.contract.arrays import BoolArray, Int32Array
from pagedkv.contract.spec import keeps_state
from pagedkv.errors import ConfigurationError
from pagedkv.space.hits import PrefixHit
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    FROZEN,
    LOST_ON_HOST,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_TOKENS,
    PLANNED,
    RUNNING,
    STATUS,
    SWAPPED,
    VACANT,
    GroupArrays,
    blocks_for,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import InFlightStep

NOT_RECORDED: Final = -1


def as_next_epoch(state: SpaceState, weights_epoch: object) -> int:
    """Check the number of the next epoch. Raises ConfigurationError if it goes back, or is text."""
    current = _current(state)
    if isinstance(weights_epoch, str):
        raise ConfigurationError(
            f"weights_epoch must be a number, as the first one was, got {weights_epoch!r}; the epoch is {current}"
        )
    epoch = as_epoch(weights_epoch)
    if epoch < current:
        raise ConfigurationError(f"weights_epoch cannot go back from {current} to {epoch}: number new weights upwards")
    return epoch


def _current(state: SpaceState) -> int:
    assert not isinstance(state.weights.epoch, str)
    return state.weights.epoch


def begin_epoch(state: SpaceState, epoch: int) -> None:
    """Begin an epoch: blocks too old to be hit leave the prefix index, and rows that hold any are frozen."""
    bound = epoch - state.config.max_epoch_lag
    with state.changing:
        state.weights.epoch = epoch
        for pool in state.all_pools:
            pool.arrays.epochs[:1] = epoch
            if state.config.prefix_caching:
                drop_stale(pool.arrays, bound)
        state.rows[(state.oldest_epochs < bound) & (state.rows[:, STATUS] != VACANT), FROZEN] = 1
        for loading in state.loads.values():
            loading.is_frozen |= loading.oldest_epoch < bound


# Rows


def date_hit(state: SpaceState, batch: Int32Array, hit: PrefixHit) -> None:
    """Set the oldest epoch of a new row to the oldest in its hit."""
    blocks = [(group.pool.arrays, hit.block_ids[group.index]) for group in state.cached_groups]
    blocks += [(state.groups[tail.group].pool.arrays, np.array([tail.block], np.int32)) for tail in hit.tails]
    state.oldest_epochs[batch] = min(
        pool.epochs[held[held != NULL_BLOCK], OLDEST].min(initial=UNDATED) for pool, held in blocks
    )


# Steps


def date_plan(state: SpaceState, step: InFlightStep) -> None:
    """Record that the plan's blocks are computed with the current weights. O(rows + blocks that it writes)."""
    step.epoch = _current(state)
    state.oldest_epochs[_undated_rows(state)] = step.epoch  # this plan computes all that they wait for
    for group in state.cached_groups:
        _date(state, group, step.rows, step.starts_in(group.index), step.ends, step.epoch)


def _undated_rows(state: SpaceState) -> BoolArray:
    undated: BoolArray = (state.oldest_epochs == UNDATED) & (state.rows[:, STATUS] == RUNNING)
    return undated


def undate_rewound(state: SpaceState, rows: list[int]) -> None:
    """Clear the oldest epoch of rows that compute all their tokens again."""
    batch = np.array(rows, np.int32)
    state.oldest_epochs[batch[state.rows[batch, NUM_PLANNED] == 0]] = UNDATED


def date_declared(state: SpaceState, batch: Int32Array) -> None:
    """Date declared tokens that no plan computes: they count as computed with the current weights."""
    epoch, oldest = _current(state), state.oldest_epochs
    oldest[batch] = np.minimum(oldest[batch], epoch)
    for group in state.cached_groups:
        starts, ends = (np.ascontiguousarray(state.rows[batch, column]) for column in (group.planned, NUM_TOKENS))
        _date(state, group, batch, starts, ends, epoch)
    for row in np.flatnonzero(_undated_rows(state)).tolist():  # it may share what was declared
        oldest[row] = min(_oldest_held(state, group, row) for group in state.cached_groups)


def _oldest_held(state: SpaceState, group: Group, row: int) -> int:
    """Return the oldest epoch that contributed to what a row holds in a group, as far as it is planned."""
    blocks = group.arrays.table[row, : blocks_for(int(state.rows[row, group.planned]), group.block_size)]
    return int(group.pool.arrays.epochs[blocks[blocks != NULL_BLOCK], OLDEST].min(initial=UNDATED))


def date_moved(state: SpaceState, step: InFlightStep, refused: Int32Array) -> None:
    """Date the blocks to which a step's tokens behind refused ones have moved."""
    is_moved = (state.serials[step.rows] == step.serials) & (refused[step.rows] > 0)
    for group in state.cached_groups:
        starts = step.starts_in(group.index)[is_moved]
        _date(state, group, step.rows[is_moved], starts, step.ends[is_moved], step.epoch)


def _date(state: SpaceState, group: Group, batch: Int32Array, starts: Int32Array, ends: Int32Array, epoch: int) -> None:
    date_computed(group.pool.arrays, group.arrays, batch, starts, ends, state.oldest_epochs, epoch)


# Loads


def as_epochs(state: SpaceState, epochs: tuple[int, int] | None) -> tuple[int, int]:
    """Check the epochs that contributed to loaded content; None means the current one.

    Raises:
        ConfigurationError: no pair, or epochs that have not begun or are too old to be hit.
    """
    current = _current(state)
    if epochs is None:
        return current, current
    if not isinstance(epochs, tuple | list) or len(epochs) != 2:  # noqa: PLR2004 - oldest and newest
        raise ConfigurationError(f"epochs must be a pair, the oldest and the newest, got {epochs!r}")
    oldest, newest = map(as_epoch, epochs)
    bound = current - state.config.max_epoch_lag
    if not bound <= oldest <= newest <= current:
        raise ConfigurationError(
            f"epochs {oldest} to {newest} cannot be loaded: hits may rest on epochs {max(0, bound)} to {current}"
        )
    return oldest, newest


def date_load(state: SpaceState, answer: Load, hit: PrefixHit, epochs: tuple[int, int] | None) -> None:
    """Date the blocks of a load behind a hit."""
    oldest, newest = as_epochs(state, epochs)
    for group in state.cached_groups:
        blocks = hit.block_ids[group.index]
        held = group.pool.arrays.epochs[blocks[blocks != NULL_BLOCK]]
        oldest = min(oldest, int(held[:, OLDEST].min(initial=oldest)))
        newest = max(newest, int(held[:, NEWEST].max(initial=newest)))
    for group in state.cached_groups:
        taken = answer.block_ids[group.index]
        group.pool.arrays.epochs[taken[taken != NULL_BLOCK]] = oldest, newest
    state.loads[answer].oldest_epoch = oldest


# Queries


def epochs_of(pool: BlockPool, block: int) -> tuple[int, int] | None:
    """Return the oldest and the newest epoch that contributed to a block; None if they are not recorded."""
    epochs = pool.arrays.epochs
    if epochs[block, NEWEST] == UNDATED:
        return None
    oldest, newest = epochs[block].tolist()
    return oldest, newest


def spans_of(state: SpaceState, row: int) -> tuple[EpochSpan, ...]:
    """Return the epochs that contributed to a row's content in any cached group, in runs of equal ranges.

    The runs end at the first position without a date. Equal prompts may hit blocks of different epochs in different
    groups. O(groups x positions).
    """
    planned = int(state.rows[row, NUM_PLANNED])
    position_epochs = np.full((planned, 2), (UNDATED, NOT_RECORDED), np.int32)
    is_on_host = state.rows[row, STATUS] in {SWAPPED, LOST_ON_HOST}
    for group in state.cached_groups:
        pool = group.pool if group.host_pool is None or not is_on_host else group.host_pool
        blocks = group.arrays.table[row, : blocks_for(planned, group.block_size)]
        _widen(position_epochs, pool.arrays.epochs[blocks], blocks != NULL_BLOCK, group)
    _fill_gaps(position_epochs, int(state.oldest_epochs[row]))
    return tuple(_spans(position_epochs))


# Auditing


def check_epochs(state: SpaceState) -> None:
    """Cached blocks, and the content of rows that publish, are of epochs that may still be hit."""
    current = _current(state)
    bound = current - state.config.max_epoch_lag
    for pool in state.all_pools:
        records, epochs = pool.arrays.records[: pool.num_blocks], pool.arrays.epochs
        is_dated = epochs[:, NEWEST] != UNDATED
        is_open = records[:, PENDING_STEP] == state.open_step
        is_named = records[:, NAME] != 0
        assert not (is_named & (epochs[:, OLDEST] < bound)).any(), f"{pool.name}: what can be found is too old"
        assert not (is_named & ~is_dated & ~is_open).any(), f"{pool.name}: what can be found is of no epoch"
        is_sound = (epochs[:, OLDEST] <= epochs[:, NEWEST]) & (epochs[:, NEWEST] <= current)
        assert is_sound[is_named & is_dated].all(), f"{pool.name}: epochs that contributed are out of order"
    is_live = np.isin(state.rows[:, STATUS], (RUNNING, SWAPPED))
    assert state.rows[is_live & (state.oldest_epochs < bound), FROZEN].all(), "a row publishes what is too old"
    for row in np.flatnonzero(is_live).tolist():
        _check_row(state, row)


def _check_row(state: SpaceState, row: int) -> None:
    """No block of a row is older than the row's oldest epoch."""
    for group in state.cached_groups:
        pool = group.pool if state.rows[row, STATUS] == RUNNING or group.host_pool is None else group.host_pool
        blocks = group.arrays.table[row, : int(state.rows[row, group.planned]) // group.block_size]
        is_dated = (blocks != NULL_BLOCK) & (pool.arrays.records[blocks, PENDING_STEP] != state.open_step)
        dates = pool.arrays.epochs[blocks[is_dated]]  # blocks that the open step computes are dated later
        is_older = (dates[:, OLDEST] < state.oldest_epochs[row]) & (dates[:, NEWEST] != UNDATED)
        assert not is_older.any(), f"group {group.index}, row {row}: a block is older than the row"


def _widen(position_epochs: Int32Array, ranges: Int32Array, is_held: npt.NDArray[np.bool_], group: Group) -> None:
    """Widen the ranges by what one group holds: keys and values of whole blocks, or the state at a block's end."""
    first = np.arange(len(ranges)) * group.block_size
    stop = np.minimum(first + group.block_size, len(position_epochs))
    for index in np.flatnonzero(is_held).tolist():
        part = position_epochs[(stop[index] - 1 if keeps_state(group.spec) else first[index]) : stop[index]]
        oldest, newest = ranges[index].tolist()
        part[:, OLDEST] = np.minimum(part[:, OLDEST], oldest)
        part[:, NEWEST] = np.maximum(part[:, NEWEST], newest)


def _fill_gaps(position_epochs: Int32Array, row_oldest: int) -> None:
    """Date positions that have left all windows: they were computed before the positions behind them."""
    for position in range(len(position_epochs) - 2, -1, -1):
        if position_epochs[position, NEWEST] == NOT_RECORDED:
            position_epochs[position] = row_oldest, position_epochs[position + 1, NEWEST]


def _spans(position_epochs: Int32Array) -> Iterator[EpochSpan]:
    """Yield runs of positions with equal ranges."""
    is_dated = (position_epochs[:, NEWEST] != NOT_RECORDED) & (position_epochs[:, NEWEST] != UNDATED)
    position_epochs = position_epochs[: int(is_dated.argmin()) if not is_dated.all() else len(position_epochs)]
    changes = 1 + np.flatnonzero((position_epochs[1:] != position_epochs[:-1]).any(axis=1))
    for start, stop in pairwise([*([0] if len(position_epochs) else []), *changes.tolist(), len(position_epochs)]):
        yield EpochSpan(start, stop, *position_epochs[start].tolist())


@compiled
def date_open(pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, oldest: Int32Array) -> None:
    """Date the blocks that a batch of rows is about to publish and the open step computes, as far as possible.

    Args:
        oldest: int32 ``[max_sequences]``, the oldest epoch that contributed to each row, or ``UNDATED``.
    """
    at = group.parameters[AT]
    for row in batch:
        planned, block_size = rows[row, group.parameters[PLANNED]], group.parameters[BLOCK_SIZE]
        for index in range(max(planned // block_size, rows[row, at + NUM_PUBLISHED]), rows[row, at + NUM_DIGESTED]):
            block = group.table[row, index]
            if block != NULL_BLOCK and pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
                pool.epochs[block, OLDEST] = oldest[row]
                if index >= blocks_for(planned, block_size):  # else it begins with dated tokens, or a copy of them
                    pool.epochs[block, NEWEST] = UNDATED


@compiled
def date_computed(
    pool: PoolArrays,
    group: GroupArrays,
    batch: Int32Array,
    starts: Int32Array,
    ends: Int32Array,
    oldest: Int32Array,
    epoch: int,
) -> None:
    """Record that positions of a batch of rows are computed with the weights of an epoch.

    Args:
        starts, ends: int32 ``[rows]``, the positions of each row.
        oldest: as in :func:`date_open`, or that epoch if nothing older contributed to the row.
    """
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(batch)):
        row = batch[place]
        for index in range(starts[place] // block_size, blocks_for(ends[place], block_size)):
            block = group.table[row, index]
            if block == NULL_BLOCK:
                continue
            date(pool, block, oldest[row], epoch)
