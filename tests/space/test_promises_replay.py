"""Promise 22: what windows lost can be computed again, where the engine asks for it (rule "Replay of windows")."""

from dataclasses import replace

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    AllocStatus,
    BlockSpace,
    ChunkedLocal,
    FullAttention,
    PrefixHit,
    RecurrentState,
    Replay,
    RequestKeys,
    Shortage,
    SlidingWindow,
    SpaceConfig,
    StepPlan,
)
from pagedkv.contract.answers import MissCause
from pagedkv.errors import ConfigurationError, SequenceError, TruncationError
from tests.space.replay_model import evict_windows
from tests.space.spaces import acknowledge, allocate, hit, new_space, run_step, starts_of, tokens, unchanged

pytestmark = pytest.mark.interpreted

WINDOW = 5
EXACT = Replay(12, 3)  # three layers, of which each sees four tokens back
NEARLY = Replay(11, 3)
PROMPT = 41  # of these, 40 are whole blocks


def windows(how: Replay | None = EXACT, num_sink_tokens: int = 0) -> SlidingWindow:
    """Blocks of 4, in a pool of their own."""
    return SlidingWindow(WINDOW, 4, num_sink_tokens=num_sink_tokens, pool="windows", replay=how)


def space_without_windows(how: Replay | None = EXACT, num_sink_tokens: int = 0, **settings: object) -> BlockSpace:
    """A space that has cached a prompt of 60 tokens in full attention, and has lost its windows."""
    blocks = {"device": 101, "windows": 41}
    space = new_space(FullAttention(4), windows(how, num_sink_tokens), num_blocks=blocks, **settings)  # type: ignore[arg-type]
    row = allocate(space, tokens(60))
    run_step(space)
    space.free(row)
    evict_windows(space)
    return space


def ask(space: BlockSpace, length: int = PROMPT, most: int = 100) -> PrefixHit:
    """Match a beginning of the prompt, with replay allowed."""
    return space.match(tokens(length), max_replay_tokens=most)


def admit(space: BlockSpace, length: int = PROMPT) -> int:
    """Give it a row."""
    answer = space.allocate(tokens(length), match=ask(space, length))
    assert isinstance(answer, Allocation)
    return answer.row


def held(space: BlockSpace, row: int) -> list[bool]:
    """Which blocks of its window a row holds."""
    return [bool(block) for block in space.block_ids(row, 1)]


# What a match answers


def test_a_hit_ends_where_full_attention_has_the_prompt() -> None:
    space = space_without_windows()
    assert hit(space, tokens(PROMPT)) == 0
    answer = ask(space)
    assert (answer.num_tokens, answer.num_replayed, answer.is_exact) == (40, 12, True)
    assert [len(blocks) for blocks in answer.block_ids] == [10, 7]
    assert answer.num_blocks_needed == {"device": 10 + 1, "windows": 4}
    assert not answer.block_ids[1].any()


def test_it_is_off_unless_it_is_asked_for() -> None:
    space = space_without_windows()
    assert hit(space, tokens(PROMPT)) == ask(space, most=0).num_tokens == 0
    assert ask(space_without_windows(None)).num_tokens == 0
    row = allocate(space, tokens(PROMPT))
    assert starts_of(space.plan_step()) == ([0], [0])
    space.free(row)
    space.check()


@pytest.mark.parametrize(("most", "num_hit"), [(11, 0), (12, 40), (13, 40)])
def test_no_more_is_computed_again_than_is_allowed(most: int, num_hit: int) -> None:
    assert ask(space_without_windows(), most=most).num_tokens == num_hit


@pytest.mark.parametrize(("length", "num_hit"), [(13, 0), (17, 16), (21, 20)])
def test_it_is_done_only_where_it_saves_something(length: int, num_hit: int) -> None:
    """Where it would begin with the prompt, the prompt may as well be computed."""
    assert ask(space_without_windows(), length).num_tokens == num_hit


def test_windows_that_are_cached_are_hit() -> None:
    space = space_without_windows()
    row = admit(space)
    run_step(space)
    space.free(row)
    answer = ask(space)
    assert (answer.num_tokens, answer.num_replayed) == (40, 0)
    assert hit(space, tokens(PROMPT)) == 40


def test_a_longer_hit_than_that_of_a_window_is_taken() -> None:
    space = space_without_windows()
    row = admit(space, 21)
    run_step(space)
    space.free(row)
    assert hit(space, tokens(PROMPT)) == 20
    assert ask(space).num_tokens == 40
    assert ask(space, 33).num_tokens == 20, "the replay of 32 would begin with the hit of 20"


@pytest.mark.parametrize(
    ("num_tokens", "num_layers", "num_replayed", "is_exact"),
    [
        (12, 3, 12, True),
        (11, 3, 12, True),
        (8, 3, 8, False),
        (7, 3, 8, False),
        (8, 2, 8, True),
        (4, 1, 8, True),
        (1, 1, 8, True),
        (20, 3, 20, True),
        (1, 9, 8, False),
    ],
)
def test_what_is_exact_is_told(num_tokens: int, num_layers: int, num_replayed: int, *, is_exact: bool) -> None:
    """Blocks are whole, and the one before those that are kept is always computed."""
    answer = ask(space_without_windows(Replay(num_tokens, num_layers)))
    assert (answer.num_tokens, answer.num_replayed, answer.is_exact) == (40, num_replayed, is_exact)


def test_what_suffices_for_the_next_token_is_rounded_up_to_what_suffices_for_whole_blocks() -> None:
    """Behind 40 a query sees 39, so 34 is early enough; but its block begins with 36, and that needs 31."""
    groups = FullAttention(4), SlidingWindow(2, 4, pool="windows", replay=Replay(6, 6))
    space = new_space(*groups, num_blocks={"device": 101, "windows": 41})
    row = allocate(space, tokens(60))
    run_step(space)
    space.free(row)
    evict_windows(space)
    answer = ask(space)
    assert (answer.num_replayed, answer.is_exact) == (12, True)


def test_all_windows_are_computed_again_from_one_position() -> None:
    groups = (
        FullAttention(4),
        SlidingWindow(3, 2, pool="windows", replay=Replay(10, 2)),
        SlidingWindow(5, 4, pool="windows", replay=Replay(3, 2)),
    )
    space = new_space(*groups, num_blocks={"device": 101, "windows": 101})
    row = allocate(space, tokens(60))
    run_step(space)
    space.free(row)
    evict_windows(space)
    answer = ask(space)
    assert (answer.num_tokens, answer.num_replayed, answer.is_exact) == (40, 12, True), "30 begins no block of 4"
    assert [len(blocks) for blocks in answer.block_ids] == [10, 14, 7]
    assert isinstance(space.allocate(tokens(PROMPT), match=answer), Allocation)
    plan = space.plan_step()
    assert [plan.compute_in(group).starts.tolist() for group in range(3)] == [[40], [28], [28]]
    space.check()


def test_it_ends_before_what_the_open_step_computes() -> None:
    """Should the other row leave, this one would compute that, but not what lies before its windows."""
    space = space_without_windows()
    other = allocate(space, tokens(80))
    answer = ask(space, 78)
    assert (answer.num_tokens, answer.num_replayed) == (60, 12)
    row = admit(space, 78)
    space.free(other)
    assert starts_of(space.plan_step()) == ([60], [48])
    assert space.num_tokens(row) == 78
    space.check()


# What the step does


def test_the_step_computes_the_last_tokens_of_the_hit_in_windows_alone() -> None:
    space = space_without_windows(receipts=True)
    row = admit(space)
    assert held(space, row) == [False] * 7 + [True] * 4
    plan = space.plan_step()
    assert starts_of(plan) == ([40], [28])
    assert starts_of(StepPlan.from_buffer(plan.buffer.tobytes())) == ([40], [28])
    assert len(space.slot_mapping(plan)) == 1
    assert len(space.slot_mapping(plan, 1)) == 13
    (writes,) = (each for each in plan.table_writes if each.group == 1)
    assert (writes.starts.tolist(), writes.block_ids[:7].tolist()) == ([0], [0] * 7), "the device masks what is gone"
    acknowledge(space, plan)
    assert held(space, row) == [False] * 9 + [True] * 2
    space.append(row, [9])
    assert starts_of(space.plan_step()) == ([41], [41])
    space.check()


def test_receipts_have_a_line_for_it() -> None:
    space = space_without_windows(receipts=True)
    row = admit(space)
    plan = space.plan_step()
    assert space.receipt(row).num_replayed == 0
    acknowledge(space, plan)
    receipt = space.receipt(row)
    assert (receipt.num_computed, receipt.num_hit, receipt.num_replayed) == (1, 40, 12)
    assert sum([receipt, receipt], receipt).num_replayed == 36
    total = space.statistics().receipts
    assert total is not None
    assert total.num_replayed == 12
    space.check()


@pytest.mark.parametrize("in_order", [False, True])
def test_what_is_sure_of_it_is_published_and_nothing_before(in_order: bool) -> None:  # noqa: FBT001 - a parameter
    space = space_without_windows(in_order=in_order)
    row = admit(space)
    named = space.stored_blocks("windows").block_ids.tolist()
    assert named == [space.block_ids(row, 1)[9]], "the block behind the hit is not full, those before are not exact"
    space.check()
    run_step(space)
    assert hit(space, tokens(PROMPT)) == 40
    assert hit(space, tokens(37)) == 0, "the window before 36 is not what it was"
    space.free(row)
    assert hit(space, tokens(PROMPT)) == 40
    space.check()


def test_equal_prompts_of_one_step_compute_it_each() -> None:
    """The first publishes it, but full attention after it is computed already: no row could take a part over."""
    space = space_without_windows()
    first, second = admit(space), admit(space)
    assert space.block_ids(first)[:10] == space.block_ids(second)[:10]
    assert not set(space.block_ids(first, 1)[7:]) & set(space.block_ids(second, 1)[7:])
    run_step(space)
    assert space.block_ids(first, 1)[9] == space.block_ids(second, 1)[9], "duplicates are merged"
    space.check()


def test_a_replay_that_is_not_exact_publishes_nothing_nor_what_follows() -> None:
    space = space_without_windows(Replay(8, 3))
    row = admit(space)
    run_step(space)
    space.append(row, tokens(20, first=41))
    run_step(space)
    assert space.stored_blocks("windows").block_ids.size == 0
    assert len(space.stored_blocks("device").block_ids) == 15
    (child,) = space.fork(row)
    space.free(row)
    space.append(child, tokens(8, first=90))
    run_step(space)
    assert space.stored_blocks("windows").block_ids.size == 0
    space.free(child)
    assert hit(space, tokens(PROMPT)) == 0
    assert ask(space).num_replayed == 8, "the next one computes it again"
    space.check()


def test_sinks_are_hit_and_are_not_computed_again() -> None:
    space = space_without_windows(num_sink_tokens=4)
    assert ask(space).num_tokens == 0, "the sinks are gone as well"
    row = allocate(space, tokens(60))
    run_step(space)
    evict_windows(space)
    answer = ask(space)
    assert (answer.num_tokens, answer.num_replayed) == (40, 12)
    sink = space.block_ids(row, 1)[0]
    assert answer.block_ids[1].tolist() == [sink] + [0] * 6
    other = admit(space)
    space.free(row)
    run_step(space)
    assert space.block_ids(other, 1)[0] == sink
    space.check()


def test_extra_keys_are_part_of_what_is_computed_again() -> None:
    space = new_space(FullAttention(4), windows(), num_blocks={"device": 101, "windows": 41})
    keys = RequestKeys(salt=b"a")
    row = allocate(space, tokens(60), keys)
    run_step(space)
    space.free(row)
    evict_windows(space)
    assert ask(space).num_tokens == 0
    answer = space.match(tokens(PROMPT), keys=keys, max_replay_tokens=20)
    assert answer.num_replayed == 12
    assert isinstance(space.allocate(tokens(PROMPT), keys=keys, match=answer), Allocation)
    run_step(space)
    assert hit(space, tokens(PROMPT)) == 0
    assert space.match(tokens(PROMPT), keys=keys).num_tokens == 40
    space.check()


def test_windows_with_blocks_of_another_size_find_their_digests() -> None:
    groups = FullAttention(8), SlidingWindow(WINDOW, 4, pool="windows", replay=EXACT)
    space = new_space(*groups, num_blocks={"device": 101, "windows": 41})
    row = allocate(space, tokens(60))
    run_step(space)
    space.free(row)
    evict_windows(space)
    assert ask(space).num_replayed == 12
    row = admit(space)
    run_step(space)
    assert hit(space, tokens(PROMPT)) == 40
    space.append(row, tokens(19, first=41))
    run_step(space)
    assert hit(space, tokens(60)) == 56
    space.check()


def test_the_weights_of_both_contributed_to_it() -> None:
    space = space_without_windows(weights_epoch=0, max_epoch_lag=1)
    space.set_weights_epoch(1)
    row = admit(space)
    run_step(space)
    spans = [(span.start, span.oldest, span.newest) for span in space.epochs(row)]
    assert spans[0][1:] == (0, 0)
    assert spans[-1][1:] == (0, 1)
    space.check()
    space.set_weights_epoch(2)
    assert hit(space, tokens(PROMPT)) == ask(space).num_tokens == 0
    space.check()


# Rows that go other ways


def test_a_failed_step_leaves_it_to_be_computed_again() -> None:
    space = space_without_windows(receipts=True)
    row = admit(space)
    plan = space.plan_step()
    assert space.abort(plan.step_id).rewound_rows == (row,)
    space.check()
    assert space.receipt(row).num_replayed == 0
    plan = space.plan_step()
    assert starts_of(plan) == ([40], [28])
    acknowledge(space, plan)
    assert space.receipt(row).num_replayed == 12
    assert hit(space, tokens(PROMPT)) == 40
    assert hit(space, tokens(37)) == 0
    space.check()


def test_a_row_that_hits_what_a_failed_step_was_to_compute_is_lost() -> None:
    space = space_without_windows()
    row = admit(space)
    plan = space.plan_step()
    other = allocate(space, tokens(PROMPT))
    assert space.block_ids(other, 1)[9] == space.block_ids(row, 1)[9]
    aborted = space.abort(plan.step_id)
    assert (aborted.rewound_rows, aborted.lost_rows) == ((row,), (other,))
    space.free(other)
    space.check()


def test_it_cannot_be_rolled_back_into_before_its_step_is_over() -> None:
    space = space_without_windows()
    row = admit(space, 44)
    with unchanged(space), pytest.raises(TruncationError, match="plan the step first"):
        space.truncate(row, [38])
    space.truncate(row, [42])
    plan = space.plan_step()
    for length in (39, 33, 20):
        with unchanged(space), pytest.raises(TruncationError, match="has released"):
            space.truncate(row, [length])
    acknowledge(space, plan)
    with unchanged(space), pytest.raises(TruncationError, match="has released"):
        space.truncate(row, [39])
    space.truncate(row, [41])
    space.check()


def test_a_row_rolled_back_to_its_hit_is_lost_with_the_step() -> None:
    space = space_without_windows()
    row = admit(space)
    plan = space.plan_step()
    space.truncate(row, [40])
    assert space.abort(plan.step_id).lost_rows == (row,)
    space.free(row)
    space.check()


def test_a_fork_inherits_what_its_parent_was_to_compute() -> None:
    space = space_without_windows()
    row = admit(space)
    (child,) = space.fork(row)
    space.free(row)
    plan = space.plan_step()
    assert plan.compute.rows.tolist() == [child]
    assert starts_of(plan) == ([40], [28])
    acknowledge(space, plan)
    assert held(space, child) == [False] * 9 + [True] * 2
    assert hit(space, tokens(PROMPT)) == 40
    assert hit(space, tokens(37)) == 0
    space.check()


def test_a_fork_at_a_prefix_begins_behind_what_is_sure() -> None:
    space = space_without_windows()
    row = admit(space, 44)
    plan = space.plan_step()
    gone = space.fork(row, at=38)
    assert getattr(gone, "longest", None) == 0
    (child,) = np.asarray(space.fork(row, at=42)).tolist()
    acknowledge(space, plan)
    space.append(child, [7])
    run_step(space)
    space.check()


def test_swapping_waits_until_its_step_is_over() -> None:
    space = space_without_windows(num_host_blocks={"device": 40, "windows": 40})
    row = admit(space)
    for _ in range(2):
        assert space.can_swap_out(row) is AllocStatus.LATER
        with unchanged(space), pytest.raises(SequenceError, match="computes a window again"):
            space.swap_out(row)
        plan = space.plan_step()
        if plan.compute.rows.tolist() == [row]:
            first = plan
    acknowledge(space, first)
    acknowledge(space, plan)
    assert space.can_swap_out(row) is AllocStatus.OK
    assert not isinstance(space.swap_out(row), Shortage)
    run_step(space)
    assert not isinstance(space.swap_in(row), Shortage)
    run_step(space)
    assert hit(space, tokens(PROMPT)) == 40
    space.check()


def test_what_is_declared_computed_needs_no_replay() -> None:
    space = space_without_windows()
    row = admit(space)
    space.mark_computed(row)
    assert space.plan_step().compute.rows.tolist() == []
    assert held(space, row) == [False] * 9 + [True] * 2
    assert hit(space, tokens(PROMPT)) == 40
    space.check()


def test_computed_blocks_are_none_that_a_replay_left_inexact() -> None:
    """A fork made in between still holds them while a later step computes it."""
    space = space_without_windows()
    row = admit(space)
    first = space.plan_step()
    (child,) = space.fork(row)
    space.append(child, [7])
    second = space.plan_step()
    acknowledge(space, first)
    assert held(space, child)[7:9] == [True, True]
    assert space.computed_block_ids(child, 1) == [0] * 9 + [space.block_ids(row, 1)[9]]
    acknowledge(space, second)
    assert held(space, child)[7:9] == [False, False]
    space.check()


def test_withdrawn_content_takes_a_row_along_that_computes_on_it() -> None:
    space = space_without_windows()
    row = admit(space)
    answer = space.withdraw([space.block_ids(row)[2]], pool="device")
    assert answer.lost_rows == (row,)
    space.check()
    assert hit(space, tokens(PROMPT)) == ask(space).num_tokens == 0
    space.free(row)
    space.check()


def test_a_shortage_changes_nothing() -> None:
    space = space_without_windows()
    others = [allocate(space, tokens(60, first=1000 * number)) for number in (1, 2)]
    answer = ask(space)
    assert space.num_free_blocks("windows") == 40 - 2 * 15
    third = allocate(space, tokens(28, first=3000))
    answer = ask(space)
    with unchanged(space):
        shortage = space.allocate(tokens(PROMPT), match=answer)
    assert isinstance(shortage, Shortage)
    assert (shortage.pool, shortage.num_needed, shortage.num_free) == ("windows", 4, 3)
    assert space.can_allocate(tokens(PROMPT), match=answer) is AllocStatus.LATER
    space.free([*others, third])


def test_an_answer_that_is_out_of_date_is_asked_again_with_the_same_bound() -> None:
    space = space_without_windows()
    answer = ask(space)
    other = allocate(space, tokens(8, first=500))
    allocation = space.allocate(tokens(PROMPT), match=answer)
    assert isinstance(allocation, Allocation)
    assert allocation.num_hit_tokens == 40
    assert answer.max_replay_tokens == 100
    space.free([other, allocation.row])
    space.check()


def test_chunks_behind_it_are_counted_from_where_it_begins() -> None:
    """A hit of 52 tokens: the window holds 12 before its end, and a first chunk of 4, in four blocks."""
    for num_blocks, status in ((4, AllocStatus.OK), (3, AllocStatus.LATER)):
        blocks = {"device": 101, "windows": 1 + 15 + num_blocks}
        space = new_space(FullAttention(4), windows(), num_blocks=blocks)
        row = allocate(space, tokens(60))
        run_step(space)
        space.free(row)
        evict_windows(space)
        allocate(space, tokens(60, first=500))
        assert space.can_allocate(tokens(56), match=ask(space, 56), max_chunk=4) is status


def test_explain_tells_of_the_windows() -> None:
    space = space_without_windows(explain=True)
    assert space.explain(tokens(PROMPT)).cause in {MissCause.WINDOW_GONE, MissCause.EVICTED}
    row = admit(space)
    explanation = space.explanation(row)
    assert (explanation.num_hit_tokens, explanation.cause) == (40, MissCause.NOT_FULL)


# Bad input


@pytest.mark.parametrize(("num_tokens", "num_layers"), [(0, 1), (1, 0), (-3, 2), (2, -1), (1.5, 1), ("1", 1)])
def test_a_replay_that_makes_no_sense_is_refused(num_tokens: object, num_layers: object) -> None:
    with pytest.raises(ConfigurationError, match=r"num_(tokens|layers)"):
        Replay(num_tokens, num_layers)  # type: ignore[arg-type]


def test_a_window_takes_nothing_else_for_a_replay() -> None:
    with pytest.raises(ConfigurationError, match="replay must be a Replay"):
        SlidingWindow(4, replay=12)  # type: ignore[arg-type]


def test_a_window_outside_prefix_caching_has_no_hits_to_complete() -> None:
    with pytest.raises(ConfigurationError, match="prefix_caching is False"):
        SlidingWindow(4, replay=EXACT, prefix_caching=False)
    with pytest.raises(ConfigurationError, match="prefix_caching is False"):
        SpaceConfig((FullAttention(), SlidingWindow(4, replay=EXACT)), num_blocks=9, prefix_caching=False)


@pytest.mark.parametrize("other", [ChunkedLocal(8), RecurrentState(16, pool="device"), SlidingWindow(8)])
def test_what_cannot_be_computed_again_stands_in_the_way(other: ChunkedLocal | RecurrentState | SlidingWindow) -> None:
    groups = FullAttention(), SlidingWindow(4, replay=EXACT), other
    with pytest.raises(ConfigurationError, match="cannot be replayed"):
        SpaceConfig(groups, num_blocks=9)
    outside = replace(other, prefix_caching=False)
    assert SpaceConfig((*groups[:2], outside), num_blocks=9).own_starts == (1, 2)


def test_without_full_attention_nobody_knows_what_could_be_computed_again() -> None:
    with pytest.raises(ConfigurationError, match="no group is such"):
        SpaceConfig((SlidingWindow(4, replay=EXACT),), num_blocks=9)


@pytest.mark.parametrize("most", [-1, 1.5, "12", None])
def test_a_bound_that_is_none_is_refused(most: object) -> None:
    space = space_without_windows()
    with unchanged(space), pytest.raises(ConfigurationError, match="max_replay_tokens"):
        space.match(tokens(PROMPT), max_replay_tokens=most)  # type: ignore[arg-type]
