"""The audit: every invariant of a block space, including those of its pools (:mod:`pagedkv.memory.pool.auditing`).

A broken invariant is a fault of this library, so the checks are assertions.
"""

import numpy as np

from pagedkv.memory.pool.auditing import check_pool
from pagedkv.memory.pool.blocks import (
    AHEAD,
    FREE,
    HOLD_STEP,
    KEPT,
    NAME,
    NEWEST,
    NULL_BLOCK,
    OLDEST,
    PENDING_STEP,
    QUEUE,
    REF_COUNT,
    SPARE,
    UNDATED,
)
from pagedkv.memory.space.state import DraftTable, Group, SpaceState
from pagedkv.memory.space.steps import StepLedger
from pagedkv.memory.tables.rows import (
    AT,
    DIRTY_FROM,
    DIRTY_TO,
    FIRST_BLOCK,
    FROZEN,
    KIND,
    LOST,
    LOST_ON_HOST,
    NAME_IN_POOL,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_DRAFT_STATES,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_SINK_BLOCKS,
    NUM_TOKENS,
    RUNNING,
    SHEDS,
    SPAN,
    STATUS,
    SURE,
    SWAPPED,
    TOUCHED,
    VACANT,
)
from pagedkv.memory.tables.rules import first_needed_token

__all__ = ["check_draft_states", "check_space"]


def check_space(state: SpaceState, ledger: StepLedger) -> None:
    """Prove that pools, index, tables and moves agree. Raises AssertionError with the first contradiction."""
    for pool in state.all_pools:
        check_pool(pool)
    _check_references(state)
    _check_moves(state, ledger)
    _check_known(state)
    for group in state.groups:
        _check_rows(state, group)
        _check_pending(state, group)
        _check_kept(group)
        _check_inexact(state, group)
    for drafts in state.draft_tables:
        check_draft_states(state, drafts)
    _check_touched(state)
    if state.config.counts_epochs:
        _check_epochs(state)
    for feature in state.features:
        feature.check()
    for observer in state.observers:
        observer.check()
    vacant = np.flatnonzero(state.rows[:, STATUS] == VACANT).tolist()
    assert sorted(state.vacant_rows) == vacant, "the vacant rows are not those handed out next"


def _check_epochs(state: SpaceState) -> None:
    """Cached blocks, and the content of rows that publish, are of epochs that may still be hit."""
    current = state.weights_epoch
    assert not isinstance(current, str), "epochs are counted, but the epoch is no number"
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
        _check_epochs_of_row(state, row)


def _check_epochs_of_row(state: SpaceState, row: int) -> None:
    """No block of a row is older than the row's oldest epoch."""
    for group in state.cached_groups:
        pool = group.pool if state.rows[row, STATUS] == RUNNING or group.host_pool is None else group.host_pool
        blocks = group.arrays.table[row, : int(state.rows[row, group.planned]) // group.block_size]
        is_dated = (blocks != NULL_BLOCK) & (pool.arrays.records[blocks, PENDING_STEP] != state.open_step)
        dates = pool.arrays.epochs[blocks[is_dated]]  # blocks that the open step computes are dated later
        is_older = (dates[:, OLDEST] < state.oldest_epochs[row]) & (dates[:, NEWEST] != UNDATED)
        assert not is_older.any(), f"group {group.index}, row {row}: a block is older than the row"


def _check_references(state: SpaceState) -> None:
    """Reference counts equal the references of tables and of tickets that are not released."""
    statuses = state.rows[:, STATUS]
    for pools, statuses_there in ((state.pools, (RUNNING, LOST)), (state.host_pools, (SWAPPED, LOST_ON_HOST))):
        is_there = np.isin(statuses, statuses_there)
        for name, pool in pools.items():
            counted = np.zeros(pool.num_blocks, np.int64)
            for group in state.tables:
                if group.pool.name == name:
                    entries = group.arrays.table[is_there]
                    assert ((entries >= 0) & (entries < pool.num_blocks)).all(), f"{name}: a table entry is foreign"
                    counted += np.bincount(entries.ravel(), minlength=pool.num_blocks)
            counted[NULL_BLOCK] = 0
            num_in_tables = counted.copy()
            for ticket, block_ids in state.held.items():
                if pools is state.pools and ticket.pool == name:
                    counted[block_ids] += 1
            held = pool.arrays.records[: pool.num_blocks, REF_COUNT]
            wrong = np.flatnonzero(counted != held)
            assert len(wrong) == 0, (
                f"{name}: block {wrong[0]} has {held[wrong[0]]} references, the tables hold {num_in_tables[wrong[0]]}, "
                f"tickets {(counted - num_in_tables)[wrong[0]]}"
            )


def _check_moves(state: SpaceState, ledger: StepLedger) -> None:
    """Blocks that the moves of the open plan read or write are not free, and are held until that plan's step."""
    for name, pool in state.pools.items():
        for side, blocks in zip((pool, state.host_pools.get(name)), ledger.open_moves(name), strict=True):
            for block in blocks:
                assert side is not None
                record = side.arrays.records[block]
                assert record[QUEUE] != FREE and record[HOLD_STEP] >= state.open_step, (  # noqa: PT018 - one invariant
                    f"{name}: the open plan moves block {block}, which does not wait for it"
                )


def _check_known(state: SpaceState) -> None:
    """An overlapped row has known tokens from its accepted ones up to its length; no unknown tokens are on the host."""
    known, tokens, accepted = state.num_known, state.rows[:, NUM_TOKENS], state.rows[:, NUM_ACCEPTED]
    overlapped = known != 0
    statuses = state.rows[:, STATUS]
    for is_wrong, what in (
        (overlapped & (statuses == VACANT), "overlapped, and vacant"),
        (overlapped & (known < accepted), "accepted beyond its known tokens"),
        (overlapped & (known > tokens), "has more known tokens than tokens"),
        (overlapped & (known < tokens) & np.isin(statuses, (SWAPPED, LOST_ON_HOST)), "unknown tokens on the host"),
    ):
        rows = np.flatnonzero(is_wrong)
        assert len(rows) == 0, f"row {rows[0]}: {what}"
    assert state.is_overlapped or not overlapped.any(), "rows are overlapped, but is_overlapped is false"


def _check_pending(state: SpaceState, group: Group) -> None:
    """A running row computes every block pending for the open step, and every row holds what it reads next."""
    at, pending = int(group.arrays.parameters[AT]), group.pool.arrays.records[:, PENDING_STEP] == state.open_step
    kind, span, num_sinks = (int(group.arrays.parameters[column]) for column in (KIND, SPAN, NUM_SINK_BLOCKS))
    is_covered = np.zeros(len(pending), np.bool_)
    running = np.flatnonzero(state.rows[:, STATUS] == RUNNING).tolist()
    for row in running:
        start, end = int(state.rows[row, group.planned]), int(state.rows[row, NUM_TOKENS])
        needed = first_needed_token(kind, span, start) // group.block_size
        if group.replays and state.rows[row, at + FIRST_BLOCK] < state.rows[row, group.arrays.parameters[SURE]]:
            needed = start // group.block_size  # a replay does not read what lies before it
        assert state.rows[row, at + FIRST_BLOCK] <= max(needed, num_sinks), (
            f"group {group.index}, row {row}: position {start} is next, but reads blocks below the first"
        )
        if start < end:
            is_covered[group.arrays.table[row, start // group.block_size : -(-end // group.block_size)]] = True
    for row in running:
        blocks = group.arrays.table[row, : -(-int(state.rows[row, NUM_TOKENS]) // group.block_size)]
        orphaned = blocks[pending[blocks] & ~is_covered[blocks] & (blocks != NULL_BLOCK)]
        assert len(orphaned) == 0, f"group {group.index}, row {row}: no row computes the pending block {orphaned[0]}"


def _check_inexact(state: SpaceState, group: Group) -> None:
    """Blocks that a replay left inexact are not in the prefix index, and only rows on the device hold them."""
    at, sure, num_sinks = (int(group.arrays.parameters[column]) for column in (AT, SURE, NUM_SINK_BLOCKS))
    for row in np.flatnonzero(state.rows[:, STATUS] != VACANT).tolist() if group.replays else ():
        first, stop = state.rows[row, [at + FIRST_BLOCK, sure]].tolist()
        blocks = group.arrays.table[row, max(first, num_sinks) : stop]
        where = f"group {group.index}, row {row}"
        assert stop <= state.rows[row, at + NUM_BLOCKS], f"{where}: sure beyond its blocks"
        assert not len(blocks) or state.rows[row, STATUS] in {RUNNING, LOST}, f"{where}: swapped out, and inexact"
        assert not group.pool.arrays.records[blocks, NAME].any(), f"{where}: what is inexact can be found"


def _check_kept(group: Group) -> None:
    """Unreferenced cached blocks of a shedding group have a reason; in other groups AHEAD is a block of the pool."""
    records = group.pool.arrays.records
    is_named = records[:, NAME] == group.arrays.parameters[NAME_IN_POOL]
    if not group.arrays.parameters[SHEDS]:
        is_foreign = is_named & ((records[:, AHEAD] < SPARE) | (records[:, AHEAD] >= group.pool.num_blocks))
        assert not is_foreign.any(), f"group {group.index}: what a walk is to fetch is foreign"
        return
    unkept = np.flatnonzero(is_named & (records[:, REF_COUNT] == 0) & (records[:, KEPT] == 0))
    assert len(unkept) == 0, f"group {group.index}: block {unkept[0]} is cached, but no later prompt would hit it"


def check_draft_states(state: SpaceState, drafts: DraftTable) -> None:
    """Every open token of a running row has a slot with a block of its own; rows off the device have no slots."""
    at, num_slots = (int(drafts.arrays.parameters[column]) for column in (AT, NUM_DRAFT_STATES))
    records, table = drafts.pool.arrays.records, drafts.arrays.table
    assert not table[:, num_slots:].any(), f"table {drafts.index}: a slot that no position has"
    assert (state.rows[:, at + NUM_BLOCKS] == (table != NULL_BLOCK).sum(axis=1)).all(), (
        f"table {drafts.index}: slots with a block are miscounted"
    )
    blocks = table[table != NULL_BLOCK]
    assert not records[blocks, NAME].any(), f"table {drafts.index}: a draft state can be found"
    assert len(set(blocks.tolist())) == len(blocks), f"table {drafts.index}: a draft state has two slots"
    for row in np.flatnonzero(state.rows[:, STATUS] != VACANT).tolist():
        where = f"table {drafts.index}, row {row}"
        status, accepted, num_tokens = state.rows[row, [STATUS, NUM_ACCEPTED, NUM_TOKENS]].tolist()
        assert 0 <= num_tokens - accepted <= num_slots or status == LOST, f"{where}: more open tokens than slots"
        assert status in {RUNNING, LOST} or not table[row].any(), f"{where}: draft states, and not on the device"
        is_missing = any(table[row, position % num_slots] == NULL_BLOCK for position in range(accepted, num_tokens))
        assert not is_missing or status != RUNNING, f"{where}: an open token has no slot"


def _check_touched(state: SpaceState) -> None:
    """The list of touched rows has each touched row once, and every running row with anything for the next plan."""
    links = state.rows[:, TOUCHED]
    listed = [0]
    while links[listed[-1]] > 1 and len(listed) <= len(links):
        listed.append(int(links[listed[-1]]) - 1)
    assert links[listed[-1]] == 1, "the list of touched rows has no end"
    assert sorted(listed) == sorted({0, *np.flatnonzero(links).tolist()}), "a touched row is not in the list"
    has_something = state.rows[:, NUM_PLANNED] < state.rows[:, NUM_TOKENS]
    for group in state.tables:
        has_something |= state.rows[:, int(group.arrays.parameters[AT]) + DIRTY_TO] > 0
    waiting = set(np.flatnonzero(has_something & (state.rows[:, STATUS] == RUNNING)).tolist())
    assert waiting <= set(listed), f"rows {sorted(waiting - set(listed))} wait for a plan, untouched"


def _check_rows(state: SpaceState, group: Group) -> None:
    """Each row's counts and table entries are consistent."""
    at = int(group.arrays.parameters[AT])
    num_sinks = int(group.arrays.parameters[NUM_SINK_BLOCKS])
    for row in np.flatnonzero(state.rows[:, STATUS] != VACANT).tolist():
        record = state.rows[row].tolist()
        mine = record[at:]
        where = f"group {group.index}, row {row}"
        assert 0 <= record[group.planned] <= record[NUM_TOKENS], f"{where}: planned beyond its tokens"
        is_waiting = record[group.planned] < record[NUM_TOKENS] and record[STATUS] in {RUNNING, SWAPPED}
        assert not is_waiting or record[NUM_PLANNED] < record[NUM_TOKENS], f"{where}: no plan would compute it"
        assert 0 <= record[NUM_ACCEPTED] <= record[NUM_TOKENS], f"{where}: accepted beyond its tokens"
        assert mine[NUM_BLOCKS] >= -(-record[NUM_TOKENS] // group.block_size), f"{where}: too few blocks"
        full = record[NUM_ACCEPTED] // group.block_size
        assert mine[NUM_PUBLISHED] <= mine[NUM_DIGESTED] <= full, f"{where}: published what is not certain"
        assert 0 <= mine[DIRTY_FROM] <= mine[DIRTY_TO] <= mine[NUM_BLOCKS], f"{where}: changes beyond the table"
        entries = group.arrays.table[row]
        held = np.flatnonzero(entries != NULL_BLOCK)
        assert (held < mine[NUM_BLOCKS]).all(), f"{where}: an entry beyond its blocks"
        assert ((held >= mine[FIRST_BLOCK]) | (held < num_sinks)).all(), f"{where}: an entry below its window"
        present = np.arange(mine[FIRST_BLOCK], mine[NUM_BLOCKS])
        assert (entries[present] != NULL_BLOCK).all(), f"{where}: a hole in its table"
