"""Rolling rows back: drafts are rejected, reserved slots freed, the remaining tokens accepted and published.

Whether a row can be rolled back is checked in all groups (:func:`first_unfit_length`) before any group changes. Then
every group shrinks, and finally the rows' lengths are set.
"""

from typing import Final, NoReturn

import numpy as np

from pagedkv.blocks.life_cycle import drop_name, release
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import LIFE, NAME, NULL_BLOCK, OPEN_STEP, PENDING_STEP, REF_COUNT, PoolArrays
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.contract.arrays import DIGEST_WORDS, Int32Array, Int64Array, Uint32Array
from pagedkv.errors import SharedPrefixError, TruncationError
from pagedkv.space.crossing import require_encoders_planned
from pagedkv.space.drafting import accept_states, free_slots
from pagedkv.space.keeping import forget_named
from pagedkv.space.publishing import publish, rewind_tail
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    FIRST_BLOCK,
    FROZEN,
    KIND,
    LAST_STEP,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_DRAFT_STATES,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_TOKENS,
    PLANNED,
    RECURRENT,
    ROOT,
    SHEDS,
    SPAN,
    GroupArrays,
    blocks_for,
    cut_changes,
    first_needed_token,
    first_sure_block,
    num_sealed,
    shed_at_release,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger


def truncate(state: SpaceState, ledger: StepLedger, batch: Int32Array, lengths: Int64Array) -> None:
    """Roll rows back to given lengths and accept the remaining tokens.

    Raises:
        TruncationError: the length is outside ``[1, num_tokens]``, needs content that is gone, or ends in a hit that a
            group has yet to compute.
        SharedPrefixError: another sequence or a ticket holds the blocks; nothing was changed.
    """
    _require_truncation(state, batch, lengths)
    _require_known_lengths(state, batch, lengths)
    if state.cross_groups:
        require_encoders_planned(state, batch, lengths)
    with state.changing:
        if state.receipts is not None:
            state.receipts.truncating(batch, lengths)
        for tell in state.observers.truncating:
            tell(batch, lengths)
        if state.checkpoints is not None and (state.checkpoints.ends or state.checkpoints.begun):
            forget_named(state, batch)
        if state.ahead_groups:
            _freeze_stale(state, batch, lengths)
        any_full = _shrink(state, batch, lengths)
        if state.is_overlapped or state.draft_tables:
            _accept_later(state, batch, lengths)
        else:
            state.loops[accept](state.rows, batch, lengths)
        if ledger.unfilled:
            ledger.lower_ends(state.rows[:, NUM_TOKENS])
        if any_full:
            publish(state, ledger, batch)


def _require_truncation(state: SpaceState, batch: Int32Array, lengths: Int64Array) -> None:
    places = [state.loops[first_unfit_length](*group.view, batch, lengths) for group in state.groups]
    if max(places) < 0:
        return
    place = min(place for place in places if place >= 0)
    row, length, num_tokens = int(batch[place]), int(lengths[place]), int(state.rows[batch[place], NUM_TOKENS])
    if not 1 <= length <= num_tokens:
        raise TruncationError(f"row {row} has {num_tokens} tokens: it cannot be rolled back to {length}")
    group = state.groups[places.index(place)]
    code = obstacle(*group.view, row, length)
    holders = "other sequences or tickets hold" if state.held else "other sequences hold"
    _refuse(group, f"row {row} cannot be rolled back from {num_tokens} to {length} tokens", length, holders, code)


def _require_known_lengths(state: SpaceState, batch: Int32Array, lengths: Int64Array) -> None:
    if not state.is_overlapped:
        return
    known = state.num_known[batch]
    unfit = (known > 0) & (lengths > known)
    if unfit.any():
        place = int(unfit.argmax())
        raise TruncationError(
            f"row {batch[place]} cannot be rolled back to {lengths[place]} tokens: only {known[place]} are known; fill "
            f"in what was sampled, or roll it back to {known[place]} or fewer"
        )


def _freeze_stale(state: SpaceState, batch: Int32Array, lengths: Int64Array) -> None:
    """Let rows that lose accepted tokens name no further blocks, where the names of a group cover tokens ahead.

    Entries before the new end were computed with the lost tokens behind them, and no plan computes them again. Drafts
    that are refused are no loss: their step writes these entries with what it has sampled.
    """
    known = np.maximum(state.rows[batch, NUM_ACCEPTED], state.num_known[batch] if state.is_overlapped else 0)
    is_stale = (known > lengths) & (state.rows[batch, NUM_PLANNED] >= lengths)
    state.rows[batch[is_stale], FROZEN] = 1


def _accept_later(state: SpaceState, batch: Int32Array, lengths: Int64Array) -> None:
    """Accept the remaining tokens, in spaces where rows may have unknown tokens or draft states."""
    accepted = state.rows[batch, NUM_ACCEPTED]
    state.loops[accept](state.rows, batch, lengths)
    if state.is_overlapped:
        _stay_overlapped(state, batch, accepted)
    accept_states(state, batch, accepted, state.rows[batch, NUM_ACCEPTED])
    free_slots(state, batch, is_leaving=False)


def _stay_overlapped(state: SpaceState, batch: Int32Array, accepted: Int32Array) -> None:
    """Let overlapped rows accept their remaining tokens only when the steps that compute these are acknowledged."""
    is_overlapped = state.num_known[batch] > 0
    rows, accepted = batch[is_overlapped], accepted[is_overlapped]
    state.num_known[rows] = state.rows[rows, NUM_TOKENS]
    state.rows[rows, NUM_ACCEPTED] = np.minimum(accepted, state.rows[rows, NUM_TOKENS])


def _refuse(group: Group, what: str, length: int, holders: str, code: int) -> NoReturn:
    if code == SHARED:
        raise SharedPrefixError(f"{what}: {holders} its blocks of group {group.index} beyond {length}")
    if code == CONTENT_GONE:
        raise TruncationError(
            f"{what}: group {group.index} has released what position {length} reads; free it and allocate again"
        )
    if code == HIT_UNCOMPUTED:
        raise TruncationError(
            f"{what}: the other groups hit as much, and group {group.index} is still to compute it; plan the step first"
        )
    assert code == STATE_ADVANCED
    raise TruncationError(
        f"{what}: the recurrent state of group {group.index} is past that and {length} is no checkpoint "
        f"(every {group.block_size} tokens); free it and allocate again"
    )


def _shrink(state: SpaceState, batch: Int32Array, lengths: Int64Array) -> bool:
    """Free every group's blocks beyond the lengths; return whether a full block waits for its digest."""
    any_full = False
    for group in state.outsiders:
        state.loops[shrink](*group.view, batch, lengths, state.scratch.rows)
    for chains, lane in zip(state.chains, state.lanes, strict=True):
        num_rewound = 0
        for group in lane:  # all of them have digested the same blocks
            num_rewound, fills = state.loops[shrink](*group.view, batch, lengths, state.scratch.rows)
            any_full |= fills
        if num_rewound:
            rewind_chains_of(state, lane, chains, state.scratch.rows[:num_rewound])
    return any_full


def rewind_chains_of(state: SpaceState, lane: tuple[Group, ...], chains: Uint32Array, rewound: Int32Array) -> None:
    """Continue the digest chains of rewound rows behind the blocks that they still have, in any group of the lane."""
    for group in lane:
        num_missing = rewind_chains(*group.view, rewound, chains)
        rewound = rewound[:num_missing]
    state.rows[rewound, FROZEN] = 1  # the digest that their next blocks would continue is gone


SHARED: Final = 1
CONTENT_GONE: Final = 2
STATE_ADVANCED: Final = 3
HIT_UNCOMPUTED: Final = 4


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.IDS, Like.LONGS)
@compiled
def first_unfit_length(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, lengths: Int64Array
) -> int:
    """Find the first place in a batch with a row that cannot be rolled back to its length, or -1."""
    for place in range(len(batch)):
        row = batch[place]
        length = lengths[place]
        if length == rows[row, NUM_TOKENS] and length > 0:
            continue
        if length < 1 or length > rows[row, NUM_TOKENS] or _obstacle(pool, group, rows, row, length):
            return place
    return -1


@compiled
def obstacle(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, length: int) -> int:
    """Return why a row cannot be rolled back to ``length`` tokens, or 0."""
    return int(_obstacle(pool, group, rows, row, length))


@inlined
def _obstacle(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, length: int) -> int:
    record = rows[row]
    if length == record[NUM_TOKENS]:
        return 0
    for index in range(num_sealed(group, length), blocks_for(record[NUM_TOKENS], group.parameters[BLOCK_SIZE])):
        block = group.table[row, index]
        if block != NULL_BLOCK and pool.records[block, REF_COUNT] > 1:
            return SHARED
    planned = record[group.parameters[PLANNED]]
    if planned < length <= record[NUM_PLANNED]:
        return HIT_UNCOMPUTED
    return missing_content(group, rows, row, length)


@inlined
def missing_content(group: GroupArrays, rows: Int32Array, row: int, length: int) -> int:
    """Return why a row cannot go on after its first ``length`` tokens, or 0: needed content is gone, or advanced."""
    record = rows[row]
    block_size = group.parameters[BLOCK_SIZE]
    planned = record[group.parameters[PLANNED]]
    query = min(length, planned)
    first_block = record[group.parameters[AT] + FIRST_BLOCK]
    first_sure = first_sure_block(group, rows, row)
    if first_block < first_sure:  # the replay began earlier than its first exact block
        first_token = first_needed_token(group.parameters[KIND], group.parameters[SPAN], length)
        return CONTENT_GONE if first_token // block_size < first_sure else 0
    first_token = first_needed_token(group.parameters[KIND], group.parameters[SPAN], query)
    for index in range(first_token // block_size, min(first_block, blocks_for(length, block_size))):
        if group.table[row, index] == NULL_BLOCK:  # else it is a sink
            return CONTENT_GONE
    if group.parameters[KIND] == RECURRENT and length < planned and length % block_size != 0:
        has_state = group.parameters[NUM_DRAFT_STATES] > 0 and length >= record[NUM_ACCEPTED]
        return 0 if has_state else STATE_ADVANCED
    return 0


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.IDS, Like.LONGS, Like.IDS)
@compiled
def shrink(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, lengths: Int64Array, rewound: Int32Array
) -> tuple[int, bool]:
    """Release the blocks of each row of a batch beyond its length; content beyond it loses digests and names.

    The rows' numbers of tokens stay: :func:`accept` sets them after every group has shrunk.

    Args:
        rewound: int32 ``[rows]``; receives the rows with another last digested block now.

    Returns how many rows were rewound, and whether a full block waits for its digest.
    """
    block_size = group.parameters[BLOCK_SIZE]
    num_blocks_column = unsigned(group.parameters[AT] + NUM_BLOCKS)
    num_digested_column = unsigned(group.parameters[AT] + NUM_DIGESTED)
    num_published_column = unsigned(group.parameters[AT] + NUM_PUBLISHED)
    num_rewound = 0
    any_full = False
    for place in range(len(batch)):
        row = unsigned(batch[place])
        length = lengths[place]
        if (rows[row, num_blocks_column] - 1) * block_size >= length:
            give_back(pool, group, rows, row, blocks_for(length, block_size))
        if length < rows[row, NUM_TOKENS]:
            if rows[row, num_digested_column] > num_sealed(group, length):
                rewound[num_rewound] = row
                num_rewound += 1
            cut_content(pool, group, rows, row, length)
        if (rows[row, num_published_column] + 1) * block_size <= length:
            any_full = True
    return num_rewound, any_full


@inlined
def give_back(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, kept: int) -> None:
    """Release a row's blocks from logical block ``kept`` on, the last one first."""
    at = group.parameters[AT]
    record = rows[row]
    table = group.table[row]
    for index in range(record[at + NUM_BLOCKS] - 1, kept - 1, -1):
        if table[index] == NULL_BLOCK:
            continue
        if group.parameters[SHEDS]:
            shed_at_release(pool, table[index])
        release(pool, table[index], record[LAST_STEP])
        group.table[row, index] = NULL_BLOCK
    rows[row, at + NUM_BLOCKS] = kept
    rows[row, at + FIRST_BLOCK] = min(record[at + FIRST_BLOCK], kept)
    cut_changes(rows, row, at, kept)


@inlined
def cut_content(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, length: int) -> None:
    """Discard a row's recorded content from ``length`` on; a named block that will be overwritten loses its name.

    So does one whose name covers a token from there on.
    """
    at = group.parameters[AT]
    planned = group.parameters[PLANNED]
    record = rows[row]
    num_full = num_sealed(group, length)
    for index in range(num_full, blocks_for(length, group.parameters[BLOCK_SIZE])):
        partial = group.table[row, index]
        if pool.records[partial, NAME]:
            drop_name(pool, partial)
        pool.records[partial, LIFE] += 1
        if record[planned] >= length and pool.records[partial, PENDING_STEP] == pool.counts[OPEN_STEP]:
            pool.records[partial, PENDING_STEP] = record[LAST_STEP]  # the open step no longer writes it
    if planned != NUM_PLANNED:
        rows[row, planned] = min(record[planned], length)
    rows[row, at + NUM_DIGESTED] = min(record[at + NUM_DIGESTED], num_full)
    if record[at + NUM_PUBLISHED] > num_full:
        rows[row, at + NUM_PUBLISHED] = num_full
        rewind_tail(pool, group, rows, row)


@takes(Like.ROWS, Like.IDS, Like.LONGS)
@compiled
def accept(rows: Int32Array, batch: Int32Array, lengths: Int64Array) -> None:
    """Set the numbers of tokens of a batch of rows; all of these are accepted."""
    for place in range(len(batch)):
        row = unsigned(batch[place])
        length = lengths[place]
        rows[row, NUM_TOKENS] = length
        rows[row, NUM_ACCEPTED] = length
        rows[row, NUM_PLANNED] = min(rows[row, NUM_PLANNED], length)


@compiled
def rewind_chains(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, rewound: Int32Array, chains: Uint32Array
) -> int:
    """Set the digest chain of rows to that of their last digested block.

    Rows without that block in this group are moved to the front of ``rewound``; returns their number.
    """
    num_missing, root = 0, group.parameters[ROOT:].view(np.uint32)
    for row in rewound:
        last = rows[row, group.parameters[AT] + NUM_DIGESTED] - 1
        block = group.table[row, last] if last >= 0 else NULL_BLOCK
        if last >= 0 and block == NULL_BLOCK:
            rewound[num_missing] = row
            num_missing += 1
            continue
        for word in range(DIGEST_WORDS):
            chains[row, word] = pool.digests[block, word] if last >= 0 else root[word]
    return num_missing
