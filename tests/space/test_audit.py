"""check(): passes where nothing is wrong, and names each contradiction that tampering makes (promise 17)."""

from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import BlockSpace, FullAttention, RecurrentState, Replay, SlidingWindow
from pagedkv.blocks.ghosts import remember
from pagedkv.blocks.life_cycle import release
from pagedkv.blocks.prefix_index import name_block, unname
from pagedkv.blocks.record import (
    AHEAD,
    BUCKET_NEXT,
    EVICTED,
    HOLD_STEP,
    KEPT,
    LIFE,
    NAME,
    NEXT,
    NUM_CACHED,
    NUM_DEFERRED,
    NUM_FREE,
    NUM_NAMED,
    OPEN_STEP,
    PARENT,
    PARENT_LIFE,
    PENDING_STEP,
    PREVIOUS,
    QUEUE,
    REF_COUNT,
    SUCCESSOR,
    UNDATED,
)
from pagedkv.space.drafting import check_drafts
from pagedkv.space.rows import (
    AT,
    DIRTY_TO,
    FIRST_BLOCK,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_PUBLISHED,
    TOUCHED,
)
from tests.space.spaces import acknowledge, allocate, cache, new_space, only_pool, prefill, run_step, tokens

WINDOW_NAME = 2  # of the second group's blocks

Tamper = Callable[[BlockSpace], None]


def audited_space() -> BlockSpace:
    """Row 0 holds blocks 1 to 3, of which two are named; 4 is cached, 6 and 5 are deferred, 7 to 10 are empty."""
    space = new_space(num_blocks=11, num_host_blocks=4)
    prefill(space, tokens(10))
    cache(space, tokens(4, first=100))
    row = allocate(space, tokens(6, first=200))
    space.plan_step()
    space.free([row])
    space.check()
    return space


def record(block: int, column: int, value: int) -> Tamper:
    """Set one number of a block."""

    def tamper(space: BlockSpace) -> None:
        records = only_pool(space).arrays.records
        assert records[block, column] != value
        records[block, column] = value

    return tamper


def count(place: int) -> Tamper:
    """Count one more."""

    def tamper(space: BlockSpace) -> None:
        only_pool(space).arrays.counts[place] += 1

    return tamper


def entry(index: int, block: int) -> Tamper:
    """Set one entry of row 0's table."""

    def tamper(space: BlockSpace) -> None:
        space._state.groups[0].arrays.table[0, index] = block

    return tamper


def row(column: int, number: int) -> Tamper:
    """Add to one number of row 0."""

    def tamper(space: BlockSpace) -> None:
        space._state.rows[0, column] += number

    return tamper


def row_in_group(column: int, number: int) -> Tamper:
    """Add to one number of row 0 that is kept for each group."""

    def tamper(space: BlockSpace) -> None:
        row(int(space._state.groups[0].arrays.parameters[AT]) + column, number)(space)

    return tamper


def both(*tampers: Tamper) -> Tamper:
    def tamper(space: BlockSpace) -> None:
        for each in tampers:
            each(space)

    return tamper


def digest(space: BlockSpace) -> None:
    only_pool(space).arrays.digests[1, 0] ^= 1


def second_block_of_one_name(space: BlockSpace) -> None:
    arrays = only_pool(space).arrays
    unname(arrays, 2)
    arrays.digests[2] = arrays.digests[1]
    name_block(arrays, 1, 2, 1, int(arrays.records[1, LIFE]))


def empty_block_at_the_back(space: BlockSpace) -> None:
    queue = only_pool(space).free_queue
    queue.remove(7)
    queue.append(7)


def promise_of_the_open_step(space: BlockSpace) -> None:
    arrays = only_pool(space).arrays
    arrays.records[4, PENDING_STEP] = arrays.counts[OPEN_STEP]


def known(number: int, row: int = 0, *, is_overlapped: bool = True) -> Tamper:
    """Make so many of a row's tokens known, and the others unknown."""

    def tamper(space: BlockSpace) -> None:
        space._state.num_known[row] = number
        space._state.is_overlapped = is_overlapped

    return tamper


def unknown_on_the_host(space: BlockSpace) -> None:
    space.swap_out([0])
    row(NUM_ACCEPTED, -1)(space)
    known(9)(space)


def vacant_row(space: BlockSpace) -> None:
    space._state.vacant_rows.pop()


def unlisted_row(space: BlockSpace) -> None:
    waiting = allocate(space, tokens(4, first=300))
    space._state.rows[[0, waiting], TOUCHED] = 1, 0


def touched_row(space: BlockSpace) -> None:
    space._state.rows[5, TOUCHED] = 1


def host_block(space: BlockSpace) -> None:
    space._state.host_pools["device"].acquire(1)


CONTRADICTIONS: dict[str, tuple[Tamper, str]] = {
    "a link forward": (record(7, NEXT, 9), "links forward and backward differ"),
    "a link backward": (record(7, PREVIOUS, 9), "links forward and backward differ"),
    "a queue that ends too early": (record(7, NEXT, 0), "links forward and backward differ"),
    "a queue that never ends": (record(7, NEXT, 7), "links forward and backward differ"),
    "a count of free blocks": (count(NUM_FREE), "6 blocks counted free, 5 linked"),
    "a count of deferred blocks": (count(NUM_DEFERRED), "deferred blocks miscounted"),
    "a count of cached blocks": (count(NUM_CACHED), "cached blocks miscounted"),
    "a count of named blocks": (count(NUM_NAMED), "named blocks miscounted"),
    "a free block said to be in use": (record(7, QUEUE, 0), "free queue and places differ"),
    "a free block said to be deferred": (record(7, QUEUE, 2), "free queue and places differ"),
    "a deferred block said to be in use": (record(5, QUEUE, 0), "deferred differ"),
    "a deferred block that is due": (record(6, HOLD_STEP, 0), "a deferred block is due"),
    "no reference to a block in use": (record(2, REF_COUNT, 0), "referenced and queued, or neither"),
    "a reference to a free block": (record(7, REF_COUNT, 1), "referenced and queued, or neither"),
    "a negative reference count": (record(7, REF_COUNT, -1), "negative reference count"),
    "a reference too many": (record(2, REF_COUNT, 2), "block 2 has 2 references, the tables hold 1"),
    "a name of the null block": (record(0, NAME, 1), "null block touched"),
    "an empty block at the back": (empty_block_at_the_back, "an empty block waits behind a cached one"),
    "a promise without a step that keeps it": (promise_of_the_open_step, "a cached block is computed by no step"),
    "a lost name": (record(1, NAME, 0), "index and named blocks differ"),
    "a name that was never given": (record(3, NAME, 1), "index and named blocks differ"),
    "a bucket that never ends": (record(1, BUCKET_NEXT, 1), "index and named blocks differ"),
    "a name of another group": (record(1, NAME, 2), "1 is misplaced"),
    "a digest": (digest, "1 is misplaced"),
    "two blocks of one name": (second_block_of_one_name, "two blocks carry one name"),
    "a foreign parent": (record(2, PARENT, 99), "a parent is foreign"),
    "a negative parent": (record(2, PARENT, -1), "a parent is foreign"),
    "a root that died": (record(1, PARENT_LIFE, 1), "the root died"),
    "a foreign successor": (record(1, SUCCESSOR, 99), "a successor is foreign"),
    "a foreign block ahead": (record(1, AHEAD, 99), "what a walk is to fetch is foreign"),
    "an entry of another block in use": (entry(1, 1), "block 1 has 1 references, the tables hold 2"),
    "an entry of a free block": (entry(1, 7), "block 2 has 1 references, the tables hold 0"),
    "an entry that is gone": (entry(1, 0), "block 2 has 1 references, the tables hold 0"),
    "a foreign entry": (entry(1, 99), "a table entry is foreign"),
    "a negative entry": (entry(1, -1), "a table entry is foreign"),
    "an entry beyond its blocks": (both(entry(3, 1), record(1, REF_COUNT, 2)), "row 0: an entry beyond its blocks"),
    "a hole": (row_in_group(NUM_BLOCKS, 1), "row 0: a hole in its table"),
    "fewer blocks than tokens": (row_in_group(NUM_BLOCKS, -1), "row 0: too few blocks"),
    "blocks below a window": (row_in_group(FIRST_BLOCK, 1), "row 0: an entry below its window"),
    "published before it is full": (row_in_group(NUM_PUBLISHED, 1), "row 0: published what is not certain"),
    "changes that are none": (row_in_group(DIRTY_TO, 9), "row 0: changes beyond the table"),
    "more planned than there is": (row(NUM_PLANNED, 1), "row 0: planned beyond its tokens"),
    "more accepted than there is": (row(NUM_ACCEPTED, 1), "row 0: accepted beyond its tokens"),
    "fewer known than accepted": (known(9), "row 0: accepted beyond its known tokens"),
    "more known than there is": (known(11), "row 0: has more known tokens than tokens"),
    "a vacant row that knows tokens": (known(1, row=5), "row 5: overlapped, and vacant"),
    "a negative number of known tokens": (known(-1), "row 0: accepted beyond its known tokens"),
    "tokens that are unknown on the host": (unknown_on_the_host, "row 0: unknown tokens on the host"),
    "an overlap that is not marked": (
        known(10, is_overlapped=False),
        "rows are overlapped, but is_overlapped is false",
    ),
    "changes that no plan will tell": (unlisted_row, r"rows \[1\] wait for a plan, untouched"),
    "a touched row that is not listed": (touched_row, "a touched row is not in the list"),
    "a list of touched rows without end": (row(TOUCHED, -1), "the list of touched rows has no end"),
    "a vacant row": (vacant_row, "the vacant rows are not those handed out next"),
    "a leak on the host": (host_block, "block 1 has 1 references, the tables hold 0"),
}


@pytest.mark.parametrize(("tamper", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_promise_17_check_notices_tampering_with(tamper: Tamper, message: str) -> None:
    """Negative controls: each changes a number or two, and each must be noticed for what it is."""
    space = audited_space()
    tamper(space)
    with pytest.raises(AssertionError, match=message):
        space.check()


def dated(block: int, oldest: int, newest: int) -> Tamper:
    """Set the epochs of a block."""

    def tamper(space: BlockSpace) -> None:
        only_pool(space).arrays.epochs[block] = oldest, newest

    return tamper


def of_epoch(row: int, oldest: int) -> Tamper:
    """Set the oldest epoch of a row."""

    def tamper(space: BlockSpace) -> None:
        space._state.oldest_epochs[row] = oldest

    return tamper


DATES: dict[str, tuple[Tamper, str]] = {
    "a name that is too old": (dated(1, 0, 1), "what can be found is too old"),
    "a name of no epoch": (dated(1, UNDATED, UNDATED), "what can be found is of no epoch"),
    "a range that ends before it begins": (dated(1, 3, 2), "epochs that contributed are out of order"),
    "an epoch to come": (dated(1, 2, 4), "epochs that contributed are out of order"),
    "a row that is too old": (of_epoch(0, 1), "a row publishes what is too old"),
    "a row that is too young": (of_epoch(0, 3), "group 0, row 0: a block is older than the row"),
}


@pytest.mark.parametrize(("tamper", "message"), DATES.values(), ids=DATES.keys())
def test_promise_17_check_notices_wrong_dates(tamper: Tamper, message: str) -> None:
    space = new_space(weights_epoch=2, max_epoch_lag=1)
    prefill(space, tokens(9))
    space.set_weights_epoch(3)
    space.check()
    tamper(space)
    with pytest.raises(AssertionError, match=message):
        space.check()


@pytest.mark.interpreted
def test_promise_17_check_passes_where_nothing_is_wrong() -> None:
    """All kinds of groups, forks, lookahead, steps in flight, and blocks on both sides of a swap."""
    groups = FullAttention(4), SlidingWindow(8, 2, num_sink_tokens=3), RecurrentState(4)
    sizes = {"device": 101, "state": 21}
    space = new_space(*groups, num_blocks=sizes, num_host_blocks=sizes)
    space.check()
    rows = [prefill(space, tokens(30)), allocate(space, tokens(30))]
    plan = space.plan_step()
    rows += space.fork(rows[0], 2).tolist()
    space.append(rows, np.arange(4), num_lookahead=5)
    space.check()
    acknowledge(space, plan, space.plan_step())
    space.swap_out(rows[:2])
    space.check()
    space.free(rows[1:3])
    space.check()
    run_step(space)
    space.check()


def remembering_space() -> BlockSpace:
    """Row 0 has two named blocks, content of three others is gone."""
    space = new_space(explain=True, num_blocks=11)
    for first in (100, 200):
        cache(space, tokens(8, first=first))
        space.reset_prefix_cache()
    prefill(space, tokens(8))
    space.check()
    return space


def remember_what_is_named(space: BlockSpace) -> None:
    remember(only_pool(space).arrays, space.block_ids(0)[0], EVICTED)


def remember_twice(space: BlockSpace) -> None:
    arrays = only_pool(space).arrays
    number, word = np.argwhere(arrays.ghosts[:, 1::3])[0].tolist()
    ghost = arrays.ghosts[number, 1 + 3 * word : 4 + 3 * word]
    arrays.ghosts[number, 1 + 3 * (word + 1) : 4 + 3 * (word + 1)] = ghost


def remember_for_no_reason(space: BlockSpace) -> None:
    ghosts = only_pool(space).arrays.ghosts
    ghosts[:, 2::3][ghosts[:, 2::3] > 0] |= 15


def tell_twice(space: BlockSpace) -> None:
    assert space._state.explanations is not None
    space._state.explanations.past[0] = space._state.explanations.current[0]


def tell_of_the_future(space: BlockSpace) -> None:
    assert space._state.explanations is not None
    space._state.explanations.current[0, 0] += 1


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (remember_what_is_named, "a ghost of content that can be found"),
        (remember_twice, "two ghosts of one content"),
        (remember_for_no_reason, "a ghost gone for no reason"),
        (tell_twice, "two of one sequence"),
        (tell_of_the_future, "a sequence that is still to come"),
    ],
)
def test_promise_17_check_notices_tampering_with_what_is_remembered(tamper: Tamper, message: str) -> None:
    space = remembering_space()
    tamper(space)
    with pytest.raises(AssertionError, match=message):
        space.check()


def test_promise_17_check_notices_what_no_later_prompt_would_hit() -> None:
    space = new_space(FullAttention(4), SlidingWindow(8, 4))
    cache(space, tokens(20))
    records = only_pool(space).arrays.records
    is_kept = (records[:, NAME] == WINDOW_NAME) & (records[:, REF_COUNT] == 0) & (records[:, KEPT] > 0)
    (kept, *_) = np.flatnonzero(is_kept)
    records[kept, KEPT] = 0
    with pytest.raises(AssertionError, match=f"block {kept} is cached, but no later prompt would hit it"):
        space.check()


def start_of(row: int, group: int, position: int) -> Tamper:
    """Let a row begin at a position in a group, and nowhere else."""

    def tamper(space: BlockSpace) -> None:
        space._state.rows[row, space._state.groups[group].planned] = position

    return tamper


def lost_sink(space: BlockSpace) -> None:
    """Row 0 releases its first block of the window."""
    table = space._state.groups[1].arrays.table
    release(only_pool(space).arrays, table[0, 0], 0)
    table[0, 0] = 0


STARTS: dict[str, tuple[Tamper, str]] = {
    "a start behind which the window has moved on": (start_of(0, 1, 5), "position 5 is next, but reads blocks below"),
    "a sink that is gone": (lost_sink, "position 14 is next, but lacks a sink"),
    "what a step in flight computes": (start_of(1, 0, 2), "position 2 is next, but step 2 in flight computes it"),
    "a start in the windows alone": (start_of(0, 1, 13), "row 0 begins at 14 in full attention, and at 13"),
    "a start in full attention alone": (start_of(0, 0, 13), "row 0 begins at 13 in full attention, and at 14"),
}


@pytest.mark.parametrize(("tamper", "message"), STARTS.values(), ids=STARTS.keys())
def test_promise_17_check_notices_a_row_that_cannot_compute_what_is_next(tamper: Tamper, message: str) -> None:
    """Row 0 has computed 14 tokens and gets one more; a step in flight computes row 1."""
    space = new_space(FullAttention(4), SlidingWindow(4, 2, num_sink_tokens=1, replay=Replay(6, 1)))
    row = prefill(space, tokens(14))
    allocate(space, tokens(6, first=100))
    space.plan_step()
    space.append([row], [14])
    space.check()
    tamper(space)
    with pytest.raises(AssertionError, match=message):
        space.check()


def test_promise_17_check_changes_nothing() -> None:
    space = audited_space()
    before = only_pool(space).arrays.records.copy()
    space.check()
    np.testing.assert_array_equal(only_pool(space).arrays.records, before)


def drafted_space() -> BlockSpace:
    """Row 0 has two drafts; their states are in slots 2 and 0 of three."""
    space = new_space(RecurrentState(4, pool="device", num_draft_states=3), num_blocks=21)
    row = prefill(space, tokens(4))
    space.append([row], tokens(3), [3], num_draft=2)
    space.check()
    return space


def slot(index: int, block: int, *, num_counted: int) -> Tamper:
    """Put another block into a slot, or none, and count so many."""

    def tamper(space: BlockSpace) -> None:
        (drafts,) = space._state.draft_tables
        drafts.arrays.table[0, index] = block
        space._state.rows[0, int(drafts.arrays.parameters[AT]) + NUM_BLOCKS] = num_counted

    return tamper


DRAFTED: dict[str, tuple[Tamper, str]] = {
    "a draft without a slot": (slot(2, 0, num_counted=1), "row 0: an open token has no slot"),
    "slots that are miscounted": (slot(1, 9, num_counted=2), "slots with a block are miscounted"),
    "a slot beyond": (slot(5, 9, num_counted=3), "a slot that no position has"),
    "one block in two slots": (slot(0, 2, num_counted=2), "a draft state has two slots"),
    "a state that can be found": (slot(1, 1, num_counted=3), "a draft state can be found"),
    "more drafts than slots": (row(NUM_ACCEPTED, -3), "row 0: more open tokens than slots"),
}


@pytest.mark.parametrize(("tamper", "message"), DRAFTED.values(), ids=DRAFTED.keys())
def test_promise_17_check_notices_wrong_draft_states(tamper: Tamper, message: str) -> None:
    """Looked at alone: references that do not add up would be noticed before."""
    space = drafted_space()
    tamper(space)
    with pytest.raises(AssertionError, match=message):
        check_drafts(space._state)
