"""Growing and rolling back: tokens appended to whole batches of rows, drafts rejected, slots given back."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.core.blocks import NUM_FREE, Int32Array, Int64Array
from pagedkv.core.rows import FROZEN, NUM_ACCEPTED, NUM_PLANNED, NUM_TOKENS, RUNNING
from pagedkv.core.truncating import CONTENT_GONE, SHARED, STATE_ADVANCED, obstacle, rewind_chain, shrink
from pagedkv.errors import SharedPrefixError, TokenError, TruncationError
from pagedkv.numbers import as_count
from pagedkv.plan import Shortage
from pagedkv.space.admission import find_shortage
from pagedkv.space.batches import require_status
from pagedkv.space.naming import publish, tag_blocks
from pagedkv.space.sharing import leave_shared_blocks
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger

__all__ = ["Growth", "append", "as_growth", "growth_shortage", "require_growth", "truncate"]


class Growth(NamedTuple):
    """What a batch of rows is to grow by, checked as far as it can be without looking at the rows.

    Args:
        batch: int32 ``[n]``, the rows.
        counts: int32 ``[n]``, tokens of each row.
        num_tokens: their sum; most: the largest of them.
        num_lookahead: slots reserved beyond the tokens of every row.
        num_draft: trailing tokens of every row that are guesses.
    """

    batch: Int32Array
    counts: Int32Array
    num_tokens: int
    most: int
    num_lookahead: int
    num_draft: int


def as_counts(values: npt.ArrayLike, num_rows: int, what: str) -> Int64Array:
    """Turn one number a row into an array. Raises TokenError."""
    try:
        array = np.atleast_1d(np.asarray(values))
    except ValueError as error:
        raise TokenError(f"{what} are not a flat sequence of integers: {error}") from error
    if array.shape != (num_rows,) or (array.size and array.dtype.kind not in "iu"):
        raise TokenError(f"{num_rows} rows need as many integer {what}, got {array.dtype} {array.shape}")
    return array.astype(np.int64)


def as_growth(
    state: SpaceState, batch: Int32Array, counts: npt.ArrayLike | None, num_lookahead: int, num_draft: int
) -> Growth:
    """Check the counts of a growth; None means one token each.

    Raises:
        TokenError: counts that are not integers, not one for each row, or negative.
        ConfigurationError: ``num_lookahead`` or ``num_draft`` is negative or no integer.
    """
    if num_lookahead or num_draft:
        num_lookahead = as_count(num_lookahead, "num_lookahead")
        num_draft = as_count(num_draft, "num_draft")
    else:
        num_lookahead = num_draft = 0
    if num_draft and state.is_recurrent:
        raise TokenError("drafts cannot be appended where a group is a recurrent state: it cannot be rolled back")
    if counts is None:
        return Growth(batch, state.ones[: len(batch)], len(batch), 1, num_lookahead, num_draft)
    growing = as_counts(counts, len(batch), "counts")
    most = int(growing.max(initial=0))
    if growing.min(initial=0) < 0 or most > state.config.max_tokens:
        raise TokenError(
            f"counts must lie between 0 and max_tokens = {state.config.max_tokens}, got {growing.min()} to {most}"
        )
    return Growth(batch, growing.astype(np.int32), int(growing.sum()), most, num_lookahead, num_draft)


def require_growth(state: SpaceState, growth: Growth) -> None:
    """Check that the rows can grow so.

    Raises:
        SequenceError: a row that is not running, or named twice.
        TokenError: more drafts than tokens, or a row that would exceed ``max_tokens``.
    """
    most_tokens = state.config.max_tokens - growth.num_lookahead
    batch, counts = growth.batch, growth.counts
    place = state.loops.first_unfit_growth(state.rows, batch, counts, growth.num_draft, most_tokens, state.next_mark())
    if place >= 0:
        require_status(state, batch, RUNNING)
        row = int(batch[place])
        raise TokenError(
            f"row {row} cannot take {counts[place]} tokens, {growth.num_draft} of them drafts, and "
            f"{growth.num_lookahead} lookahead slots: it has {state.rows[row, NUM_TOKENS]} tokens, and "
            f"max_tokens = {state.config.max_tokens}"
        )


def growth_shortage(state: SpaceState, growth: Growth) -> Shortage | None:
    """Tell exactly whether the free blocks suffice for growing. Changes nothing."""
    # A generous bound first: a block for every slot and a copy on write, in every group.
    bound = len(growth.batch) * (growth.most + growth.num_lookahead + 1) * len(state.groups)
    if all(bound <= counts[NUM_FREE] for counts in state.pool_counts):
        return None
    needed = dict.fromkeys(state.pools, 0)
    for group in state.groups:
        needed[group.pool.name] += state.loops.count_growth(
            group.pool.arrays, group.arrays, state.rows, growth.batch, growth.counts, growth.num_lookahead
        )
    return find_shortage(state, needed)


def append(
    state: SpaceState, ledger: StepLedger, growth: Growth, tokens: Int32Array
) -> list[tuple[int, int]] | Shortage:
    """Grow rows, or return the shortage with nothing changed.

    Returns the copies on write in the first group's pool.

    Raises:
        TokenError: the counts do not add up to the number of tokens; see also :func:`require_growth`.
    """
    if growth.num_tokens != len(tokens):
        raise TokenError(f"the counts add up to {growth.num_tokens}, but {len(tokens)} token ids were given")
    require_growth(state, growth)
    shortage = growth_shortage(state, growth)
    if shortage is not None:
        return shortage
    batch = growth.batch
    num_slots = growth.num_tokens + len(batch) * growth.num_lookahead
    state.reserve_events(len(batch), num_slots)
    if ledger.shares_pending:
        leave_shared_blocks(state, batch[growth.counts > 0])
    copies, any_full = _grow(state, ledger, growth, tokens)
    if state.media_keys:
        _tag_media(state, growth)
    if any_full:
        publish(state, ledger, batch)
    return copies


def _grow(
    state: SpaceState, ledger: StepLedger, growth: Growth, tokens: Int32Array
) -> tuple[list[tuple[int, int]], int]:
    """Give every group its blocks; return the copies on write in the first group's pool, and if a block is full."""
    scratch = state.copy_scratch
    first_copies: list[tuple[int, int]] = []
    any_full = 0
    for group in state.groups:
        pool = group.pool
        num_copies, fills = state.loops.grow(
            pool.arrays,
            group.arrays,
            state.rows,
            growth.batch,
            growth.counts,
            tokens,
            growth.num_lookahead,
            scratch,
            growth.num_draft,
            int(group is state.groups[-1]),
        )
        any_full |= fills
        if num_copies:
            added = ledger.add_copies(pool.name, scratch[:num_copies])
            if pool is state.groups[0].pool:
                first_copies += added
    return first_copies, any_full


def _tag_media(state: SpaceState, growth: Growth) -> None:
    """Note the extra keys of new blocks, in rows that have grown into a medium."""
    lengths_before = state.rows[growth.batch, NUM_TOKENS] - growth.counts
    for row in growth.batch[lengths_before < state.media_reach[growth.batch]].tolist():
        if row in state.media_keys:
            tag_blocks(state, row, state.media_keys[row])


def truncate(state: SpaceState, ledger: StepLedger, batch: Int32Array, lengths: Int64Array) -> None:
    """Roll rows back to given lengths and accept what remains.

    Raises:
        TruncationError: a length outside ``[1, num_tokens]``, or content that is gone.
        SharedPrefixError: another sequence holds the blocks; nothing was changed.
    """
    for row, length in zip(batch.tolist(), lengths.tolist(), strict=True):
        _require_truncation(state, row, length)
    state.reserve_events(len(batch), int(state.rows[batch, NUM_TOKENS].sum()))
    for row, length in zip(batch.tolist(), lengths.tolist(), strict=True):
        _shrink_row(state, row, length)
        ledger.lower_ends(row, length)
    publish(state, ledger, batch)


def _require_truncation(state: SpaceState, row: int, length: int) -> None:
    num_tokens = int(state.rows[row, NUM_TOKENS])
    if not 1 <= length <= num_tokens:
        raise TruncationError(f"row {row} has {num_tokens} tokens: it cannot be rolled back to {length}")
    for group in state.groups:
        code = obstacle(group.pool.arrays, group.arrays, state.rows, row, length)
        if code:
            _refuse(group, row, num_tokens, length, code)


def _refuse(group: Group, row: int, num_tokens: int, length: int, code: int) -> None:
    what = f"row {row} cannot be rolled back from {num_tokens} to {length} tokens"
    if code == SHARED:
        raise SharedPrefixError(f"{what}: other sequences hold its blocks of group {group.index} beyond {length}")
    if code == CONTENT_GONE:
        raise TruncationError(
            f"{what}: group {group.index} has released what position {length} reads; free it and allocate again"
        )
    assert code == STATE_ADVANCED
    raise TruncationError(
        f"{what}: the recurrent state of group {group.index} is past that and {length} is no checkpoint "
        f"(every {group.block_size} tokens); free it and allocate again"
    )


def _shrink_row(state: SpaceState, row: int, length: int) -> None:
    rows = state.rows
    columns = state.digested_columns
    digested_before = rows[row, columns]
    for group in state.groups:
        shrink(group.pool.arrays, group.arrays, rows, row, length)
    rows[row, NUM_TOKENS] = length
    rows[row, NUM_ACCEPTED] = length
    rows[row, NUM_PLANNED] = min(rows[row, NUM_PLANNED], length)
    if not state.config.prefix_caching:
        return
    for lane in np.flatnonzero(rows[row, columns] < digested_before):
        groups = state.lanes[lane]
        chains = state.chains[lane]
        if not any(rewind_chain(group.pool.arrays, group.arrays, rows, row, chains) for group in groups):
            rows[row, FROZEN] = 1  # the digest that its next block would continue is gone
