"""The audit: every invariant of a block space, proved in O(blocks + table entries).

An invariant that does not hold is a fault of this library, so these are assertions.
"""

from itertools import islice

import numpy as np

from pagedkv.pool.block_pool import BlockPool
from pagedkv.pool.blocks import (
    AHEAD,
    DEFERRED,
    FREE,
    HOLD_STEP,
    IN_USE,
    LIFE,
    NAME,
    NEXT,
    NULL_BLOCK,
    NUM_CACHED,
    NUM_DEFERRED,
    NUM_DEFERRED_LISTS,
    NUM_FREE,
    NUM_NAMED,
    NUM_SENTINELS,
    OPEN_STEP,
    PARENT,
    PARENT_LIFE,
    PENDING_STEP,
    PREVIOUS,
    QUEUE,
    REF_COUNT,
    SETTLED_STEP,
    SUCCESSOR,
)
from pagedkv.pool.free_queue import blocks_of_list, deferred_sentinel, protected_sentinel
from pagedkv.pool.prefix_index import bucket_of
from pagedkv.space.state import Group, SpaceState
from pagedkv.tables.rows import (
    AT,
    DIRTY_FROM,
    DIRTY_TO,
    FIRST_BLOCK,
    KIND,
    LOST,
    LOST_ON_HOST,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_DIGESTED,
    NUM_PLANNED,
    NUM_PUBLISHED,
    NUM_SINK_BLOCKS,
    NUM_TOKENS,
    RUNNING,
    SPAN,
    STATUS,
    SWAPPED,
    TOUCHED,
    VACANT,
)
from pagedkv.tables.rules import first_needed_token

__all__ = ["check_space"]


def check_space(state: SpaceState) -> None:
    """Prove that pools, index and tables agree. Raises AssertionError with the first contradiction."""
    for pool in state.all_pools:
        _check_places(pool)
        _check_names(pool)
    _check_references(state)
    for group in state.groups:
        _check_rows(state, group)
        _check_pending(state, group)
    _check_touched(state)
    vacant = np.flatnonzero(state.rows[:, STATUS] == VACANT).tolist()
    assert sorted(state.vacant_rows) == vacant, "the vacant rows are not those handed out next"


def _check_places(pool: BlockPool) -> None:
    """The free queue, the deferred queue and the blocks in use partition the blocks."""
    records, counts = pool.arrays.records, pool.arrays.counts
    sentinel = pool.num_blocks
    following = records[records[:, NEXT], PREVIOUS]
    linked = np.append(records[:sentinel, QUEUE] > IN_USE, np.ones(NUM_SENTINELS, np.bool_))
    linked[NULL_BLOCK] = True
    assert (following == np.arange(len(records)))[linked].all(), f"{pool.name}: links forward and backward differ"
    cold = blocks_of_list(records, NULL_BLOCK, int(counts[NUM_FREE]))
    protected = blocks_of_list(records, protected_sentinel(records), int(counts[NUM_FREE]))
    free = cold + protected
    deferred = _deferred_blocks(pool)
    place = records[1:sentinel, QUEUE]
    assert len(free) == counts[NUM_FREE], f"{pool.name}: {counts[NUM_FREE]} blocks counted free, {len(free)} linked"
    assert len(deferred) == counts[NUM_DEFERRED], f"{pool.name}: deferred blocks miscounted"
    assert sorted(free) == (np.flatnonzero(place == FREE) + 1).tolist(), f"{pool.name}: free queue and places differ"
    assert sorted(deferred) == (np.flatnonzero(place == DEFERRED) + 1).tolist(), f"{pool.name}: deferred differ"
    held = records[1:sentinel, REF_COUNT] > 0
    assert (held == (place <= IN_USE)).all(), f"{pool.name}: a block is referenced and queued, or neither"
    assert (records[1:sentinel, REF_COUNT] >= 0).all(), f"{pool.name}: negative reference count"
    assert records[NULL_BLOCK, [REF_COUNT, NAME, LIFE]].tolist() == [0, 0, 0], f"{pool.name}: null block touched"
    cached = (records[free, NAME] != 0) if free else np.zeros(0, bool)
    assert cached.sum() == counts[NUM_CACHED], f"{pool.name}: cached blocks miscounted"
    assert (np.diff(cached.astype(int)) >= 0).all(), f"{pool.name}: an empty block waits behind a cached one"
    pool.policy.check(pool.name, pool.arrays, cold, protected)
    waiting = records[free, PENDING_STEP] if free else np.zeros(0, int)
    assert not (cached & (waiting == counts[OPEN_STEP])).any(), f"{pool.name}: nobody will compute a cached block"


def _deferred_blocks(pool: BlockPool) -> list[int]:
    """The blocks that wait for a step, each in the list of that step, and none of them due."""
    records, counts = pool.arrays.records, pool.arrays.counts
    deferred = []
    sentinels = np.array([deferred_sentinel(records, step) for step in range(NUM_DEFERRED_LISTS)])
    for step in np.flatnonzero(records[sentinels, NEXT] != sentinels).tolist():
        waiting = blocks_of_list(records, int(sentinels[step]), int(counts[NUM_DEFERRED]))
        holds = records[waiting, HOLD_STEP]
        assert (holds > counts[SETTLED_STEP]).all(), f"{pool.name}: a deferred block is due"
        assert (holds % NUM_DEFERRED_LISTS == step).all(), f"{pool.name}: a block waits in another step's list"
        assert (holds <= counts[OPEN_STEP]).all(), f"{pool.name}: a block waits for a step that nobody has begun"
        deferred += waiting
    return deferred


def _check_names(pool: BlockPool) -> None:
    """The index finds exactly the named blocks, each once, under different names; living links hold."""
    records = pool.arrays.records
    named = pool.prefix_index.named_blocks()
    indexed = list(islice(pool.prefix_index.indexed_blocks(), len(named) + 1))
    assert sorted(block for _, block in indexed) == named.tolist(), f"{pool.name}: index and named blocks differ"
    assert len(named) == pool.arrays.counts[NUM_NAMED], f"{pool.name}: named blocks miscounted"
    if len(named):
        for bucket, block in indexed:
            name, first_word = int(records[block, NAME]), int(pool.arrays.digests[block, 0])
            assert bucket == bucket_of(pool.arrays, name, first_word), f"{pool.name}: {block} is misplaced"
        identities = np.column_stack([records[named, NAME].astype(np.uint32), pool.arrays.digests[named]])
        assert len(np.unique(identities, axis=0)) == len(named), f"{pool.name}: two blocks carry one name"
        parents = records[named, PARENT]
        assert ((parents >= 0) & (parents < pool.num_blocks)).all(), f"{pool.name}: a parent is foreign"
        alive = records[parents, LIFE] == records[named, PARENT_LIFE]
        assert (records[named[~alive], PARENT] != NULL_BLOCK).all(), f"{pool.name}: the root died"
    followed = records[: pool.num_blocks][records[: pool.num_blocks, SUCCESSOR] != NULL_BLOCK]
    assert (followed[:, SUCCESSOR] < pool.num_blocks).all(), f"{pool.name}: a successor is foreign"
    ahead = records[: pool.num_blocks, AHEAD]
    assert ((ahead >= 0) & (ahead < pool.num_blocks)).all(), f"{pool.name}: what a walk is to fetch is foreign"


def _check_references(state: SpaceState) -> None:
    """Reference counts equal the references of the tables, and of the tickets that are out."""
    statuses = state.rows[:, STATUS]
    for pools, statuses_there in ((state.pools, (RUNNING, LOST)), (state.host_pools, (SWAPPED, LOST_ON_HOST))):
        is_there = np.isin(statuses, statuses_there)
        for name, pool in pools.items():
            counted = np.zeros(pool.num_blocks, np.int64)
            for group in state.groups:
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


def _check_pending(state: SpaceState, group: Group) -> None:
    """Some running row computes what is pending for the open step, and no row has lost what it reads next."""
    at, pending = int(group.arrays.parameters[AT]), group.pool.arrays.records[:, PENDING_STEP] == state.open_step
    kind, span, num_sinks = (int(group.arrays.parameters[column]) for column in (KIND, SPAN, NUM_SINK_BLOCKS))
    is_covered = np.zeros(len(pending), np.bool_)
    running = np.flatnonzero(state.rows[:, STATUS] == RUNNING).tolist()
    for row in running:
        start, end = int(state.rows[row, group.planned]), int(state.rows[row, NUM_TOKENS])
        needed = first_needed_token(kind, span, start) // group.block_size
        assert state.rows[row, at + FIRST_BLOCK] <= max(needed, num_sinks), (
            f"group {group.index}, row {row}: position {start} is next, but reads blocks below the first"
        )
        if start < end:
            is_covered[group.arrays.table[row, start // group.block_size : -(-end // group.block_size)]] = True
    for row in running:
        blocks = group.arrays.table[row, : -(-int(state.rows[row, NUM_TOKENS]) // group.block_size)]
        orphaned = blocks[pending[blocks] & ~is_covered[blocks] & (blocks != NULL_BLOCK)]
        assert len(orphaned) == 0, f"group {group.index}, row {row}: nobody computes the pending block {orphaned[0]}"


def _check_touched(state: SpaceState) -> None:
    """The list of touched rows has each touched row once, and every running row that has something for the plan."""
    links = state.rows[:, TOUCHED]
    listed = [0]
    while links[listed[-1]] > 1 and len(listed) <= len(links):
        listed.append(int(links[listed[-1]]) - 1)
    assert links[listed[-1]] == 1, "the list of touched rows has no end"
    assert sorted(listed) == sorted({0, *np.flatnonzero(links).tolist()}), "a touched row is not in the list"
    has_something = state.rows[:, NUM_PLANNED] < state.rows[:, NUM_TOKENS]
    for group in state.groups:
        has_something |= state.rows[:, int(group.arrays.parameters[AT]) + DIRTY_TO] > 0
    waiting = set(np.flatnonzero(has_something & (state.rows[:, STATUS] == RUNNING)).tolist())
    assert waiting <= set(listed), f"rows {sorted(waiting - set(listed))} wait for a plan, untouched"


def _check_rows(state: SpaceState, group: Group) -> None:
    """Each row's counts and its table entries fit together."""
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
