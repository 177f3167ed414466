"""Unknown tokens across groups: appended before they are sampled, filled in afterwards, dropped with failed steps.

:mod:`pagedkv.tables.filling` draws what a step samples. A row that ever had unknown tokens counts as
*overlapped*: blocks that it completes are published when the step that computed them is acknowledged. This lasts until
known tokens are appended to the row, or it is declared computed.
"""

from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.blocks import NULL_BLOCK, REF_COUNT
from pagedkv.contract.answers import Shortage
from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import SharedPrefixError, TokenError
from pagedkv.space import growing
from pagedkv.space.batches import as_numbers, require_status
from pagedkv.space.growing import Growth
from pagedkv.space.publishing import publish
from pagedkv.space.state import SpaceState
from pagedkv.space.steps import InFlightStep, Samplers, StepLedger
from pagedkv.tables.filling import (
    drop_unknown,
    forget_drafts,
    is_unfilled,
    lower_ranges,
    repeat_pending,
)
from pagedkv.tables.rows import NUM_ACCEPTED, NUM_TOKENS, RUNNING

__all__ = [
    "accept",
    "append_unknown",
    "drop_unsampled",
    "fill",
    "oldest_samplers",
]


NO_TOKENS: Final = np.zeros(0, np.int32)


def append_unknown(state: SpaceState, ledger: StepLedger, growth: Growth) -> list[tuple[int, int]] | Shortage:
    """Grow rows by unknown tokens, or return the shortage with nothing changed.

    Raises:
        TokenError: ``num_draft`` is given, no step would verify the drafts before them, or a recurrent state could have
            to be rolled back; see also :func:`~pagedkv.space.growing.require_growth`.
    """
    if growth.num_draft:
        raise TokenError(
            f"num_draft = {growth.num_draft} with unknown tokens: all of them wait for a step to judge them"
        )
    growing.require_growth(state, growth)
    for feature in state.features:
        feature.require_unknown(growth)
    growth = growth._replace(is_unknown=True)
    batch, rows, accepted = growth.batch, state.rows, state.accepted_scratch
    has_drafts = state.loops.note_accepted(rows, state.num_known, batch, accepted)
    if has_drafts:
        _require_judged_drafts(state, ledger, growth)
    shortage = growing.growth_shortage(state, growth)
    if shortage is not None:
        return shortage
    state.is_changing = True
    if has_drafts:
        _forget_drafts(state, growth, accepted)
    copies, _ = growing.grow(state, ledger, growth, NO_TOKENS)
    state.loops.begin_unknown(rows, state.num_known, batch, growth.counts, accepted)
    state.is_overlapped = True
    for observer in state.observers.grown:
        observer.grown(batch)
    state.is_changing = False
    return copies


def _require_judged_drafts(state: SpaceState, ledger: StepLedger, growth: Growth) -> None:
    """Refuse unknown tokens behind drafts that no step verifies.

    The step that computes the token before the drafts verifies them: it samples the tokens at their positions. If a
    planned range begins with the drafts, it was planned as if they were known, and nothing would compute it again.
    """
    begins = growth.batch[(state.num_known[growth.batch] == 0) & (growth.counts > 0)]
    accepted, num_tokens = (state.rows[begins, column] for column in (NUM_ACCEPTED, NUM_TOKENS))
    _require_own_drafts(state, begins, accepted, num_tokens)
    drafting = dict(zip(begins[accepted < num_tokens].tolist(), accepted[accepted < num_tokens].tolist(), strict=True))
    for step in ledger.in_flight:
        is_live = (state.serials[step.rows] == step.serials) & (step.starts < step.ends)  # else it was rolled back
        for row, start in zip(step.rows[is_live].tolist(), step.starts[is_live].tolist(), strict=True):
            if row in drafting and start >= drafting[row]:
                raise TokenError(
                    f"row {row} cannot take unknown tokens: its drafts, from position {start} on, are all that step "
                    f"{step.plan.step_id} computes of it, so that no step judges them; roll it back to {start} tokens, "
                    "or accept some, or acknowledge the step first"
                )


def _require_own_drafts(state: SpaceState, batch: Int32Array, accepted: Int32Array, num_tokens: Int32Array) -> None:
    """Refuse drafts that another sequence or a ticket holds: verification may overwrite them."""
    for row, first, stop in zip(batch.tolist(), accepted.tolist(), num_tokens.tolist(), strict=True):
        for group in state.groups if first < stop else ():
            table = group.arrays.table[row, first // group.block_size : -(-stop // group.block_size)]
            if (group.pool.arrays.records[table[table != NULL_BLOCK], REF_COUNT] > 1).any():
                raise SharedPrefixError(
                    f"row {row} cannot take unknown tokens: other sequences or tickets hold its drafts, positions "
                    f"{first} to {stop - 1}, in group {group.index}; accept them, or roll them back, first"
                )


def _forget_drafts(state: SpaceState, growth: Growth, accepted: Int32Array) -> None:
    """Count the content of the rows' blocks with known drafts as lost, since verification may overwrite it."""
    begins = (state.num_known[growth.batch] == 0) & (growth.counts > 0)
    batch, firsts = growth.batch[begins], accepted[: len(growth.batch)][begins]
    stops = np.ascontiguousarray(state.rows[batch, NUM_TOKENS])
    for group in state.cached_groups:
        forget_drafts(group.pool.arrays, group.arrays, batch, firsts, stops)


def oldest_samplers(state: SpaceState, ledger: StepLedger, batch: Int32Array) -> Samplers:
    """Find the step that samples the first unknown token of each row of a batch."""
    steps, limits = np.zeros((2, len(state.rows)), np.int32)
    for place, step in enumerate(ledger.unfilled):
        if place and not state.loops.is_any_unlimited(state.num_known, batch, limits):
            break
        number = step.plan.step_id - state.num_steps_before
        state.loops.find_samplers(
            state.num_known,
            state.serials,
            step.rows,
            step.serials,
            step.starts,
            step.ends,
            number,
            steps,
            limits,
        )
    return Samplers(state.version, steps, limits)


def _limits_to_fill(state: SpaceState, ledger: StepLedger, batch: Int32Array, numbers: Int32Array) -> Int32Array:
    """Check that rows can be filled with these numbers of tokens; return the limits, as in ``Samplers``.

    What the last plan found out (:class:`~pagedkv.space.steps.Samplers`) is used if it covers all rows; else all
    steps are searched.
    """
    found, ledger.samplers = ledger.samplers, None  # filling makes it invalid
    is_current = found is not None and found.version == state.version - 1
    if found is not None and is_current and _first_unfit(state, batch, numbers, found, least_limit=1) < 0:
        return found.limits
    require_status(state, batch, RUNNING)
    found = oldest_samplers(state, ledger, batch)
    place = _first_unfit(state, batch, numbers, found, least_limit=0)
    if place >= 0:
        row = int(batch[place])
        _refuse_filling(state, row, int(numbers[place]), int(found.steps[row]), int(found.limits[row]))
    return found.limits


def _first_unfit(
    state: SpaceState, batch: Int32Array, numbers: Int32Array, samplers: Samplers, *, least_limit: int
) -> int:
    return state.loops.first_unfit_fill(
        state.rows, state.num_known, batch, numbers, samplers.steps, samplers.limits, state.next_mark(), least_limit
    )


def fill(
    state: SpaceState, ledger: StepLedger, batch: Int32Array, counts: npt.ArrayLike | None, tokens: Int32Array
) -> None:
    """Fill in what each row's oldest unfilled step has sampled; the rest of the step's unknown tokens is refused.

    Raises:
        SequenceError: a row that is not running, or named twice.
        TokenError: counts do not add up; a row has no unknown tokens, or no planned step samples its first one; there
            are too many or too few tokens.
    """
    numbers = _as_numbers(state, batch, counts, tokens)
    limits = _limits_to_fill(state, ledger, batch, numbers)
    state.is_changing = True
    for group in state.cached_groups if state.config.prefix_caching else ():
        state.loops.write_known(group.pool.arrays, group.arrays, state.num_known, batch, numbers, tokens)
    refused = state.refused_scratch
    before = state.rows[batch, NUM_ACCEPTED] if state.draft_tables else None
    num_refused, any_accepted = state.loops.advance(
        state.groups[0].pool.arrays, state.rows, state.num_known, batch, numbers, limits, state.planned_array, refused
    )
    if num_refused:
        _move_down(state, ledger, refused, limits)
        for observer in state.observers.refused:
            observer.refused(refused, limits)
        refused[:] = 0
    if any_accepted:
        if before is not None:
            for feature in state.features:
                feature.accepted(batch, before, state.rows[batch, NUM_ACCEPTED])
        publish(state, ledger, batch)
    ledger.forget_filled(lambda step: _is_unfilled(state, step))
    state.is_changing = False


def _as_numbers(state: SpaceState, batch: Int32Array, counts: npt.ArrayLike | None, tokens: Int32Array) -> Int32Array:
    """Check how many tokens each row gets; None means one each."""
    if counts is None and len(batch) == len(tokens):
        return state.ones[: len(batch)]
    return as_numbers(batch, counts, len(tokens))


def _refuse_filling(state: SpaceState, row: int, count: int, sampler: int, limit: int) -> NoReturn:
    known, num_tokens = int(state.num_known[row]), int(state.rows[row, NUM_TOKENS])
    if not is_unfilled(state.rows, state.num_known, row):
        raise TokenError(f"row {row} cannot be filled: all of its {num_tokens} tokens are known")
    if not sampler:
        raise TokenError(
            f"row {row} cannot be filled: its first unknown token, at position {known}, is sampled by the open step, "
            "which is not planned yet"
        )
    if known + count > num_tokens and count <= limit - known + 1:
        raise TokenError(
            f"row {row} cannot be filled with {count} tokens: it has no slot for the token behind its drafts, at "
            f"position {limit}; append an unknown one first, or, if it lacks a block, fill {count - 1} tokens: the "
            "last of them is computed again"
        )
    raise TokenError(f"row {row} cannot be filled with {count} tokens: its step sampled 1 to {limit - known + 1}")


def _move_down(state: SpaceState, ledger: StepLedger, refused: Int32Array, limits: Int32Array) -> None:
    """Move down the positions that steps in flight, and the open step, compute behind refused tokens."""
    for step in ledger.unfilled:
        lower_ranges(state.serials, refused, limits, step.rows, step.serials, step.starts, step.ends)
        number = step.plan.step_id - state.num_steps_before
        for group in state.groups:
            starts, pool = step.starts_in(group.index), group.pool.arrays
            repeat_pending(
                pool, group.arrays, state.serials, refused, step.rows, step.serials, starts, step.ends, number
            )
        for feature in state.features:
            feature.moved(step, refused)
    rows = np.flatnonzero(refused).astype(np.int32)
    for group in state.groups:
        starts, ends = (np.ascontiguousarray(state.rows[rows, column]) for column in (group.planned, NUM_TOKENS))
        serials = state.serials[rows]
        repeat_pending(
            group.pool.arrays, group.arrays, state.serials, refused, rows, serials, starts, ends, state.open_step
        )


def _is_unfilled(state: SpaceState, step: InFlightStep) -> bool:
    return (
        state.loops.count_unfilled(state.rows, state.num_known, state.serials, step.rows, step.serials, step.ends) > 0
    )


def accept(state: SpaceState, ledger: StepLedger, step: InFlightStep) -> None:
    """Accept the known tokens that an acknowledged step computed, and publish full blocks of them."""
    full_rows = state.row_scratch
    before = state.rows[step.rows, NUM_ACCEPTED] if state.draft_tables else None
    num_full, num_unfilled = state.loops.accept_computed(
        state.rows, state.num_known, state.serials, step.rows, step.serials, step.ends, state.lane_columns, full_rows
    )
    if before is not None:
        for feature in state.features:
            feature.accepted(step.rows, before, state.rows[step.rows, NUM_ACCEPTED])
    if num_unfilled:
        ledger.over.append(step)
    if num_full:
        publish(state, ledger, full_rows[:num_full].copy())


def drop_unsampled(state: SpaceState, rewound: list[int]) -> None:
    """After steps failed: drop the unknown tokens of rewound rows that these, or later steps, would have sampled."""
    for row in rewound:
        drop_unknown(state.rows, state.num_known, row)
