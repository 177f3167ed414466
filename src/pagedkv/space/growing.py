"""Growing: appending tokens, and reserving slots, for whole batches of rows, all or none.

The compiled loops take one number of drafts for all rows. If rows have different numbers, the batch is checked and its
blocks are counted as a whole; then rows with equal numbers grow together, one part after the other.

The loops know no shortage: :func:`count_growth` and :func:`count_copies`, which are exact and change nothing, are
called before :func:`grow_rows`.

A row of a table, here a sliding window with one sink block::

    logical   0      1     2     3      4      5      6      7
            [sink] [null][null][null][block][block][block][----]
                                     ^FIRST_BLOCK          ^NUM_BLOCKS

A row that shares blocks which another row's step computes *relies* on that step: if the step fails, the row's memory
is undefined. A row that leaves the open step hands over the computation that others wait for, and stops relying on it.

Tokens without a planned step may be in shared blocks, after a fork before the prompt ran, or after a prefix hit on a
prompt of the same step. Every such block is *pending* for the open step, and one running row that refers to it must
compute it: its range in the next plan covers the block. When that row leaves (freed, swapped out, or given a copy on
write), other rows that refer to the block take over. This is decided block by block from the last to the first, since
a row that refers to a block need not refer to the one before::

    row a, leaving:  [A0 pending][A1 pending][A2 pending]    computes from A0 on
    row b, a fork:   [A0 pending][A1 pending][A2 pending]    takes over A0 and A1
    row c, a hit:    [S0 cached ][S1 cached ][A2 pending]    takes over A2: it starts where it shares

The heir can compute from there, since a hit on pending blocks refers to all blocks that computing them reads. A block
without an heir, since only lost rows still refer to it, is not computed; its name is dropped.

Two rules keep an heir able to compute. It inherits a start in every group, as a token goes through all layers
(:func:`~pagedkv.space.replaying.begin_together`). And whoever has computed a block, or computes it in a step in flight,
does not inherit it, since its windows move on with that step. Such a row is known by what it relies on: a row relies on
the open step only if it began in it, with blocks of another row, and has computed nothing yet.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.digests import copy_content
from pagedkv.blocks.epochs import copy_epochs
from pagedkv.blocks.life_cycle import acquire, acquire_all, acquire_often, drop_name, release
from pagedkv.blocks.loops import Like, takes
from pagedkv.blocks.record import (
    CALLED_OFF,
    NAME,
    NO_TENANT,
    NULL_BLOCK,
    OPEN_STEP,
    PENDING_STEP,
    REF_COUNT,
    SETTLED_STEP,
    PoolArrays,
    become_copy,
)
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.contract.answers import Shortage
from pagedkv.contract.arguments import as_count, as_counts
from pagedkv.contract.arrays import NO_BLOCKS, Int32Array, Int64Array
from pagedkv.errors import TokenError
from pagedkv.space.drafting import grow_slots, num_slots_lacking, require_drafts
from pagedkv.space.publishing import publish, tag_blocks
from pagedkv.space.replaying import begin_together
from pagedkv.space.rows import (
    AT,
    BLOCK_SIZE,
    CACHING,
    KIND,
    LAST_STEP,
    MARK,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_DRAFT_STATES,
    NUM_PLANNED,
    NUM_POSITIONS,
    NUM_TOKENS,
    PLANNED,
    RECURRENT,
    RUNNING,
    STATUS,
    TENANT,
    GroupArrays,
    blocks_for,
    charge_to_tenant_of_row,
    is_ascending,
    note_change,
    touch,
)
from pagedkv.space.state import Group, Needs, SpaceState, require_known, require_status
from pagedkv.space.states import drop_tail_names
from pagedkv.space.steps import StepLedger


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

    def parts(self, tokens: Int32Array) -> list[tuple["Growth", Int32Array]]:
        """Split it, and its tokens, by number of drafts. O(tokens + rows x different numbers of drafts)."""
        assert self.drafts is not None, "rows have equally many drafts"
        split, ends = [], np.cumsum(self.counts)
        for num_draft in np.unique(self.drafts).tolist():
            places = np.flatnonzero(self.drafts == num_draft)
            part = self.at(places)._replace(starts=self.starts[places], num_draft=num_draft, drafts=None)
            mine = [tokens[ends[place] - self.counts[place] : ends[place]] for place in places.tolist()]
            split.append((part, np.concatenate(mine)))
        return split


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
    if num_draft and state.is_recurrent:
        require_drafts(state, num_draft)
    starts = state.scratch.starts[: len(batch)]
    if counts is None:
        growth = Growth(batch, starts, state.scratch.ones[: len(batch)], len(batch), 1, num_lookahead, num_draft)
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
    place = state.loops[first_unfit_growth](
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
    if state.room.is_ample(growth.batch, growth.most + growth.num_lookahead + 1):
        return None
    return state.room.find_shortage(_needed_blocks(state, growth)[0])


def _needed_blocks(state: SpaceState, growth: Growth) -> tuple[Needs, Needs]:
    """Count, by tenant and pool, the blocks that growing needs; and the same with the copies that keep states.

    O(rows), sorted where rows write shared blocks or draft states take blocks beside those of the tables.
    """
    num_tenants = max(1, len(state.room.names))
    needed = {name: np.zeros(num_tenants, np.int64) for name in state.pools}
    kept = {name: np.zeros(num_tenants, np.int64) for name in state.pools}
    for group in state.groups:
        name, writers = group.pool.name, state.scratch.rows
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
    return state.loops[count_growth](
        group.pool.arrays.records,
        group.arrays,
        state.rows,
        growth.batch,
        growth.counts,
        growth.num_lookahead,
        state.scratch.rows,
        num_new,
    )


def _blocks_beside(state: SpaceState, growth: Growth) -> dict[str, int]:
    """Count, by pool, the blocks that draft states take for growing rows beside those of the groups' tables."""
    beside = dict.fromkeys(state.pools, 0)
    for part, _ in ((growth, NO_BLOCKS),) if growth.drafts is None else growth.parts(NO_BLOCKS):
        for drafts in state.draft_tables:
            beside[drafts.pool.name] += num_slots_lacking(
                state, drafts, part.batch, part.counts, part.num_draft, is_unknown=part.is_unknown
            )
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
    with state.changing:
        return extend(state, ledger, growth, tokens)


def extend(state: SpaceState, ledger: StepLedger, growth: Growth, tokens: Int32Array) -> list[tuple[int, int]]:
    """Grow rows, given enough free blocks, and publish; return the copies on write in the first group's pool."""
    copies, any_full = grow(state, ledger, growth, tokens)
    if state.is_overlapped:
        state.num_known[growth.batch[growth.counts > 0]] = 0
    if any_full:
        publish(state, ledger, growth.batch)
    for tell in state.observers.grown:
        tell(growth.batch)
    return copies


def grow(
    state: SpaceState, ledger: StepLedger, growth: Growth, tokens: Int32Array
) -> tuple[list[tuple[int, int]], int]:
    """Give every group its blocks; return the copies on write in the first group's pool, and if a block is full."""
    if state.state_groups and not state.room.is_ample(growth.batch, growth.most + growth.num_lookahead + 1):
        _give_kept_states_up(state, growth)
    if ledger.shares_pending:
        leave_shared_blocks(state, growth.batch, growth.counts, growth.num_lookahead)
    first_copies: list[tuple[int, int]] = []
    scratch, any_full = state.scratch.copies, 0
    for part, mine in ((growth, tokens),) if growth.drafts is None else growth.parts(tokens):
        if state.draft_tables:
            grow_slots(state, part.batch, part.counts, part.num_draft, is_unknown=part.is_unknown)
        for group in state.groups:
            num_copies, fills = state.loops[grow_rows](
                *group.view,
                part.batch,
                part.starts,
                part.counts,
                mine,
                part.num_lookahead,
                scratch,
                part.num_draft,
            )
            any_full |= fills
            if num_copies:
                added = ledger.add_copies(group.pool.name, scratch[:num_copies])
                if group.pool is state.groups[0].pool:
                    first_copies += added
    if state.media_keys:
        _tag_media(state, growth)
    return first_copies, any_full


def _give_kept_states_up(state: SpaceState, growth: Growth) -> None:
    """If there is no block for copies of kept states, let growing rows overwrite them in place."""
    _, keeping = _needed_blocks(state, growth)
    if state.room.find_shortage(keeping) is not None:
        for group in state.state_groups:
            drop_tail_names(*group.view, growth.batch[growth.counts > 0])


def _tag_media(state: SpaceState, growth: Growth) -> None:
    """Set the extra keys of new blocks, in rows that have grown into a medium."""
    for row in growth.batch[growth.starts < state.media_reach[growth.batch]].tolist():
        if row in state.media_keys:
            tag_blocks(state, row, state.media_keys[row])


@inlined
def slots_to_reserve(group: GroupArrays, num_lookahead: int) -> int:
    """Return the slots that a group reserves beyond a row's tokens; none for a state: its block serves all tokens."""
    return 0 if group.parameters[KIND] == RECURRENT else num_lookahead


@inlined
def writes_shared_block(records: Int32Array, group: GroupArrays, row: int, num_tokens: int) -> bool:
    """Whether the next token, or a reserved slot, goes into a partly filled block that must not change.

    The block is shared with other rows, or is a kept state with a name (:mod:`~pagedkv.space.states`).
    """
    block_size = group.parameters[BLOCK_SIZE]
    if num_tokens % block_size == 0:
        return False
    block = group.table[row, num_tokens // block_size]
    return bool(records[block, REF_COUNT] > 1 or records[block, NAME])


@takes(Like.RECORDS, Like.GROUP, Like.ROWS, Like.IDS, Like.IDS, Like.NUMBER, Like.IDS, Like.LONGS)
@compiled
def count_growth(
    records: Int32Array,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    growth: Int32Array,
    num_lookahead: int,
    writers: Int32Array,
    num_new: Int64Array,
) -> int:
    """Count the new blocks that :func:`grow` would allocate, and the rows that write a shared, partly filled block.

    Not all of these rows copy their block: the last row to refer to it does not (:func:`count_copies`), unless the
    block is a kept state.

    Args:
        records: the records of the pool's blocks.
        writers: int32 ``[rows]``; receives these rows.
        num_new: int64 ``[tenants]``, one without tenants; the new blocks are added by tenant.

    Returns how many writers there are.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    reserve = slots_to_reserve(group, num_lookahead)
    num_writers = 0
    for place in range(len(batch)):
        row = batch[place]
        num_tokens = rows[row, NUM_TOKENS]
        if growth[place] + reserve > 0 and writes_shared_block(records, group, row, num_tokens):
            writers[num_writers] = row
            num_writers += 1
        wanted = blocks_for(num_tokens + growth[place] + reserve, block_size)
        tenant = rows[row, TENANT] if len(num_new) > 1 else 0
        num_new[tenant] += max(0, wanted - rows[row, at + NUM_BLOCKS])
    return num_writers


def count_copies(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, writers: Int32Array, num_tenants: int
) -> tuple[Int64Array, Int64Array]:
    """Count, by tenant, the copies on write of rows that write a shared block: all copy but the last to refer to it.

    The last row copies only a kept state. Returns the number of copies by the other rows, and that by last rows. Rows
    of different tenants share no partly filled block, since forks have their parent's tenant.
    """
    partial = group.table[writers, rows[writers, NUM_TOKENS] // group.parameters[BLOCK_SIZE]]
    blocks, first, num_writers = np.unique(partial, return_index=True, return_counts=True)
    records = pool.records[blocks]
    tenants = rows[writers[first], TENANT] if num_tenants > 1 else np.zeros(len(blocks), np.int32)
    num_forced = np.minimum(num_writers, records[:, REF_COUNT] - 1)
    num_all = np.minimum(num_writers, records[:, REF_COUNT] - (records[:, NAME] == 0))
    by_tenant = np.zeros((2, num_tenants), np.int64)
    np.add.at(by_tenant[0], tenants, num_forced)
    np.add.at(by_tenant[1], tenants, num_all - num_forced)
    return by_tenant[0], by_tenant[1]


@takes(Like.POOL, Like.GROUP, Like.ROWS, Like.IDS, Like.IDS, Like.IDS, Like.IDS, Like.NUMBER, Like.PAIRS, Like.NUMBER)
@compiled
def grow_rows(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    batch: Int32Array,
    starts: Int32Array,
    growth: Int32Array,
    tokens: Int32Array,
    num_lookahead: int,
    copies: Int32Array,
    num_draft: int,
) -> tuple[int, int]:
    """Give each row of a batch the blocks for its next tokens and lookahead slots, and record the known tokens.

    The caller has checked that there are enough free blocks. Every group sets the rows' numbers of tokens, to equal
    values.

    Args:
        starts: int32 ``[rows]``, the tokens that each row had before any group grew.
        tokens: int32 ``[sum of growth]``, or empty if the tokens are unknown.
        copies: int32 ``[rows, 2]``; ``copies[i]`` becomes (source, destination) of a copy on write.
        num_draft: trailing tokens of each row that are drafts; all before become accepted.

    Returns the number of copies on write, and 1 if a full block of accepted tokens waits for its digest, else 0.
    """
    reserve = slots_to_reserve(group, num_lookahead)
    block_size = group.parameters[BLOCK_SIZE]
    is_state = group.parameters[KIND] == RECURRENT
    # Unsigned indices: for signed ones Numba checks the sign, which takes 9.1 us instead of 6.7 for 1,024 rows.
    num_blocks_column = unsigned(group.parameters[AT] + NUM_BLOCKS)
    num_digested_column = unsigned(group.parameters[AT] + NUM_DIGESTED)
    num_copies = 0
    next_token = 0
    any_full = 0
    for place in range(len(batch)):
        row = unsigned(batch[place])
        count = growth[place]
        start = starts[place]
        end = start + count
        entry = unsigned(start // block_size)
        offset = start % block_size
        block = unsigned(group.table[row, entry])
        is_partial = offset > 0 and count + reserve > 0
        if is_partial and (pool.records[block, REF_COUNT] > 1 or (is_state and pool.records[block, NAME] != 0)):
            block = copy_on_write(pool, group, rows, row, entry, copies, num_copies)
            num_copies += 1
        if end + reserve > rows[row, num_blocks_column] * block_size:
            extend_row(pool, group, rows, row, end + reserve)
            block = unsigned(group.table[row, entry])
        if count == 1:
            # What write_tokens does, for a block that is known: 2 us less for 1,024 rows.
            pool.records[block, PENDING_STEP] = pool.counts[OPEN_STEP]
            if group.parameters[CACHING] and len(tokens) > 0:
                pool.tokens[block, unsigned(offset)] = tokens[next_token]
        else:
            write_tokens(pool, group, row, start // block_size, offset, tokens, next_token, count)
        next_token += count
        if count > 0:
            if end - num_draft >= (rows[row, num_digested_column] + 1) * block_size:
                any_full = 1
            rows[row, NUM_TOKENS] = end
            rows[row, NUM_ACCEPTED] = end - num_draft
            touch(rows, row)
    return num_copies, any_full & group.parameters[CACHING]


@compiled
def write_tokens(
    pool: PoolArrays,
    group: GroupArrays,
    row: int,
    index: int,
    offset: int,
    tokens: Int32Array,
    first_token: int,
    num_tokens: int,
) -> None:
    """Record a run of tokens, if known, in a row's blocks, from slot ``offset`` of logical block ``index`` on.

    The blocks become pending: the open step will compute their content.
    """
    block_size = group.parameters[BLOCK_SIZE]
    open_step = pool.counts[OPEN_STEP]
    next_token = first_token
    end = first_token + num_tokens
    while next_token < end:
        block = unsigned(group.table[row, index])
        pool.records[block, PENDING_STEP] = open_step
        num_written = min(end - next_token, block_size - offset)
        if group.parameters[CACHING] and len(tokens) > 0:
            for place in range(num_written):
                pool.tokens[block, offset + place] = tokens[next_token + place]
        next_token += num_written
        index += 1
        offset = 0


@inlined
def extend_row(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, num_slots: int) -> None:
    """Give a row new blocks for ``num_slots`` slots in all."""
    at = group.parameters[AT]
    held = rows[row, at + NUM_BLOCKS]
    wanted = blocks_for(num_slots, group.parameters[BLOCK_SIZE])
    charge_to_tenant_of_row(pool, rows, row)
    if wanted == held + 1:
        group.table[row, held] = acquire_often(pool)
    else:
        acquire_all(pool, group.table[row, held:wanted])
    rows[row, at + NUM_BLOCKS] = wanted
    note_change(rows, row, at, held, wanted)


@inlined
def copy_block(pool: PoolArrays, shared: int) -> int:
    """Allocate a block that the open plan makes a copy of another one, and return it."""
    own = acquire(pool)
    become_copy(pool.records, shared, pool.records, own, pool.counts[OPEN_STEP])
    copy_content(pool, shared, pool, own, pool.tokens.shape[1])
    if len(pool.epochs):
        copy_epochs(pool, shared, pool, own)
    return own


@compiled
def copy_on_write(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, entry: int, copies: Int32Array, num_copies: int
) -> int:
    """Replace a row's shared, partly filled block by a copy, and return the copy."""
    index = int(entry)
    shared = group.table[row, index]
    charge_to_tenant_of_row(pool, rows, row)
    own = copy_block(pool, shared)
    release(pool, shared, rows[row, LAST_STEP])
    group.table[row, index] = own
    note_change(rows, row, group.parameters[AT], index, index + 1)
    copies[num_copies, 0] = shared
    copies[num_copies, 1] = own
    return own


@takes(Like.ROWS, Like.IDS, Like.IDS, Like.NUMBER, Like.NUMBER, Like.NUMBER, Like.IDS)
@compiled
def first_unfit_growth(
    rows: Int32Array,
    batch: Int32Array,
    growth: Int32Array,
    num_draft: int,
    most_tokens: int,
    mark: int,
    starts: Int32Array,
) -> int:
    """Find the first place in a batch with a row that cannot grow, or -1.

    Such a row is not running (see :func:`~pagedkv.space.rows.first_unfit_row`), would exceed
    ``most_tokens``, or gets fewer tokens than drafts.

    Args:
        starts: int32 ``[rows]``; receives each row's number of tokens.
    """
    ascends = is_ascending(batch)  # then no row occurs twice; marking all took 0.6 us of 1.9 for 1,024 rows
    for place in range(len(batch)):
        if batch[place] < 0 or batch[place] >= len(rows):
            return place
        row = unsigned(batch[place])
        if rows[row, STATUS] != RUNNING:
            return place
        if not ascends:
            if rows[row, MARK] == mark:
                return place
            rows[row, MARK] = mark
        num_tokens = rows[row, NUM_TOKENS]
        if growth[place] < num_draft or num_tokens + growth[place] > most_tokens:
            return place
        starts[place] = num_tokens
    return -1


def note_reliance(
    state: SpaceState, ledger: StepLedger, group: Group, batch: Int32Array, block_ids: Int32Array
) -> None:
    """Record that rows share blocks which another row's step still has to compute."""
    arrays = group.pool.arrays
    step = state.loops[last_pending_step](arrays.records, arrays.counts, block_ids)
    if step:
        ledger.shares_pending |= step == state.open_step
        state.relies_on[batch] = np.maximum(state.relies_on[batch], step)


def hand_over(state: SpaceState, row: int, leaving_mark: int) -> None:
    """Before ``row`` releases its blocks: let other rows compute the tokens that they wait for.

    Rows marked ``leaving_mark`` release their blocks as well.
    """
    if state.rows[row, NUM_PLANNED] < state.rows[row, NUM_TOKENS]:
        for group in state.all_groups:
            hand_over_blocks(*group.view, state.relies_on, row, leaving_mark)
        begin_together(state)


def stop_relying(state: SpaceState, row: int) -> None:
    """Before ``row`` leaves the open step: let it compute itself, later, what another row was to compute for it."""
    if state.relies_on[row] >= state.open_step:
        starts = [dependency_start(group.arrays, state.rows, row) for group in state.all_groups]
        for group, start in zip(state.all_groups, starts, strict=True):
            lower_start(group.arrays, state.rows, row, start)
        begin_together(state)


def leave_shared_blocks(state: SpaceState, batch: Int32Array, counts: Int32Array, num_lookahead: int) -> None:
    """Before a batch grows: let rows that will copy a pending block on write compute it themselves.

    The copy is made before the step's forward pass, so tokens of the block that the open step computes are computed
    twice: by the row in its copy, and by one remaining holder in the original. All writers of a block leave it,
    except the last row to refer to it, which copies nothing.

    Cost: O(table entries) where there are such rows, however many blocks they share.
    """
    for group in state.groups:
        growing = batch[counts + slots_to_reserve(group.arrays, num_lookahead) > 0]
        places = np.empty(len(growing), np.int32)
        writers = growing[places[: collect_pending_writers(*group.view, growing, places)]]
        if not len(writers):
            continue
        indexes = state.rows[writers, NUM_TOKENS] // group.block_size
        blocks, of_writer = np.unique(group.arrays.table[writers, indexes], return_inverse=True)
        numbers = np.zeros(group.pool.num_blocks, np.int32)
        numbers[blocks] = np.arange(1, len(blocks) + 1)
        leaves = np.zeros(len(state.rows), np.int32)
        order = np.argsort(of_writer, kind="stable")
        rank = np.arange(len(order)) - np.searchsorted(of_writer[order], of_writer[order])
        num_copies = group.pool.arrays.records[blocks, REF_COUNT] - 1
        leaving = order[rank < num_copies[of_writer[order]]]
        leaves[writers[leaving]] = of_writer[leaving] + 1
        starts = np.empty((len(blocks) + 1, 4), np.int32)
        leave_blocks(*group.view, state.relies_on, np.unique(indexes), numbers, leaves, starts)
    begin_together(state)


NOBODY: Final = -1
COMPUTED: Final = -2  # this less a row: that row has computed the block


@inlined
def has_computed(
    group: GroupArrays, rows: Int32Array, relies_on: Int32Array, open_step: int, row: int, position: int
) -> bool:
    """Whether a row has computed a position of its own accord, or computes it in a step in flight.

    A row that relies on no other in the open step has the content before its start.
    """
    return bool(relies_on[row] < open_step and rows[row, group.parameters[PLANNED]] > position)


@compiled
def lower_start(group: GroupArrays, rows: Int32Array, row: int, position: int) -> None:
    """Lower the start of a row's next range to ``position`` in one group, if it is greater.

    Groups with prefix caching have one common start. A group outside has its own; a row that computes there also
    computes at least its last token in the other groups, since only rows that do are in a plan.
    """
    column = group.parameters[PLANNED]
    if rows[row, column] > position:
        rows[row, column] = position
        rows[row, NUM_PLANNED] = min(rows[row, NUM_PLANNED], rows[row, NUM_TOKENS] - 1)
        touch(rows, row)


@compiled
def hand_over_blocks(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, relies_on: Int32Array, row: int, leaving_mark: int
) -> None:
    """Find heirs in one group for the pending blocks that ``row`` was to compute and others share.

    Rows marked ``leaving_mark`` leave as well.

    Args:
        relies_on: int32 ``[rows]``, the last step in which another row computes what each row shares.
    """
    at = group.parameters[AT]
    block_size = group.parameters[BLOCK_SIZE]
    start = rows[row, group.parameters[PLANNED]]
    open_step = pool.counts[OPEN_STEP]
    heir = NOBODY
    num_blocks = blocks_for(rows[row, group.parameters[NUM_POSITIONS]], block_size)
    for index in range(num_blocks - 1, start // block_size - 1, -1):
        block = group.table[row, index]
        is_pending = pool.records[block, PENDING_STEP] == open_step
        if block == NULL_BLOCK or not is_pending or pool.records[block, REF_COUNT] == 1:
            continue
        position = max(start, index * block_size)
        if (
            heir < 0
            or index >= rows[heir, at + NUM_BLOCKS]
            or group.table[heir, index] != block
            or has_computed(group, rows, relies_on, open_step, heir, position)
        ):
            heir = find_heir(group, rows, relies_on, open_step, block, index, position, leaving_mark)
        if heir >= 0:
            lower_start(group, rows, heir, position)
        elif heir != NOBODY:
            leave_computed(pool, group, rows, COMPUTED - heir, block, index)
        elif pool.records[block, NAME]:
            drop_name(pool, block, CALLED_OFF)


@compiled
def leave_computed(pool: PoolArrays, group: GroupArrays, rows: Int32Array, row: int, block: int, index: int) -> None:
    """Note that the open step does not compute a block, since a row that stays has computed all of it."""
    end = min(rows[row, group.parameters[NUM_POSITIONS]], (index + 1) * group.parameters[BLOCK_SIZE])
    if rows[row, group.parameters[PLANNED]] >= end:
        pool.records[block, PENDING_STEP] = rows[row, LAST_STEP]


@compiled
def find_heir(
    group: GroupArrays,
    rows: Int32Array,
    relies_on: Int32Array,
    open_step: int,
    block: int,
    index: int,
    position: int,
    leaving_mark: int,
) -> int:
    """Find the running row, not marked as leaving, that refers to a block and has the earliest start.

    ``NOBODY`` if there is none; ``COMPUTED`` less a row if all have computed ``position`` (:func:`has_computed`).
    """
    at = group.parameters[AT]
    planned = group.parameters[PLANNED]
    heir = NOBODY
    for row in range(len(rows)):
        if (
            rows[row, STATUS] == RUNNING
            and rows[row, MARK] != leaving_mark
            and index < rows[row, at + NUM_BLOCKS]
            and group.table[row, index] == block
        ):
            if has_computed(group, rows, relies_on, open_step, row, position):
                heir = COMPUTED - row if heir < 0 else heir
            elif heir < 0 or rows[row, planned] < rows[heir, planned]:
                heir = row
    return heir


@compiled
def dependency_start(group: GroupArrays, rows: Int32Array, row: int) -> int:
    """Return the first position of ``row`` that another row is to compute in the open step.

    It is the row's number of positions if there is none.
    """
    at = group.parameters[AT]
    planned = group.parameters[PLANNED]
    block_size = group.parameters[BLOCK_SIZE]
    length = group.parameters[NUM_POSITIONS]
    start = rows[row, length]
    num_blocks = blocks_for(start, block_size)
    for other in range(len(rows)):
        if other == row or rows[other, STATUS] != RUNNING or rows[other, planned] >= rows[other, length]:
            continue
        stop = min(num_blocks, rows[other, at + NUM_BLOCKS])
        for index in range(rows[other, planned] // block_size, stop):
            block = group.table[row, index]
            if block != NULL_BLOCK and block == group.table[other, index]:
                start = min(start, max(rows[other, planned], index * block_size))
                break
    return int(start)


@compiled
def collect_pending_writers(
    pool: PoolArrays, group: GroupArrays, rows: Int32Array, batch: Int32Array, out: Int32Array
) -> int:
    """Write the places in a batch of rows that will copy, at their next write, a block that the open step computes."""
    num_writers = 0
    for place in range(len(batch)):
        row = batch[place]
        num_tokens = rows[row, NUM_TOKENS]
        if writes_shared_block(pool.records, group, row, num_tokens):
            block = group.table[row, num_tokens // group.parameters[BLOCK_SIZE]]
            if pool.records[block, PENDING_STEP] == pool.counts[OPEN_STEP]:
                out[num_writers] = place
                num_writers += 1
    return num_writers


@compiled
def leave_blocks(
    pool: PoolArrays,
    group: GroupArrays,
    rows: Int32Array,
    relies_on: Int32Array,
    indexes: Int32Array,
    numbers: Int32Array,
    leaves: Int32Array,
    starts: Int32Array,
) -> None:
    """Let each leaving row compute a pending block in its copy, and one staying row in the original.

    A block has the content before the latest start of those that rely on no other row in the open step, and a copy of
    it has no more. Two passes over the running rows, however many blocks are left.

    Args:
        relies_on: int32 ``[rows]``, the last step in which another row computes what each row shares.
        indexes: int32 ``[any]``, the logical blocks that are left, ascending.
        numbers: int32 ``[blocks]``, a number from 1 on for each block that is left, else 0.
        leaves: int32 ``[max_sequences]``, the number of the block that a row leaves, or 0.
        starts: int32 ``[numbers + 1, 4]``, scratch: by number the earliest start of its holders, the latest of those
            that rely on none, the earliest of those which stay, and the first row that stays.
    """
    open_step = pool.counts[OPEN_STEP]
    starts[:] = -1
    for row in range(len(rows)):
        if rows[row, STATUS] == RUNNING:
            _note_starts(group, rows, row, indexes, numbers, leaves[row], relies_on[row] < open_step, starts)
    for number in range(1, len(starts)):
        starts[number, EARLIEST] = max(starts[number, EARLIEST], starts[number, HAS_CONTENT])
    for row in range(len(rows)):
        if leaves[row] != 0:
            lower_start(group, rows, row, starts[leaves[row], EARLIEST])
    for number in range(1, len(starts)):
        if starts[number, STAYING] > starts[number, EARLIEST]:
            lower_start(group, rows, starts[number, HEIR], starts[number, EARLIEST])


EARLIEST: Final = 0
HAS_CONTENT: Final = 1
STAYING: Final = 2
HEIR: Final = 3


@compiled
def _note_starts(
    group: GroupArrays,
    rows: Int32Array,
    row: int,
    indexes: Int32Array,
    numbers: Int32Array,
    leaving: int,
    relies_on_none: bool,  # noqa: FBT001 - Numba takes arguments by position
    starts: Int32Array,
) -> None:
    """Note in ``starts``, for each numbered block that a row holds, where the row would begin to compute it."""
    block_size = group.parameters[BLOCK_SIZE]
    for place in range(len(indexes)):
        index = indexes[place]
        if index >= rows[row, group.parameters[AT] + NUM_BLOCKS] or index * block_size >= rows[row, NUM_TOKENS]:
            break
        number = numbers[group.table[row, index]]
        if number == 0:
            continue
        start = max(rows[row, group.parameters[PLANNED]], index * block_size)
        if starts[number, EARLIEST] < 0 or start < starts[number, EARLIEST]:
            starts[number, EARLIEST] = start
        if relies_on_none:
            starts[number, HAS_CONTENT] = max(starts[number, HAS_CONTENT], start)
        if number != leaving and starts[number, STAYING] < 0:
            starts[number, HEIR] = row
        if number != leaving and (starts[number, STAYING] < 0 or start < starts[number, STAYING]):
            starts[number, STAYING] = start


@takes(Like.RECORDS, Like.COUNTS, Like.IDS)
@compiled
def last_pending_step(records: Int32Array, counts: Int64Array, block_ids: Int32Array) -> int:
    """Return the last step that writes any of these blocks, or 0 if all are computed."""
    last = 0
    for block in block_ids:
        if block != NULL_BLOCK:
            last = max(last, records[block, PENDING_STEP])
    return int(last) if last > counts[SETTLED_STEP] else 0
