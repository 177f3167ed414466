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
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.memory.contract.answers import EpochSpan, Load
from pagedkv.memory.contract.arguments import as_epoch
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.contract.spec import keeps_state
from pagedkv.memory.pool.block_pool import BlockPool
from pagedkv.memory.pool.blocks import NEWEST, NULL_BLOCK, OLDEST, UNDATED
from pagedkv.memory.pool.epochs import set_epoch_in_force, set_ranges
from pagedkv.memory.pool.sweeps import drop_stale
from pagedkv.memory.space.feature import SpaceFeature
from pagedkv.memory.space.hits import PrefixHit
from pagedkv.memory.space.state import Group, SpaceState
from pagedkv.memory.space.steps import InFlightStep, StepLedger
from pagedkv.memory.tables.epochs import date_computed, date_open
from pagedkv.memory.tables.row_record import freeze
from pagedkv.memory.tables.rows import (
    LOST_ON_HOST,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    SWAPPED,
    VACANT,
    blocks_for,
)

__all__ = ["EpochFeature", "as_next_epoch", "begin_epoch", "epochs_of_row"]

NOT_RECORDED: Final = -1


# A new epoch


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


def begin_epoch(state: SpaceState, epoch: int) -> None:
    """Begin an epoch: blocks too old to be hit leave the prefix index, and rows that hold any of them are frozen."""
    state.is_changing = True
    state.weights_epoch = epoch
    bound = epoch - state.config.max_epoch_lag
    for pool in state.all_pools:
        set_epoch_in_force(pool.arrays, epoch)
        if state.config.prefix_caching:
            drop_stale(pool.arrays, bound)
    is_stale = (state.oldest_epochs < bound) & (state.rows[:, STATUS] != VACANT)
    freeze(state.rows, is_stale)
    for loading in state.loads.values():
        loading.is_frozen |= loading.oldest_epoch < bound
    state.is_changing = False


def _current(state: SpaceState) -> int:
    assert not isinstance(state.weights_epoch, str)
    return state.weights_epoch


# Dating


class EpochFeature(SpaceFeature):
    """The part of the operations that records epochs, if they are counted."""

    def __init__(self, state: SpaceState) -> None:
        """Set the first epoch in force. O(pools)."""
        self._state = state
        for pool in state.all_pools:
            set_epoch_in_force(pool.arrays, _current(state))

    def hit_taken(self, ledger: StepLedger, batch: Int32Array, hit: PrefixHit) -> None:
        """Set the oldest epoch of a row to that of its hit."""
        del ledger
        _note_hit(self._state, int(batch[0]), hit)

    def forked(self, parent: int, children: Int32Array) -> None:
        """Copy the parent's oldest epoch to its children."""
        self._state.oldest_epochs[children] = self._state.oldest_epochs[parent]

    def cleared(self, batch: Int32Array) -> None:
        """Clear the oldest epoch of new rows."""
        self._state.oldest_epochs[batch] = UNDATED

    def publishing(self, group: Group, batch: Int32Array) -> None:
        """Give the blocks that the open step computes the oldest epoch of their row."""
        date_open(*group.view, batch, self._state.oldest_epochs)

    def planned(self, step: InFlightStep) -> None:
        """Record that the plan's blocks are computed with the current weights."""
        _date_step(self._state, step)

    def rewound(self, rows: list[int]) -> None:
        """Clear the oldest epoch of rows that compute all their tokens again."""
        _forget_dates(self._state, rows)

    def declared(self, batch: Int32Array) -> None:
        """Date declared tokens that no plan computes by the current epoch."""
        _date_declared(self._state, batch)

    def moved(self, step: InFlightStep, refused: Int32Array) -> None:
        """Record that the tokens which a step computes behind refused ones are in other blocks now."""
        _date_moved(self._state, step, refused)

    def require_epochs(self, epochs: tuple[int, int] | None) -> None:
        """Raise ConfigurationError for epochs that have not begun, or are too old to be hit."""
        _as_epochs(self._state, epochs)

    def epochs_of(self, pool: BlockPool, block: int) -> tuple[int, int] | None:
        """Return the oldest and the newest epoch that contributed to a block; None if they are not recorded."""
        epochs = pool.arrays.epochs
        if epochs[block, NEWEST] == UNDATED:
            return None
        oldest, newest = epochs[block].tolist()
        return oldest, newest

    def load_begun(self, answer: Load, hit: PrefixHit, epochs: tuple[int, int] | None) -> None:
        """Record the epochs of a load's content, as the caller gave them."""
        _date_load(self._state, answer, hit, _as_epochs(self._state, epochs))


def _note_hit(state: SpaceState, row: int, hit: PrefixHit) -> None:
    """Set a new row's oldest epoch to the oldest in its hit."""
    blocks = [(group.pool.arrays, hit.block_ids[group.index]) for group in state.cached_groups]
    blocks += [(state.groups[tail.group].pool.arrays, np.array([tail.block], np.int32)) for tail in hit.tails]
    oldest = [pool.epochs[held[held != NULL_BLOCK], OLDEST].min(initial=UNDATED) for pool, held in blocks]
    state.oldest_epochs[row] = min(oldest)


def _date_step(state: SpaceState, step: InFlightStep) -> None:
    """Record that a plan's blocks are computed with the current weights. O(rows + blocks that it writes)."""
    step.epoch = _current(state)
    is_new = (state.oldest_epochs == UNDATED) & (state.rows[:, STATUS] == RUNNING)
    state.oldest_epochs[is_new] = step.epoch  # this plan computes all that they wait for, for them or another row
    for group in state.cached_groups:
        _date(state, group, step.rows, step.starts_in(group.index), step.ends, step.epoch)


def _date_declared(state: SpaceState, batch: Int32Array) -> None:
    """Date declared tokens that no plan computes: they count as computed with the current weights."""
    epoch = _current(state)
    state.oldest_epochs[batch] = np.minimum(state.oldest_epochs[batch], epoch)
    for group in state.cached_groups:
        starts, ends = (np.ascontiguousarray(state.rows[batch, column]) for column in (group.planned, NUM_TOKENS))
        _date(state, group, batch, starts, ends, epoch)
    is_new = (state.oldest_epochs == UNDATED) & (state.rows[:, STATUS] == RUNNING)
    for row in np.flatnonzero(is_new).tolist():  # it may share what was declared
        state.oldest_epochs[row] = min(_oldest_held(state, group, row) for group in state.cached_groups)


def _oldest_held(state: SpaceState, group: Group, row: int) -> int:
    """Return the oldest epoch that contributed to what a row holds in a group, as far as it is planned."""
    blocks = group.arrays.table[row, : blocks_for(int(state.rows[row, group.planned]), group.block_size)]
    return int(group.pool.arrays.epochs[blocks[blocks != NULL_BLOCK], OLDEST].min(initial=UNDATED))


def _date_moved(state: SpaceState, step: InFlightStep, refused: Int32Array) -> None:
    """After tokens were refused: date the blocks to which a step's later tokens moved."""
    is_moved = (state.serials[step.rows] == step.serials) & (refused[step.rows] > 0)
    for group in state.cached_groups:
        starts = step.starts_in(group.index)[is_moved]
        _date(state, group, step.rows[is_moved], starts, step.ends[is_moved], step.epoch)


def _date(  # noqa: PLR0913, PLR0917 - ranges of one group
    state: SpaceState, group: Group, batch: Int32Array, starts: Int32Array, ends: Int32Array, epoch: int
) -> None:
    date_computed(group.pool.arrays, group.arrays, batch, starts, ends, state.oldest_epochs, epoch)


def _forget_dates(state: SpaceState, rewound: list[int]) -> None:
    """After steps failed: clear the oldest epoch of rows that compute all their tokens again."""
    rows = np.array(rewound, np.int32)
    state.oldest_epochs[rows[state.rows[rows, NUM_PLANNED] == 0]] = UNDATED


def _as_epochs(state: SpaceState, epochs: tuple[int, int] | None) -> tuple[int, int]:
    """Check the epochs that contributed to loaded content; None means the current one.

    Raises:
        ConfigurationError: no pair; epochs that have not begun, or are too old to be hit.
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


def _date_load(state: SpaceState, answer: Load, hit: PrefixHit, epochs: tuple[int, int]) -> None:
    """Date the blocks of a load behind a hit."""
    oldest, newest = epochs
    for group in state.cached_groups:
        blocks = hit.block_ids[group.index]
        held = group.pool.arrays.epochs[blocks[blocks != NULL_BLOCK]]
        oldest = min(oldest, int(held[:, OLDEST].min(initial=oldest)))
        newest = max(newest, int(held[:, NEWEST].max(initial=newest)))
    for group in state.cached_groups:
        taken = answer.block_ids[group.index]
        set_ranges(group.pool.arrays, taken[taken != NULL_BLOCK], oldest, newest)
    state.loads[answer].oldest_epoch = oldest


# Queries


def epochs_of_row(state: SpaceState, row: int) -> tuple[EpochSpan, ...]:
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
