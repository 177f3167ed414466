"""Unknown tokens across groups: appended before they are sampled, filled in afterwards, dropped with failed steps.

A row that ever had unknown tokens counts as
*overlapped*: blocks that it completes are published when the step that computed them is acknowledged. This lasts until
known tokens are appended to the row, or it is declared computed.

Drafts, too, can get their token ids later than their slots, when a step is planned before a draft model has proposed
them. They are appended with any ids. A plan computes them, but nothing publishes, digests or matches a draft before it
is accepted, so their ids may still be replaced.

A step that is planned before the last one was sampled computes positions whose tokens are not known yet. The row gets
them as *unknown* tokens, which have slots but no content. The token of position ``q`` is sampled by the step that
computes position ``q - 1``, so each step samples a stretch of a row: the drafts that it verifies, and the token after
them. :func:`advance` takes the outcome of the oldest stretch; the tokens that it refuses move all later ones down::

    known              unknown: sampled by step 7     by step 8
    [ ... t ]          [ d  d  d  b ]                 [ d  d  d  b ]        step 8 computes [ b d d d ]
    three of four are refused, one token is filled in
    [ ... t t ]        [ d  d  d  b ]                                       step 8 computes three positions earlier

``num_known[row]`` is 0 if all tokens of a row are known, and were known when they were appended. Otherwise it is the
number of known tokens. The row's accepted tokens, up to which blocks are named and windows slide, are then those that
are known *and* computed by steps that are over.
"""

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.life_cycle import drop_name
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import (
    LIFE,
    NAME,
    NULL_BLOCK,
    PENDING_STEP,
    REF_COUNT,
    SETTLED_STEP,
    PoolArrays,
)
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.contract.answers import Shortage
from pagedkv.contract.arrays import NO_TOKENS, Int32Array
from pagedkv.errors import SharedPrefixError, TokenError
from pagedkv.space import growing
from pagedkv.space.drafting import accept_states, require_unknown
from pagedkv.space.epochs import date_moved
from pagedkv.space.growing import Growth
from pagedkv.space.publishing import publish
from pagedkv.space.rows import (
    BLOCK_SIZE,
    LAST_STEP,
    MARK,
    NUM_ACCEPTED,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_TOKENS,
    RUNNING,
    STATUS,
    GroupArrays,
    block_index,
    is_ascending,
    is_unfilled,
    touch,
)
from pagedkv.space.state import SpaceState, as_numbers, require_known, require_status
from pagedkv.space.steps import InFlightStep, Samplers, StepLedger


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
    if state.is_recurrent:
        require_unknown(state, growth.batch, growth.counts)
    growth = growth._replace(is_unknown=True)
    batch, rows, accepted = growth.batch, state.rows, state.scratch.accepted
    has_drafts = state.loops[note_accepted](rows, state.num_known, batch, accepted)
    if has_drafts:
        _require_judged_drafts(state, ledger, growth)
    shortage = growing.growth_shortage(state, growth)
    if shortage is not None:
        return shortage
    with state.changing:
        if has_drafts:
            _forget_drafts(state, growth, accepted)
        copies, _ = growing.grow(state, ledger, growth, NO_TOKENS)
        state.loops[begin_unknown](rows, state.num_known, batch, growth.counts, accepted)
        state.is_overlapped = True
        for tell in state.observers.grown:
            tell(batch)
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
        if place and not state.loops[is_any_unlimited](state.num_known, batch, limits):
            break
        number = step.plan.step_id - state.num_steps_before
        state.loops[find_samplers](
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
    is_current = found is not None and found.version == state.version
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
    return state.loops[first_unfit_fill](
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
    with state.changing:
        for group in state.cached_groups if state.config.prefix_caching else ():
            state.loops[write_known](group.pool.arrays, group.arrays, state.num_known, batch, numbers, tokens)
        refused = state.scratch.refused
        before = state.rows[batch, NUM_ACCEPTED] if state.draft_tables else None
        num_refused, any_accepted = state.loops[advance](
            state.groups[0].pool.arrays,
            state.rows,
            state.num_known,
            batch,
            numbers,
            limits,
            state.planned_columns,
            refused,
        )
        if num_refused:
            _move_down(state, ledger, refused, limits)
            if state.receipts is not None:
                state.receipts.refused(refused, limits)
            for tell in state.observers.refused:
                tell(refused, limits)
            refused[:] = 0
        if any_accepted:
            if before is not None:
                accept_states(state, batch, before, state.rows[batch, NUM_ACCEPTED])
            publish(state, ledger, batch)
        ledger.forget_filled(lambda step: _is_unfilled(state, step))


def _as_numbers(state: SpaceState, batch: Int32Array, counts: npt.ArrayLike | None, tokens: Int32Array) -> Int32Array:
    """Check how many tokens each row gets; None means one each."""
    if counts is None and len(batch) == len(tokens):
        return state.scratch.ones[: len(batch)]
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
        if state.counts_epochs:
            date_moved(state, step, refused)
    rows = np.flatnonzero(refused).astype(np.int32)
    for group in state.groups:
        starts, ends = (np.ascontiguousarray(state.rows[rows, column]) for column in (group.planned, NUM_TOKENS))
        serials = state.serials[rows]
        repeat_pending(
            group.pool.arrays, group.arrays, state.serials, refused, rows, serials, starts, ends, state.open_step
        )


def _is_unfilled(state: SpaceState, step: InFlightStep) -> bool:
    return (
        state.loops[count_unfilled](state.rows, state.num_known, state.serials, step.rows, step.serials, step.ends) > 0
    )


def replace_drafts(state: SpaceState, batch: Int32Array, tokens: Int32Array, counts: npt.ArrayLike | None) -> None:
    """Replace the ids of each row's last tokens, which are drafts.

    Raises:
        SequenceError: a row that is not running, is named twice, or has unknown tokens.
        TokenError: counts that do not add up, or that exceed a row's drafts.
        SharedPrefixError: another sequence or a ticket holds drafts.
    """
    numbers = as_numbers(batch, counts, len(tokens))
    require_status(state, batch, RUNNING)
    require_known(state, batch, "given other drafts")
    accepted, num_tokens = (state.rows[batch, column] for column in (NUM_ACCEPTED, NUM_TOKENS))
    firsts = num_tokens - numbers
    if (firsts < accepted).any():
        place = int((firsts < accepted).argmax())
        raise TokenError(
            f"row {batch[place]} cannot be given {numbers[place]} other drafts: {num_tokens[place] - accepted[place]} "
            f"of its {num_tokens[place]} tokens are drafts"
        )
    _require_own(state, batch, firsts, num_tokens)
    first_by_row = np.zeros(len(state.rows), np.int32)
    first_by_row[batch] = firsts
    with state.changing:
        for group in state.cached_groups if state.config.prefix_caching else ():
            forget_drafts(group.pool.arrays, group.arrays, batch, firsts, num_tokens)
            state.loops[write_known](group.pool.arrays, group.arrays, first_by_row, batch, numbers, tokens)


def _require_own(state: SpaceState, batch: Int32Array, firsts: Int32Array, stops: Int32Array) -> None:
    """Refuse drafts whose blocks another sequence or a ticket holds, which would get other tokens too."""
    for group in state.groups:
        records, table = group.pool.arrays.records, group.arrays.table
        for row, first, stop in zip(batch.tolist(), firsts.tolist(), stops.tolist(), strict=True):
            blocks = table[row, first // group.block_size : -(-stop // group.block_size)] if first < stop else table[:0]
            if (records[blocks[blocks != NULL_BLOCK], REF_COUNT] > 1).any():
                raise SharedPrefixError(
                    f"row {row} cannot be given other drafts: other sequences or tickets hold its positions {first} "
                    f"to {stop - 1} in group {group.index}; accept them, or roll them back, first"
                )


def accept(state: SpaceState, ledger: StepLedger, step: InFlightStep) -> None:
    """Accept the known tokens that an acknowledged step computed, and publish full blocks of them."""
    full_rows = state.scratch.rows
    before = state.rows[step.rows, NUM_ACCEPTED] if state.draft_tables else None
    num_full, num_unfilled = state.loops[accept_computed](
        state.rows, state.num_known, state.serials, step.rows, step.serials, step.ends, state.lane_columns, full_rows
    )
    if before is not None:
        accept_states(state, step.rows, before, state.rows[step.rows, NUM_ACCEPTED])
    if num_unfilled:
        ledger.over.append(step)
    if num_full:
        publish(state, ledger, full_rows[:num_full].copy())


def drop_unsampled(state: SpaceState, rewound: list[int]) -> None:
    """After steps failed: drop the unknown tokens of rewound rows that these, or later steps, would have sampled."""
    for row in rewound:
        drop_unknown(state.rows, state.num_known, row)


@takes(Like.ROWS, Like.IDS, Like.IDS, Like.IDS)
@compiled
def note_accepted(rows: Int32Array, num_known: Int32Array, batch: Int32Array, accepted: Int32Array) -> bool:
    """Store how many tokens of each row of a batch are accepted, before it grows.

    Returns whether any of them has drafts and no unknown tokens yet.
    """
    num_drafting = 0
    for place in range(len(batch)):
        row = unsigned(batch[place])
        accepted[place] = rows[row, NUM_ACCEPTED]
        num_drafting += num_known[row] == 0 and rows[row, NUM_ACCEPTED] < rows[row, NUM_TOKENS]
    return num_drafting > 0


@takes(Like.ROWS, Like.IDS, Like.IDS, Like.IDS, Like.IDS)
@compiled
def begin_unknown(
    rows: Int32Array, num_known: Int32Array, batch: Int32Array, counts: Int32Array, accepted: Int32Array
) -> None:
    """Make the tokens that rows have grown by unknown: the accepted tokens stay as before, and only they are known."""
    for place in range(len(batch)):
        row = unsigned(batch[place])
        if counts[place] > 0:
            rows[row, NUM_ACCEPTED] = accepted[place]
            if num_known[row] == 0:
                num_known[row] = accepted[place]


@takes(Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.NUMBER, Like.IDS, Like.IDS)
@compiled
def find_samplers(
    num_known: Int32Array,
    serials: Int32Array,
    step_rows: Int32Array,
    step_serials: Int32Array,
    starts: Int32Array,
    ends: Int32Array,
    number: int,
    samplers: Int32Array,
    limits: Int32Array,
) -> None:
    """Find the rows of which a step samples the first unknown token; record the step and the end of its range for each.

    If the range begins after that token, an earlier step, which may be over, samples it, and the range's start is
    recorded as the end. Call this for the oldest step first: later calls keep recorded rows. Rows without unknown
    tokens may be recorded too.


    Args:
        samplers, limits: int32 ``[max_sequences]``, zeros at first.
    """
    for place in range(len(step_rows)):
        row = unsigned(step_rows[place])
        if serials[row] != step_serials[place] or num_known[row] == 0 or limits[row] > 0:
            continue
        if starts[place] >= ends[place]:  # it was rolled back: the step samples nothing for the row any more
            continue
        if starts[place] < num_known[row] <= ends[place]:
            samplers[row] = number
            limits[row] = ends[place]
        elif starts[place] >= num_known[row]:
            limits[row] = starts[place]


@takes(Like.IDS, Like.IDS, Like.IDS)
@compiled
def is_any_unlimited(num_known: Int32Array, batch: Int32Array, limits: Int32Array) -> bool:
    """Whether :func:`find_samplers` has recorded nothing yet for any overlapped row of a batch."""
    num_rows = 0
    for each in batch:
        row = unsigned(each)
        num_rows += num_known[row] > 0 and limits[row] == 0
    return num_rows > 0


@takes(Like.ROWS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.IDS)
@compiled
def count_unfilled(
    rows: Int32Array,
    num_known: Int32Array,
    serials: Int32Array,
    step_rows: Int32Array,
    step_serials: Int32Array,
    ends: Int32Array,
) -> int:
    """Count the rows of a step that wait for a token which this step or an earlier one has sampled."""
    num_rows = 0
    for place in range(len(step_rows)):
        row = step_rows[place]
        if serials[row] == step_serials[place] and is_unfilled(rows, num_known, row):
            num_rows += num_known[row] <= ends[place]
    return num_rows


@takes(Like.ROWS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.NUMBER, Like.NUMBER)
@compiled
def first_unfit_fill(
    rows: Int32Array,
    num_known: Int32Array,
    batch: Int32Array,
    counts: Int32Array,
    samplers: Int32Array,
    limits: Int32Array,
    mark: int,
    least_limit: int,
) -> int:
    """Find the first place in a batch with a row that cannot take its number of tokens, or -1.

    A row takes at least one token, and at most those that its step has sampled: one more than the drafts there, as far
    as the row has slots. With any other number it would be unclear which of the drafts a step accepts. The row must be
    running, and occur once (see :func:`~pagedkv.space.rows.first_unfit_row`).

    Args:
        samplers, limits: as :func:`find_samplers` left them. If a row's unknown tokens were appended after their
            sampler was over and removed, they become 1 and the start of the next step.
        mark: a number that no batch has used before.
        least_limit: 1 as long as :func:`find_samplers` was not called for all steps: a row without a record counts as
            unfit then. Else 0.
    """
    ascends = is_ascending(batch)
    for place in range(len(batch)):
        if batch[place] < 0 or batch[place] >= len(rows):
            return place
        row = unsigned(batch[place])
        if rows[row, STATUS] != RUNNING or (not ascends and rows[row, MARK] == mark):
            return place
        if not ascends:
            rows[row, MARK] = mark
        if limits[row] < least_limit:
            return place
        if samplers[row] == 0 and 0 < num_known[row] <= rows[row, NUM_PLANNED]:
            samplers[row] = 1
            if limits[row] == 0:
                limits[row] = rows[row, NUM_PLANNED]
        if not is_unfilled(rows, num_known, row) or samplers[row] == 0:
            return place
        num_sampled = limits[row] - num_known[row] + 1
        if counts[place] < 1 or counts[place] > num_sampled or num_known[row] + counts[place] > rows[row, NUM_TOKENS]:
            return place
    return -1


@compiled
def forget_drafts(
    pool: PoolArrays, group: GroupArrays, batch: Int32Array, firsts: Int32Array, stops: Int32Array
) -> None:
    """Count the content of blocks with drafts as lost, before these may become other tokens.

    A fork that has accepted the drafts, and ended, may have named such a block, or left it to be merged with another.

    Args:
        firsts, stops: int32 ``[rows]``, the drafts of each row; its blocks with drafts are referenced by nobody else.
    """
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(batch)):
        for index in range(firsts[place] // block_size, (stops[place] + block_size - 1) // block_size):
            block = group.table[batch[place], index]
            if firsts[place] < stops[place] and block != NULL_BLOCK:
                if pool.records[block, NAME]:
                    drop_name(pool, block)
                pool.records[block, LIFE] += 1


@takes(Like.POOL, Like.GROUP, Like.IDS, Like.IDS, Like.IDS, Like.IDS)
@compiled
def write_known(
    pool: PoolArrays,
    group: GroupArrays,
    num_known: Int32Array,
    batch: Int32Array,
    counts: Int32Array,
    tokens: Int32Array,
) -> None:
    """Write tokens into the slots of unknown tokens."""
    block_size = group.parameters[BLOCK_SIZE]
    next_token = 0
    for place in range(len(batch)):
        row = unsigned(batch[place])
        first = num_known[row]
        if counts[place] == 1:  # the general loop takes 3 us more for 1,024 rows
            write_token(pool, group, row, first, block_size, tokens[next_token])
        else:
            for taken in range(counts[place]):
                write_token(pool, group, row, first + taken, block_size, tokens[next_token + taken])
        next_token += counts[place]


@inlined
def write_token(pool: PoolArrays, group: GroupArrays, row: int, position: int, block_size: int, token: int) -> None:
    """Write one token into its slot."""
    index = block_index(position, block_size)
    block = unsigned(group.table[row, unsigned(index)])
    pool.tokens[block, unsigned(position - index * block_size)] = token


@takes(Like.POOL, Like.ROWS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.IDS)
@compiled
def advance(
    pool: PoolArrays,
    rows: Int32Array,
    num_known: Int32Array,
    batch: Int32Array,
    counts: Int32Array,
    limits: Int32Array,
    planned: Int32Array,
    refused: Int32Array,
) -> tuple[int, bool]:
    """Count filled tokens as known, and move the tokens after refused ones down.

    Args:
        planned: the columns with how far groups are planned.
        refused: int32 ``[max_sequences]``, zeros; receives the number of tokens that each row loses.

    Returns the sum of these, and whether tokens were accepted since all steps of their row are over. A token counts
    among those lost even if there was no slot for it.
    """
    num_refused = 0
    any_accepted = False
    settled = pool.counts[SETTLED_STEP]
    for place in range(len(batch)):
        row = unsigned(batch[place])
        num_lost = limits[row] - num_known[row] + 1 - counts[place]
        num_known[row] += counts[place]
        if num_lost > 0:
            refused[row] = num_lost
            num_refused += num_lost
            has_no_slot = limits[row] == rows[row, NUM_TOKENS]  # for the token behind the drafts, which is refused too
            rows[row, NUM_TOKENS] = rows[row, NUM_TOKENS] - num_lost + has_no_slot
            if has_no_slot:  # it is in no step from now on, while its last token is to be computed
                touch(rows, row)
            for column in planned:
                if rows[row, column] >= limits[row]:
                    rows[row, column] = rows[row, column] - num_lost
        if rows[row, LAST_STEP] <= settled:
            accepted = min(num_known[row], rows[row, NUM_PLANNED])
            any_accepted |= accepted > rows[row, NUM_ACCEPTED]
            rows[row, NUM_ACCEPTED] = max(rows[row, NUM_ACCEPTED], accepted)
    return num_refused, any_accepted


@compiled
def lower_ranges(
    serials: Int32Array,
    refused: Int32Array,
    limits: Int32Array,
    step_rows: Int32Array,
    step_serials: Int32Array,
    starts: Int32Array,
    ends: Int32Array,
) -> None:
    """Move the ranges of a step down by the tokens that their rows have lost before them."""
    for place in range(len(step_rows)):
        row = step_rows[place]
        if serials[row] == step_serials[place] and refused[row] > 0 and ends[place] >= limits[row]:
            if ends[place] > limits[row]:
                starts[place] -= refused[row]
            ends[place] -= refused[row]


@compiled
def repeat_pending(
    pool: PoolArrays,
    group: GroupArrays,
    serials: Int32Array,
    refused: Int32Array,
    step_rows: Int32Array,
    step_serials: Int32Array,
    starts: Int32Array,
    ends: Int32Array,
    step: int,
) -> None:
    """Record the blocks that a step writes again, where its ranges have moved down."""
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(step_rows)):
        row = step_rows[place]
        if serials[row] == step_serials[place] and refused[row] > 0 and ends[place] > starts[place]:
            for index in range(starts[place] // block_size, (ends[place] - 1) // block_size + 1):
                block = group.table[row, index]
                if block == NULL_BLOCK:
                    continue
                pool.records[block, PENDING_STEP] = max(pool.records[block, PENDING_STEP], step)


@takes(Like.ROWS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.PAIRS, Like.IDS)
@compiled
def accept_computed(
    rows: Int32Array,
    num_known: Int32Array,
    serials: Int32Array,
    step_rows: Int32Array,
    step_serials: Int32Array,
    ends: Int32Array,
    lanes: Int32Array,
    full_rows: Int32Array,
) -> tuple[int, int]:
    """Accept the known tokens that a step that is over has computed.

    Args:
        lanes: int32 ``[lanes, 2]``, first column and block size of the first group of each digest chain.
        full_rows: int32 ``[rows]``; receives the rows in which a full block waits for its digest.

    Returns the number of these, and of the rows that wait for a token as :func:`count_unfilled` counts them.
    """
    num_full = 0
    num_unfilled = 0
    first_digested, first_size = unsigned(lanes[0, 0] + NUM_DIGESTED), lanes[0, 1]
    for place in range(len(step_rows)):
        row = unsigned(step_rows[place])
        if serials[row] != step_serials[place] or num_known[row] == 0:
            continue
        num_unfilled += is_unfilled(rows, num_known, row) and num_known[row] <= ends[place]
        if rows[row, STATUS] != RUNNING:
            continue
        accepted = min(num_known[row], ends[place])
        if accepted > rows[row, NUM_ACCEPTED]:
            rows[row, NUM_ACCEPTED] = accepted
            is_full = accepted >= (rows[row, first_digested] + 1) * first_size
            for lane in range(1, len(lanes)):
                num_digested = rows[row, unsigned(lanes[lane, 0] + NUM_DIGESTED)]
                is_full |= accepted >= (num_digested + 1) * lanes[lane, 1]
            if is_full:
                full_rows[num_full] = step_rows[place]
                num_full += 1
    return num_full, num_unfilled


@compiled
def drop_unknown(rows: Int32Array, num_known: Int32Array, row: int) -> None:
    """Remove the unknown tokens of a rewound row that its next step samples: all after the first that it computes."""
    if not is_unfilled(rows, num_known, row):
        return
    least = max(num_known[row], rows[row, NUM_PLANNED] + 1)
    rows[row, NUM_TOKENS] = min(rows[row, NUM_TOKENS], least)
