"""Unknown tokens: appended before they are sampled, and filled in once they were.

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

from pagedkv.blocks.block_record import end_life, raise_pending
from pagedkv.blocks.blocks import NAME, NULL_BLOCK, SETTLED_STEP, PoolArrays
from pagedkv.blocks.contents import set_token
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.contract.arrays import Int32Array
from pagedkv.tables.row_record import mark_row, plan_to, set_accepted, set_num_tokens, touch
from pagedkv.tables.rows import (
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
)

__all__ = [
    "accept_computed",
    "advance",
    "begin_unknown",
    "count_unfilled",
    "drop_unknown",
    "find_samplers",
    "first_unfilled",
    "first_unfit_fill",
    "forget_drafts",
    "is_any_unlimited",
    "is_unfilled",
    "lower_ranges",
    "note_accepted",
    "repeat_pending",
    "write_known",
]


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


@compiled
def begin_unknown(
    rows: Int32Array, num_known: Int32Array, batch: Int32Array, counts: Int32Array, accepted: Int32Array
) -> None:
    """Make the tokens that rows have grown by unknown: the accepted tokens stay as before, and only they are known."""
    for place in range(len(batch)):
        row = unsigned(batch[place])
        if counts[place] > 0:
            set_accepted(rows, row, accepted[place])
            if num_known[row] == 0:
                num_known[row] = accepted[place]


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


@compiled
def is_any_unlimited(num_known: Int32Array, batch: Int32Array, limits: Int32Array) -> bool:
    """Whether :func:`find_samplers` has recorded nothing yet for any overlapped row of a batch."""
    num_rows = 0
    for each in batch:
        row = unsigned(each)
        num_rows += num_known[row] > 0 and limits[row] == 0
    return num_rows > 0


@inlined
def is_unfilled(rows: Int32Array, num_known: Int32Array, row: int) -> bool:
    """Whether a row has unknown tokens."""
    return bool(0 < num_known[row] < rows[row, NUM_TOKENS])


@compiled
def first_unfilled(rows: Int32Array, num_known: Int32Array, batch: Int32Array) -> int:
    """Find the first place in a batch with a row that has unknown tokens, or -1."""
    for place in range(len(batch)):
        if is_unfilled(rows, num_known, batch[place]):
            return place
    return -1


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
    running, and occur once (see :func:`~pagedkv.tables.batches.first_unfit_row`).

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
            mark_row(rows, row, mark)
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
                end_life(pool.records, block)


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
    set_token(pool, block, position - index * block_size, token)


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
            set_num_tokens(rows, row, rows[row, NUM_TOKENS] - num_lost + has_no_slot)
            if has_no_slot:  # it is in no step from now on, while its last token is to be computed
                touch(rows, row)
            for column in planned:
                if rows[row, column] >= limits[row]:
                    plan_to(rows, row, column, rows[row, column] - num_lost)
        if rows[row, LAST_STEP] <= settled:
            accepted = min(num_known[row], rows[row, NUM_PLANNED])
            any_accepted |= accepted > rows[row, NUM_ACCEPTED]
            set_accepted(rows, row, max(rows[row, NUM_ACCEPTED], accepted))
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
                raise_pending(pool.records, block, step)


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
            set_accepted(rows, row, accepted)
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
    set_num_tokens(rows, row, min(rows[row, NUM_TOKENS], least))
