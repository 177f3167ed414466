"""The audit: every invariant of a block space, including those of its pools (:mod:`pagedkv.blocks.auditing`).

A broken invariant is a fault of this library, so the checks are assertions.
"""

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.auditing import check_pool
from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.digests import hash_block_tokens
from pagedkv.blocks.record import (
    AHEAD,
    EXTRA,
    FREE,
    HOLD_STEP,
    KEPT,
    LIFE,
    NAME,
    NULL_BLOCK,
    PARENT,
    PARENT_LIFE,
    PENDING_STEP,
    QUEUE,
    REF_COUNT,
    SPARE,
)
from pagedkv.contract.arrays import DIGEST_NBYTES
from pagedkv.space.drafting import check_drafts
from pagedkv.space.epochs import check_epochs
from pagedkv.space.explaining import check_book
from pagedkv.space.replaying import check_replays
from pagedkv.space.rows import (
    AT,
    DIRTY_FROM,
    DIRTY_TO,
    FIRST_BLOCK,
    KIND,
    LOST,
    LOST_ON_HOST,
    NAME_IN_POOL,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
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
    first_needed_token,
    root_of,
)
from pagedkv.space.state import Group, SpaceState
from pagedkv.space.states import check_states, num_named_tokens
from pagedkv.space.steps import StepLedger
from pagedkv.space.tenants import check_tenants


def check_space(state: SpaceState, ledger: StepLedger) -> None:
    """Prove that pools, index, tables and moves agree. Raises AssertionError with the first contradiction."""
    for pool in state.all_pools:
        check_pool(pool)
    _check_references(state)
    _check_moves(state, ledger)
    _check_known(state)
    for pool in state.all_pools:
        _check_contents(state, pool)
    for group in state.all_groups:
        _check_rows(state, group)
        _check_pending(state, group)
        _check_planned_once(state, ledger, group)
        _check_kept(group)
    _check_touched(state)
    if state.has_tenants:
        check_tenants(state)
    if state.counts_epochs:
        check_epochs(state)
    if state.checkpoints is not None:
        check_states(state)
    check_drafts(state)
    check_replays(state)
    if state.receipts is not None:
        state.receipts.check()
    if state.explanations is not None:
        check_book(state, state.explanations)
    for check in state.observers.check:
        check()
    vacant = np.flatnonzero(state.rows[:, STATUS] == VACANT).tolist()
    assert sorted(state.vacant_rows) == vacant, "the vacant rows are not those handed out next"


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
        start, end = int(state.rows[row, group.planned]), int(state.rows[row, group.positions])
        needed = first_needed_token(kind, span, start) // group.block_size
        if group.replays and state.rows[row, at + FIRST_BLOCK] < state.rows[row, group.arrays.parameters[SURE]]:
            needed = start // group.block_size  # a replay does not read what lies before it
        assert state.rows[row, at + FIRST_BLOCK] <= max(needed, num_sinks), (
            f"group {group.index}, row {row}: position {start} is next, but reads blocks below the first"
        )
        sinks = group.arrays.table[row, : min(num_sinks, -(-start // group.block_size))]
        assert (sinks != NULL_BLOCK).all(), (
            f"group {group.index}, row {row}: position {start} is next, but lacks a sink"
        )
        if start < end:
            is_covered[group.arrays.table[row, start // group.block_size : -(-end // group.block_size)]] = True
    for row in running:
        blocks = group.arrays.table[row, : -(-int(state.rows[row, group.positions]) // group.block_size)]
        orphaned = blocks[pending[blocks] & ~is_covered[blocks] & (blocks != NULL_BLOCK)]
        assert len(orphaned) == 0, f"group {group.index}, row {row}: no row computes the pending block {orphaned[0]}"


def _check_planned_once(state: SpaceState, ledger: StepLedger, group: Group) -> None:
    """No row is to compute again what a step in flight computes for it: its window moves on with that step."""
    for step in ledger.in_flight:
        is_alive = (state.serials[step.rows] == step.serials) & (state.rows[step.rows, STATUS] == RUNNING)
        of_step = step.plan.compute_in(group.index).ends if group in state.cross_groups else step.ends
        rows, ends = step.rows[is_alive], of_step[is_alive]
        again = np.flatnonzero(state.rows[rows, group.planned] < ends)
        assert len(again) == 0, (
            f"group {group.index}, row {rows[again[0]]}: position {state.rows[rows[again[0]], group.planned]} is next, "
            f"but step {step.plan.step_id} in flight computes it"
        )


def _check_contents(state: SpaceState, pool: BlockPool) -> None:
    """Each named block whose parent is known has the digest of its own content, unless callers brought digests.

    If its name covers tokens ahead, these are part of its content. Every peer and every tier relies on it. States kept
    inside intervals: :mod:`pagedkv.space.states`.
    """
    arrays = pool.arrays
    blocks = np.flatnonzero(arrays.records[: pool.num_blocks, NAME])
    if state.has_brought_digests or not len(blocks):
        return
    records = arrays.records[blocks]
    parents, digests = records[:, PARENT], _as_bytes(arrays.digests[blocks])
    is_first = (parents == NULL_BLOCK) & np.array([group.keeps_whole_prefix for group in state.groups])[
        records[:, NAME] - 1
    ]
    is_known = is_first | ((parents != NULL_BLOCK) & (arrays.records[parents, LIFE] == records[:, PARENT_LIFE]))
    roots = np.array([root_of(group.arrays) for group in state.groups])[records[:, NAME] - 1]
    before = np.where(is_first[:, np.newaxis], roots, arrays.digests[parents])
    if len(arrays.parent_digests):
        before, is_known = arrays.parent_digests[blocks], np.ones(len(blocks), np.bool_)
    tokens, extras = arrays.tokens[blocks], state.extra_keys.arrays
    covered = [group.block_size + group.num_ahead for group in state.groups]
    for place, parent in zip(np.flatnonzero(is_known).tolist(), _as_bytes(before[is_known]), strict=True):
        block, size = int(blocks[place]), covered[records[place, NAME] - 1]
        if num_named_tokens(state, pool, block) is not None:
            continue
        begin, end = extras.bounds[records[place, EXTRA]].tolist()
        digest = hash_block_tokens(parent, tokens[place, :size], extras.data[begin:end].tobytes())
        assert digest == digests[place], f"{pool.name}: block {block} is named for other content than it has"


def _as_bytes(digests: npt.NDArray[np.uint32]) -> list[bytes]:
    raw = digests.astype(">u4").tobytes()
    return [raw[first : first + DIGEST_NBYTES] for first in range(0, len(raw), DIGEST_NBYTES)]


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
        assert 0 <= record[group.planned] <= record[group.positions], f"{where}: planned beyond its tokens"
        is_waiting = record[group.planned] < record[group.positions] and record[STATUS] in {RUNNING, SWAPPED}
        assert not is_waiting or record[NUM_PLANNED] < record[NUM_TOKENS], f"{where}: no plan would compute it"
        assert 0 <= record[NUM_ACCEPTED] <= record[NUM_TOKENS], f"{where}: accepted beyond its tokens"
        num_filled = -(-record[group.positions] // group.block_size)
        assert mine[NUM_BLOCKS] >= num_filled, f"{where}: too few blocks"
        is_own = group not in state.cross_groups
        assert is_own or mine[NUM_BLOCKS] == num_filled, f"{where}: blocks beyond its encoder's"
        sealed = group.num_sealed(record[NUM_ACCEPTED])
        assert mine[NUM_PUBLISHED] <= mine[NUM_DIGESTED] <= sealed, f"{where}: published what is not certain"
        assert 0 <= mine[DIRTY_FROM] <= mine[DIRTY_TO] <= mine[NUM_BLOCKS], f"{where}: changes beyond the table"
        entries = group.arrays.table[row]
        held = np.flatnonzero(entries != NULL_BLOCK)
        assert (held < mine[NUM_BLOCKS]).all(), f"{where}: an entry beyond its blocks"
        assert ((held >= mine[FIRST_BLOCK]) | (held < num_sinks)).all(), f"{where}: an entry below its window"
        present = np.arange(mine[FIRST_BLOCK], mine[NUM_BLOCKS])
        assert (entries[present] != NULL_BLOCK).all(), f"{where}: a hole in its table"
