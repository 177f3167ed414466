"""Growing: appending tokens, and reserving slots, for whole batches of rows, all or none.

The compiled loops take one number of drafts for all rows. If rows have different numbers, the batch is checked and its
blocks are counted as a whole; then rows with equal numbers grow together, one part after the other.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.blocks import NO_TENANT
from pagedkv.contract.answers import Shortage
from pagedkv.contract.arguments import as_count, as_counts
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.errors import TokenError
from pagedkv.space.batches import require_known, require_status
from pagedkv.space.pending import leave_shared_blocks
from pagedkv.space.publishing import publish, tag_blocks
from pagedkv.space.shortage import Needs
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.steps import StepLedger
from pagedkv.tables.growing import count_copies
from pagedkv.tables.rows import NUM_ACCEPTED, NUM_DRAFT_STATES, NUM_TOKENS, RUNNING, TENANT

__all__ = ["Growth", "append", "as_growth", "extend", "grow", "growth_shortage", "require_growth"]


class Growth(NamedTuple):
    """What a batch of rows is to grow by. The counts are checked, the rows are not.

    Args:
        batch: int32 ``[n]``, the rows.
        starts: int32 ``[n]``, the tokens that each row has; filled by :func:`require_growth`.
        counts: int32 ``[n]``, tokens that each row gets.
        num_tokens: their sum; most: the largest of them.
        num_lookahead: slots reserved beyond the tokens of every row.
        num_draft: trailing tokens of every row that are guesses; the largest number if rows differ.
        is_unknown: whether the tokens are unknown.
        drafts: int32 ``[n]``, trailing tokens of each row that are guesses, if rows differ.
    """

    batch: Int32Array
    starts: Int32Array
    counts: Int32Array
    num_tokens: int
    most: int
    num_lookahead: int
    num_draft: int
    is_unknown: bool = False
    drafts: Int32Array | None = None

    def at(self, places: npt.NDArray[np.integer] | slice) -> "Growth":
        """Return the growth of the rows at these places of the batch."""
        drafts = None if self.drafts is None else self.drafts[places]
        return self._replace(batch=self.batch[places], counts=self.counts[places], drafts=drafts)

    def parts(self) -> Iterator[tuple["Growth", npt.NDArray[np.integer]]]:
        """Split it by number of drafts; yield each part and its places. O(rows x different numbers of drafts)."""
        assert self.drafts is not None, "rows have equally many drafts"
        for num_draft in np.unique(self.drafts).tolist():
            places = np.flatnonzero(self.drafts == num_draft)
            part = self.at(places)
            yield part._replace(starts=self.starts[places], num_draft=num_draft, drafts=None), places


def as_growth(
    state: SpaceState,
    batch: Int32Array,
    counts: npt.ArrayLike | None,
    num_lookahead: int,
    num_draft: int | npt.ArrayLike,
) -> Growth:
    """Check the counts of a growth; None means one token each.

    Raises:
        TokenError: counts, or numbers of drafts, that are not integers, not one for each row, or negative.
        ConfigurationError: ``num_lookahead``, or ``num_draft`` as one number, is negative or no integer.
    """
    if type(num_lookahead) is not int or num_lookahead:  # a decode step's plain 0 needs no check
        num_lookahead = as_count(num_lookahead, "num_lookahead")
    drafts: Int32Array | None = None
    if type(num_draft) is not int or num_draft:
        num_draft, drafts = _as_drafts(num_draft, len(batch), state.config.max_tokens)
    assert isinstance(num_draft, int)
    for feature in state.features if num_draft else ():
        feature.require_drafts(num_draft)
    starts = state.start_scratch[: len(batch)]
    if counts is None:
        growth = Growth(batch, starts, state.ones[: len(batch)], len(batch), 1, num_lookahead, num_draft)
        return growth if drafts is None else growth._replace(drafts=drafts)
    growing = as_counts(counts, len(batch), "counts")
    most = int(growing.max(initial=0))
    if growing.min(initial=0) < 0 or most > state.config.max_tokens:
        raise TokenError(
            f"counts must lie between 0 and max_tokens = {state.config.max_tokens}, got {growing.min()} to {most}"
        )
    each, total = growing.astype(np.int32), int(growing.sum())
    growth = Growth(batch, starts, each, total, most, num_lookahead, num_draft)
    return growth if drafts is None else growth._replace(drafts=drafts)


def _as_drafts(num_draft: int | npt.ArrayLike, num_rows: int, max_tokens: int) -> tuple[int, Int32Array | None]:
    """Check the numbers of drafts; return the largest, and each row's if they differ."""
    if not isinstance(num_draft, list | tuple | np.ndarray) or (
        isinstance(num_draft, np.ndarray) and not num_draft.ndim
    ):
        return as_count(num_draft, "num_draft"), None
    drafts = as_counts(num_draft, num_rows, "num_draft")
    least, most = int(drafts.min(initial=0)), int(drafts.max(initial=0))
    if least < 0 or most > max_tokens:
        raise TokenError(f"num_draft must lie between 0 and max_tokens = {max_tokens}, got {least} to {most}")
    return most, drafts.astype(np.int32) if len(drafts) and drafts.min() < most else None


def require_growth(state: SpaceState, growth: Growth) -> None:
    """Check that the rows can grow so far.

    Raises:
        SequenceError: a row that is not running, or named twice.
        TokenError: more drafts than tokens, or a row that would exceed ``max_tokens``.
    """
    most_tokens = state.config.max_tokens - growth.num_lookahead
    batch, counts = growth.batch, growth.counts
    num_draft = growth.num_draft if growth.drafts is None else 0
    place = state.loops.first_unfit_growth(
        state.rows, batch, counts, num_draft, most_tokens, state.next_mark(), growth.starts
    )
    if place < 0 and growth.drafts is not None and (counts < growth.drafts).any():
        place = int((counts < growth.drafts).argmax())
    if place >= 0:
        require_status(state, batch, RUNNING)
        row = int(batch[place])
        num_draft = growth.num_draft if growth.drafts is None else int(growth.drafts[place])
        raise TokenError(
            f"row {row} cannot take {counts[place]} tokens, {num_draft} of them drafts, and "
            f"{growth.num_lookahead} lookahead slots: it has {state.rows[row, NUM_TOKENS]} tokens, and "
            f"max_tokens = {state.config.max_tokens}"
        )


def growth_shortage(state: SpaceState, growth: Growth) -> Shortage | None:
    """Return the exact shortage of free blocks for growing, if any. Changes nothing."""
    if _is_ample(state, growth):
        return None
    return state.room.find_shortage(_needed_blocks(state, growth)[0])


def _is_ample(state: SpaceState, growth: Growth) -> bool:
    """Return whether every group has a free block for every slot and a copy on write for every row: a quick bound."""
    most = (growth.most + growth.num_lookahead + 1) * len(state.groups)
    return state.room.is_ample(growth.batch, most + state.most_blocks_beside)


def _needed_blocks(state: SpaceState, growth: Growth) -> tuple[Needs, Needs]:
    """Count, by tenant and pool, the blocks that growing needs; and the same with the copies that keep states.

    O(rows), sorted where rows write shared blocks or features take blocks beside those of the tables.
    """
    num_tenants = max(1, len(state.room.names))
    needed = {name: np.zeros(num_tenants, np.int64) for name in state.pools}
    kept = {name: np.zeros(num_tenants, np.int64) for name in state.pools}
    for group in state.groups:
        name, writers = group.pool.name, state.row_scratch
        num_writers = _count_growth(state, group, growth, needed[name])
        if num_writers and group.arrays.parameters[NUM_DRAFT_STATES] and not growth.is_unknown:
            num_writers = _count_writers(state, group, growth)
        if num_writers:
            copies = count_copies(group.pool.arrays, group.arrays, state.rows, writers[:num_writers], num_tenants)
            needed[name] += copies[0]
            kept[name] += copies[1]
    tenants = np.unique(state.rows[growth.batch, TENANT]).tolist() if num_tenants > 1 else [NO_TENANT]
    if state.most_blocks_beside:
        for tenant, places in state.room.by_tenant(growth.batch):
            for name, count in _blocks_beside(state, growth.at(places)).items():
                needed[name][tenant] += count
    return (
        {tenant: {name: int(counts[tenant]) for name, counts in needed.items()} for tenant in tenants},
        {
            tenant: {name: int(counts[tenant] + kept[name][tenant]) for name, counts in needed.items()}
            for tenant in tenants
        },
    )


def _count_growth(state: SpaceState, group: Group, growth: Growth, num_new: Int64Array) -> int:
    """Add the new blocks of a group by tenant; return how many rows write shared blocks, listed in the scratch."""
    return state.loops.count_growth(
        group.pool.arrays.records,
        group.arrays,
        state.rows,
        growth.batch,
        growth.counts,
        growth.num_lookahead,
        state.row_scratch,
        num_new,
    )


def _blocks_beside(state: SpaceState, growth: Growth) -> dict[str, int]:
    """Count, by pool, the blocks that features take for growing rows beside those of the groups' tables."""
    beside = dict.fromkeys(state.pools, 0)
    parts = [growth] if growth.drafts is None else [part for part, _ in growth.parts()]
    for feature in state.features:
        for part in parts:
            feature.count_growth(part, beside)
    return beside


def _count_writers(state: SpaceState, group: Group, growth: Growth) -> int:
    """Count the rows that copy their state on write; rows that accept a state which only they hold copy nothing."""
    rows = state.rows[growth.batch]
    copying = growth.at(np.flatnonzero(rows[:, group.planned] <= rows[:, NUM_ACCEPTED]))
    return _count_growth(state, group, copying, np.zeros(max(1, len(state.room.names)), np.int64))


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
    if state.is_overlapped:
        require_known(state, growth.batch, "appended to")
    shortage = growth_shortage(state, growth)
    if shortage is not None:
        return shortage
    state.is_changing = True
    copies = extend(state, ledger, growth, tokens)
    state.is_changing = False
    return copies


def extend(state: SpaceState, ledger: StepLedger, growth: Growth, tokens: Int32Array) -> list[tuple[int, int]]:
    """Grow rows, given enough free blocks, and publish; return the copies on write in the first group's pool."""
    copies, any_full = grow(state, ledger, growth, tokens)
    if state.is_overlapped:
        state.num_known[growth.batch[growth.counts > 0]] = 0
    if any_full:
        publish(state, ledger, growth.batch)
    for observer in state.observers.grown:
        observer.grown(growth.batch)
    return copies


def grow(
    state: SpaceState, ledger: StepLedger, growth: Growth, tokens: Int32Array
) -> tuple[list[tuple[int, int]], int]:
    """Give every group its blocks; return the copies on write in the first group's pool, and if a block is full."""
    if state.state_groups and not _is_ample(state, growth):
        _, keeping = _needed_blocks(state, growth)
        if state.room.find_shortage(keeping) is not None:
            for feature in state.features:
                feature.giving_way(growth.batch[growth.counts > 0])
    if ledger.shares_pending:
        leave_shared_blocks(state, growth.batch, growth.counts, growth.num_lookahead)
    if growth.drafts is None:
        copies, any_full = _grow_evenly(state, ledger, growth, tokens)
    else:
        copies, any_full = _grow_by_parts(state, ledger, growth, tokens)
    if state.media_keys:
        _tag_media(state, growth)
    return copies, any_full


def _grow_by_parts(
    state: SpaceState, ledger: StepLedger, growth: Growth, tokens: Int32Array
) -> tuple[list[tuple[int, int]], int]:
    """Grow rows with different numbers of drafts, part by part."""
    ends = np.cumsum(growth.counts)
    copies: list[tuple[int, int]] = []
    any_full = 0
    starts = growth.starts.copy()  # the loops' own scratch
    for part, places in growth._replace(starts=starts).parts():
        mine = np.concatenate([tokens[ends[place] - growth.counts[place] : ends[place]] for place in places.tolist()])
        added, fills = _grow_evenly(state, ledger, part, mine)
        copies += added
        any_full |= fills
    return copies, any_full


def _grow_evenly(
    state: SpaceState, ledger: StepLedger, growth: Growth, tokens: Int32Array
) -> tuple[list[tuple[int, int]], int]:
    """Grow rows that all have the same number of drafts."""
    for feature in state.features:
        feature.growing(growth)
    scratch = state.copy_scratch
    first_copies: list[tuple[int, int]] = []
    any_full = 0
    for group in state.groups:
        pool = group.pool
        num_copies, fills = state.loops.grow(
            *group.view,
            growth.batch,
            growth.starts,
            growth.counts,
            tokens,
            growth.num_lookahead,
            scratch,
            growth.num_draft,
        )
        any_full |= fills
        if num_copies:
            added = ledger.add_copies(pool.name, scratch[:num_copies])
            if pool is state.groups[0].pool:
                first_copies += added
    return first_copies, any_full


def _tag_media(state: SpaceState, growth: Growth) -> None:
    """Set the extra keys of new blocks, in rows that have grown into a medium."""
    for row in growth.batch[growth.starts < state.media_reach[growth.batch]].tolist():
        if row in state.media_keys:
            tag_blocks(state, row, state.media_keys[row])
