"""Promise 32: groups of cross-attention, whose blocks are those of an encoder's tokens.

All together, in any order, and with a simulated memory: ``test_cross_attention_machine.py``.
"""

from typing import Final, TypedDict, Unpack

import pytest

from pagedkv import (
    Allocation,
    AllocStatus,
    BlockHolders,
    BlockSpace,
    CrossAttention,
    FullAttention,
    GroupSpec,
    MediaSpan,
    RecurrentState,
    Replay,
    RequestKeys,
    Shortage,
    SlidingWindow,
    SpaceConfig,
    StepPlan,
    TenantLimits,
)
from pagedkv.blocks.record import REF_COUNT
from pagedkv.contract.keys import NO_KEYS
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import (
    BlockError,
    ConfigurationError,
    PlanError,
    StepError,
    TokenError,
    TruncationError,
)
from pagedkv.plan_buffer import (
    ALIGNMENT,
    CHECKSUM_HIGH,
    CHECKSUM_LOW,
    ENDS,
    HEADER_WORDS,
    KIND,
    LENGTH,
    LINE_WORDS,
    NUM_WORDS,
    OFFSET,
    OWNER,
    STARTS,
    read_directory,
    seal,
)
from pagedkv.space import SpaceInspection
from pagedkv.space.rows import FIRST_BLOCK, NUM_BLOCKS
from tests.space.spaces import Settings, copies_of, held, new_space, only_pool, pairs, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted

OWN: Final = FullAttention(4)
CROSS: Final = CrossAttention(30, 4)
CROSS_GROUP: Final = 1


class Asked(TypedDict, total=False):
    """What is asked of an admission besides the prompt."""

    keys: RequestKeys
    num_encoder_tokens: int


def keys_of(encoder: int) -> RequestKeys:
    """The keys of sequences that attend to an encoder."""
    return RequestKeys(media=(MediaSpan(0, 1, b"encoder %d" % encoder),))


def space_of(groups: tuple[GroupSpec, ...] = (OWN, CROSS), **given: Unpack[Settings]) -> BlockSpace:
    return new_space(*groups, **given)


def admit(space: BlockSpace, token_ids: TokenIds, num_encoder_tokens: int = 9, encoder: int = 0) -> int:
    """Allocate a sequence that fits, and its encoder's entries; return its row."""
    answer = space.allocate(token_ids, keys=keys_of(encoder), num_encoder_tokens=num_encoder_tokens)
    assert isinstance(answer, Allocation)
    return answer.row


def written(plan: StepPlan, group: int = CROSS_GROUP) -> dict[int, tuple[int, int]]:
    """The rows whose encoders a plan writes, and the positions."""
    ranges = plan.compute_in(group)
    each = zip(ranges.rows.tolist(), ranges.starts.tolist(), ranges.ends.tolist(), strict=True)
    return {row: (start, end) for row, start, end in each if start < end}


# One admission


@pytest.mark.parametrize("num_encoder_tokens", [0, 1, 4, 5, 30])
def test_promise_32_blocks_are_counted_by_the_encoder_s_tokens_alone(num_encoder_tokens: int) -> None:
    space = space_of()
    row = admit(space, tokens(6), num_encoder_tokens)
    expected = -(-num_encoder_tokens // 4)
    assert len(held(space, row)) == 2
    assert len(held(space, row, CROSS_GROUP)) == space.num_blocks([row], CROSS_GROUP).item() == expected
    assert space.encoder_lengths([row]).tolist() == [num_encoder_tokens]
    assert space.num_live_blocks() == 2 + expected
    for _ in range(9):
        run_step(space)
        assert space.append([row], [7]) is None
    assert len(held(space, row, CROSS_GROUP)) == expected
    space.truncate([row], [3])
    assert len(held(space, row, CROSS_GROUP)) == expected
    space.check()
    space.free([row])
    assert space.num_live_blocks() == 0
    space.check()


@pytest.mark.parametrize("num_blocks", range(1, 9))
def test_promise_32_a_question_counts_both_and_an_admission_takes_both_or_none(num_blocks: int) -> None:
    """Two blocks for the tokens and three for the encoder's, of so many."""
    space = space_of(num_blocks=num_blocks + 1)
    ask: Asked = {"keys": keys_of(0), "num_encoder_tokens": 9}
    with unchanged(space):
        status = space.can_allocate(tokens(6), **ask)
        fits = space.num_allocatable([space.match(tokens(6), keys=keys_of(0))], num_encoder_tokens=[9])
    assert (status, fits) == ((AllocStatus.OK, 1) if num_blocks >= 5 else (AllocStatus.NEVER, 0))
    if num_blocks >= 5:
        assert isinstance(space.allocate(tokens(6), **ask), Allocation)
    else:
        with unchanged(space):
            assert space.allocate(tokens(6), **ask) == Shortage("device", 5, num_blocks)


@pytest.mark.parametrize(("num_own", "num_cross", "short"), [(1, 9, "device"), (9, 2, "cross"), (1, 2, "device")])
def test_promise_32_whichever_pool_is_short_nothing_is_changed(num_own: int, num_cross: int, short: str) -> None:
    groups = OWN, CrossAttention(30, 4, pool="cross")
    space = space_of(groups, num_blocks={"device": num_own + 1, "cross": num_cross + 1})
    with unchanged(space):
        answer = space.allocate(tokens(6), keys=keys_of(0), num_encoder_tokens=9)
    assert isinstance(answer, Shortage)
    assert (answer.pool, answer.num_needed) == (short, 2 if short == "device" else 3)


def test_promise_32_later_and_beside_what_others_hold() -> None:
    space = space_of(num_blocks=13)
    first = admit(space, tokens(6))
    ask: Asked = {"keys": keys_of(1), "num_encoder_tokens": 21}
    with_20: Asked = {"keys": keys_of(1), "num_encoder_tokens": 20}
    assert space.can_allocate(tokens(6), **ask) is AllocStatus.LATER, "eight of seven"
    assert space.can_allocate(tokens(6), **with_20) is AllocStatus.OK
    assert space.can_allocate(tokens(6), max_chunk=2, **ask) is AllocStatus.LATER, "in chunks too"
    assert space.can_allocate(tokens(6), max_chunk=2, **with_20) is AllocStatus.OK
    for num_sequences, expected in ((5, AllocStatus.LATER), (6, AllocStatus.NEVER)):  # twelve, thirteen of twelve
        assert space.can_allocate(tokens(6), num_sequences=num_sequences, num_lookahead=1, **ask) is expected
    space.free([first])
    assert space.can_allocate(tokens(6), **ask) is AllocStatus.OK


def test_promise_32_prompts_that_are_counted_together_have_their_encoders_each() -> None:
    space = space_of(num_blocks=15)
    matches = [space.match(tokens(6), keys=keys_of(encoder)) for encoder in range(3)]
    for encoders, expected in (([9, 9, 9], 2), ([9, 20, 1], 2), ([9, 29, 1], 1), ([0, 9, 25], 2), (None, 3)):
        assert space.num_allocatable(matches, num_encoder_tokens=encoders) == expected, encoders
    for wrong in ([9, 9], 9, "999", [9, 9, 99]):
        with pytest.raises((ConfigurationError, TokenError)):
            space.num_allocatable(matches, num_encoder_tokens=wrong)  # type: ignore[arg-type]


def test_promise_32_a_tenant_is_charged_for_encoders() -> None:
    space = space_of(num_blocks=41, tenants={"a": TenantLimits(cap=6)})
    keys = keys_of(0)
    assert not space.exceeds_cap(tokens(6), keys=keys, num_encoder_tokens=16, tenant="a")
    assert space.exceeds_cap(tokens(6), keys=keys, num_encoder_tokens=17, tenant="a")
    assert space.can_allocate(tokens(6), keys=keys, num_encoder_tokens=17, tenant="a") is AllocStatus.NEVER
    with unchanged(space):
        assert isinstance(space.allocate(tokens(6), keys=keys, num_encoder_tokens=17, tenant="a"), Shortage)
    assert isinstance(space.allocate(tokens(6), keys=keys, num_encoder_tokens=16, tenant="a"), Allocation)
    assert space.tenant_shares("a")[0].num_taken == 6
    space.check()


@pytest.mark.parametrize("num_host_blocks", [5, 40])
def test_promise_32_tenants_are_charged_for_encoders_that_come_back(num_host_blocks: int) -> None:
    space = space_of(num_blocks=41, num_host_blocks=num_host_blocks + 1, tenants={"a": TenantLimits(cap=12)})
    row = space.allocate(tokens(6), keys=keys_of(0), num_encoder_tokens=9, tenant="a").row
    run_step(space)
    space.swap_out([row])
    run_step(space)
    (share,) = [share for share in space.tenant_shares("a") if share.pool == "device"]
    assert (share.num_taken, share.num_cached) == (0, 1), "its first block is cached"
    space.swap_in([row])
    run_step(space)
    assert space.tenant_shares("a")[0].num_taken == 5
    space.check()


# What the plan says


def test_promise_32_the_first_plan_writes_all_entries_and_no_later_one_any() -> None:
    space = space_of()
    first, second = admit(space, tokens(6)), admit(space, tokens(3, 50), 0, 1)
    plan = run_step(space)
    assert written(plan) == {first: (0, 9)}
    assert plan.crossing == {CROSS_GROUP}
    assert plan.compute_in(CROSS_GROUP).ends.tolist() == [9, 0], "the lengths that kernels read"
    assert set(plan.new_blocks[0].block_ids.tolist()) == {
        *held(space, first), *held(space, second), *held(space, first, CROSS_GROUP)
    }  # fmt: skip
    space.append([second, first], [7, 8])
    plan = space.plan_step()
    assert written(plan) == {}
    assert plan.compute_in(CROSS_GROUP).ends.tolist() == [9, 0]
    assert space.slot_mapping(plan, CROSS_GROUP).tolist() == []


def test_promise_32_slots_and_pages_are_those_of_the_encoder() -> None:
    space = space_of()
    row = admit(space, tokens(6))
    table = held(space, row, CROSS_GROUP)
    plan = space.plan_step()
    assert space.computed_block_ids(row, CROSS_GROUP) == []
    expected = [table[position // 4] * 4 + position % 4 for position in range(9)]
    assert space.slot_mapping(plan, CROSS_GROUP).tolist() == expected
    space.acknowledge(plan.step_id)
    assert space.computed_block_ids(row, CROSS_GROUP) == table[:2], "the full ones"
    (child,) = space.fork(row).tolist()
    pages = space.page_lists([child, row], CROSS_GROUP)
    assert pages.indices.tolist() == table * 2
    assert (pages.indptr.tolist(), pages.last_page_len.tolist()) == ([0, 3, 6], [1, 1])
    assert space.block_table(CROSS_GROUP)[child, :3].tolist() == table


def test_promise_32_a_chunked_prompt_writes_its_encoder_with_the_first_chunk() -> None:
    space = space_of()
    row = admit(space, tokens(3))
    assert written(run_step(space)) == {row: (0, 9)}
    space.append([row], tokens(5, 3), [5])
    assert written(run_step(space)) == {}


def test_promise_32_after_preemption_by_recomputation_it_is_written_again() -> None:
    space = space_of(receipts=True)
    row = admit(space, tokens(9))
    run_step(space)
    (receipt,) = space.free([row])
    answer = space.allocate(tokens(9), keys=keys_of(0), num_encoder_tokens=9, continues=receipt)
    assert isinstance(answer, Allocation)
    assert answer.num_hit_tokens == 8, "the tokens hit, the encoder's entries never do"
    assert written(run_step(space)) == {answer.row: (0, 9)}


def test_promise_32_what_a_failed_step_wrote_is_written_again() -> None:
    space = space_of()
    row = admit(space, tokens(6))
    first = space.plan_step()
    space.append([row], [7])
    second = space.plan_step()
    assert space.abort(first.step_id).rewound_rows == (row,)
    assert second is not None
    space.check()
    again = space.plan_step()
    assert written(again) == {row: (0, 9)}
    assert set(held(space, row, CROSS_GROUP)) <= set(again.new_blocks[0].block_ids.tolist())
    space.acknowledge(again.step_id)
    space.append([row], [8])
    later = space.plan_step()
    assert space.abort(later.step_id).rewound_rows == (row,)
    assert written(run_step(space)) == {}, "the failed step had not written it"


def test_promise_32_entries_brought_from_elsewhere_are_declared() -> None:
    space = space_of()
    row = admit(space, tokens(6))
    (child,) = space.fork(row).tolist()
    with unchanged(space), pytest.raises(StepError, match=r"share its encoder's|shares"):
        space.mark_computed([row])
    space.mark_computed([row, child])
    space.check()
    space.append([row], [7])
    plan = run_step(space)
    assert (written(plan), plan.compute.starts.tolist()) == ({}, [6])
    assert plan.new_blocks == (), "what was brought is not zeroed"


def test_promise_32_declaring_what_another_row_writes_is_refused() -> None:
    """The children share nothing of the tokens that is not computed, only the encoder's entries."""
    space = space_of()
    space.free([admit(space, tokens(9))])
    run_step(space)
    other = admit(space, tokens(9))
    run_step(space)
    space.free([other])
    row = admit(space, tokens(9))
    (child,) = space.fork(row, at=8)  # type: ignore[misc]
    with unchanged(space), pytest.raises(StepError, match="share its encoder's entries"):
        space.mark_computed([child])
    run_step(space)
    space.mark_computed([child])


def test_promise_32_of_a_prefix_from_elsewhere_the_encoder_is_still_to_be_written() -> None:
    space = space_of()
    answer = space.allocate(tokens(9), keys=keys_of(0), num_encoder_tokens=9, num_external_tokens=7)
    assert isinstance(answer, Allocation)
    space.check()
    plan = run_step(space)
    assert (plan.compute.starts.tolist(), written(plan)) == ([7], {answer.row: (0, 9)})


# Forks


def test_promise_32_forks_share_all_and_copy_none_of_it() -> None:
    space = space_of()
    row = admit(space, tokens(6))
    run_step(space)
    children = space.fork(row, 2).tolist()
    (branch,) = space.fork(row, at=3)  # type: ignore[misc]
    family = [row, *children, int(branch)]
    table = held(space, row, CROSS_GROUP)
    assert [held(space, each, CROSS_GROUP) for each in family] == [table] * 4
    assert space.ref_counts()[table].tolist() == [4, 4, 4]
    space.append(family, [7, 8, 9, 10])
    plan = run_step(space)
    assert written(plan) == {}
    assert not {block for pair in copies_of(plan) for block in pair} & set(table)
    assert plan.compute_in(CROSS_GROUP).ends.tolist() == [9] * 4
    for place, each in enumerate(family):
        assert space.ref_counts()[table].tolist() == [4 - place] * 3
        space.free([each])
        space.check()
    assert space.num_live_blocks() == 0


@pytest.mark.parametrize("leaves", ["free", "swap out"])
def test_promise_32_if_the_writer_leaves_a_fork_writes(leaves: str) -> None:
    """Also one that has nothing else to compute: it computes its last token once more, to be in the plan."""
    space = space_of(num_host_blocks=30)
    space.free([admit(space, tokens(9))])
    run_step(space)
    first = admit(space, tokens(9))
    run_step(space)
    space.free([first])
    row = admit(space, tokens(9))
    (branch,) = space.fork(row, at=8)  # type: ignore[misc]
    assert space._state.rows[branch, 3] == 8, "all that it has hit"
    if leaves == "free":
        space.free([row])
    else:
        space.swap_out([row])
    space.check()
    plan = run_step(space)
    assert written(plan) == {branch: (0, 9)}
    assert plan.compute.starts.tolist() == [7]
    if leaves == "swap out":
        space.swap_in([row])
        assert written(run_step(space)) == {row: (0, 9)}, "it had left before it was written"
    space.check()


def test_promise_32_a_fork_that_leaves_before_the_writer_has_written_writes_its_own() -> None:
    space = space_of(num_host_blocks=30)
    row = admit(space, tokens(6))
    (child,) = space.fork(row).tolist()
    space.swap_out([child])
    assert written(run_step(space)) == {row: (0, 9)}
    space.swap_in([child])
    space.check()
    assert written(run_step(space)) == {child: (0, 9)}


def test_promise_32_forks_of_a_step_that_fails_are_lost_and_their_parent_writes_again() -> None:
    space = space_of()
    row = admit(space, tokens(6))
    plan = space.plan_step()
    (child,) = space.fork(row, at=1)  # type: ignore[misc]
    aborted = space.abort(plan.step_id)
    assert (aborted.rewound_rows, aborted.lost_rows) == ((row,), (child,))
    space.check()
    space.free([child])
    assert written(run_step(space)) == {row: (0, 9)}


def test_promise_32_a_row_whose_encoder_waits_keeps_something_to_compute() -> None:
    """Else no plan would have it, and its forks would read what nobody writes."""
    space = space_of()
    space.free([admit(space, tokens(9))])
    run_step(space)
    row = admit(space, tokens(10))
    run_step(space)
    space.free([row])
    row = admit(space, tokens(10))
    with unchanged(space), pytest.raises(TruncationError, match="still to write its encoder's entries"):
        space.truncate([row], [8])
    space.truncate([row], [9])
    run_step(space)
    space.truncate([row], [8])
    space.check()


def test_promise_32_a_row_that_was_rolled_back_into_its_hit_is_lost_if_its_step_fails() -> None:
    space = space_of()
    row = admit(space, tokens(10))
    run_step(space)
    space.free([row])
    row = admit(space, tokens(10))
    plan = space.plan_step()
    space.truncate([row], [8])
    assert space.abort(plan.step_id).lost_rows == (row,)
    space.check()


# Swaps


def test_promise_32_swaps_move_the_encoder_s_blocks_with_the_row_s_and_shared_ones_once() -> None:
    space = space_of(num_host_blocks=30)
    row = admit(space, tokens(6))
    run_step(space)
    (child,) = space.fork(row).tolist()
    space.append([row, child], [7, 8])
    run_step(space)
    blocks = {block for each in (row, child) for group in (0, 1) for block in held(space, each, group)}
    assert space.can_swap_out([row, child]) is AllocStatus.OK
    moved = pairs(space.swap_out([row, child]))
    assert (len(moved), {source for source, _ in moved}) == (len(blocks), blocks)
    assert held(space, row, CROSS_GROUP) == held(space, child, CROSS_GROUP)
    run_step(space)
    space.check()
    assert space.num_live_blocks() == 0
    assert space.can_swap_in([row, child]) is AllocStatus.OK
    space.swap_in([child])
    assert written(run_step(space)) == {}
    space.swap_in([row])
    run_step(space)
    space.check()
    assert held(space, row, CROSS_GROUP) != held(space, child, CROSS_GROUP), "they came back one by one"
    assert space.append([row, child], [1, 2]) is None
    assert written(run_step(space)) == {}


def test_promise_32_questions_about_swaps_count_the_encoder_s_blocks() -> None:
    for num_host_blocks, expected in ((4, AllocStatus.NEVER), (5, AllocStatus.OK)):
        space = space_of(num_blocks=9, num_host_blocks=num_host_blocks + 1)
        row = admit(space, tokens(6))
        run_step(space)
        assert space.can_swap_out([row]) is expected
    space.swap_out([row])
    run_step(space)
    space.reset_prefix_cache()
    blocker = space.allocate(tokens(16, 100))
    assert isinstance(blocker, Allocation)
    assert space.can_swap_in([row]) is AllocStatus.LATER
    with unchanged(space):
        assert space.swap_in([row]) == Shortage("device", 5, 4)
    space.free([blocker.row])
    assert space.can_swap_in([row]) is AllocStatus.OK


def test_promise_32_a_pool_without_host_blocks_keeps_its_rows() -> None:
    groups = OWN, CrossAttention(30, 4, pool="cross")
    space = space_of(groups, num_blocks={"device": 20, "cross": 20}, num_host_blocks={"device": 20, "cross": 0})
    row = admit(space, tokens(6))
    run_step(space)
    assert space.can_swap_out([row]) is AllocStatus.NEVER


# Names


def test_promise_32_encoders_have_no_names_and_are_not_cached() -> None:
    space = space_of(events=True)
    row = admit(space, tokens(9))
    run_step(space)
    assert space.match_each(tokens(9), keys=keys_of(0)) == (8,)
    space.free([row])
    assert (space.num_cached_blocks(), space.num_live_blocks()) == (2, 0)
    assert len(space.stored_blocks().block_ids) == 2
    assert {block for event in space.drain_events() for block in event.block_ids.tolist()} <= {1, 2, 3, 4, 5, 6}


def test_promise_32_other_encoders_never_hit() -> None:
    space = space_of()
    space.free([admit(space, tokens(9))])
    run_step(space)
    row = admit(space, tokens(9))
    run_step(space)
    space.free([row])
    hits = [space.match(tokens(9), keys=each).num_tokens for each in (keys_of(0), keys_of(1), NO_KEYS)]
    assert hits == [8, 0, 0]


@pytest.mark.parametrize(
    "keys",
    [
        NO_KEYS,
        RequestKeys(lora_name="a"),
        RequestKeys(salt=b"a tenant's, whatever the encoder"),
        RequestKeys(media=(MediaSpan(1, 2, b"behind a token"),)),
    ],
    ids=["none", "an adapter", "a salt", "a late medium"],
)
def test_promise_32_keys_that_are_silent_about_the_encoder_are_refused(keys: RequestKeys) -> None:
    space = space_of(tenants={})
    match = space.match(tokens(6), keys=keys)
    with unchanged(space):
        for ask in (
            lambda: space.allocate(tokens(6), keys=keys, num_encoder_tokens=9),
            lambda: space.can_allocate(tokens(6), keys=keys, num_encoder_tokens=9),
            lambda: space.exceeds_cap(tokens(6), keys=keys, num_encoder_tokens=9, tenant=None),
            lambda: space.num_allocatable([match], num_encoder_tokens=[9]),
        ):
            with pytest.raises(ConfigurationError, match="prompts with other encoders would hit"):
                ask()
    assert isinstance(space.allocate(tokens(6), keys=keys), Allocation), "without an encoder"
    assert isinstance(
        space_of(prefix_caching=False).allocate(tokens(6), keys=keys, num_encoder_tokens=9), Allocation
    ), "without names"


def test_promise_32_more_tokens_than_the_table_has_room_for_are_refused() -> None:
    groups = OWN, CrossAttention(30, 4), CrossAttention(12, 3)
    space = space_of(groups)
    assert isinstance(space.allocate(tokens(3), keys=keys_of(0), num_encoder_tokens=12), Allocation)
    with unchanged(space), pytest.raises(TokenError, match="more than max_encoder_tokens = 12"):
        space.allocate(tokens(3), keys=keys_of(0), num_encoder_tokens=13)
    for wrong in (-1, 1.5, True, "9"):
        with unchanged(space), pytest.raises(ConfigurationError):
            space.allocate(tokens(3), keys=keys_of(0), num_encoder_tokens=wrong)  # type: ignore[arg-type]


def test_promise_32_without_such_a_group_there_is_no_encoder() -> None:
    space = new_space()
    row = space.allocate(tokens(3)).row
    with unchanged(space), pytest.raises(ConfigurationError, match="no group is a CrossAttention"):
        space.allocate(tokens(3), keys=keys_of(0), num_encoder_tokens=1)
    with pytest.raises(ConfigurationError, match="no group is a CrossAttention"):
        space.encoder_lengths([row])
    assert space.plan_step().crossing == frozenset()


@pytest.mark.parametrize("groups", [(CROSS,), (CROSS, OWN), (OWN, CROSS, FullAttention(2))])
def test_promise_32_groups_of_cross_attention_come_last(groups: tuple[GroupSpec, ...]) -> None:
    with pytest.raises(ConfigurationError, match="put groups of cross-attention after all others"):
        SpaceConfig(groups, num_blocks=20)


# What else holds blocks, or tells of them


def test_promise_32_tickets_hold_written_entries() -> None:
    space = space_of()
    row = admit(space, tokens(6))
    table = held(space, row, CROSS_GROUP)
    with unchanged(space), pytest.raises(BlockError, match="in the open step"):
        space.hold(table)
    run_step(space)
    ticket = space.hold(table)
    space.free([row])
    space.check()
    assert space.num_live_blocks() == 3
    space.release(ticket)
    assert space.num_live_blocks() == 0


def test_promise_32_rows_that_rely_on_bad_entries_are_lost_with_all_that_begins_so() -> None:
    space = space_of()
    row, other = admit(space, tokens(9)), admit(space, tokens(9), 9, 1)
    run_step(space)
    (child,) = space.fork(row).tolist()
    lost = space.withdraw(held(space, row, CROSS_GROUP)[2:])
    assert set(lost.lost_rows) == {row, child}
    assert set(lost.first_positions) == {0}
    space.check()
    assert space.match(tokens(9), keys=keys_of(0)).num_tokens == 0
    assert space.match(tokens(9), keys=keys_of(1)).num_tokens == 8
    assert space.append([other], [1]) is None


def test_promise_32_what_is_held_is_counted_and_told() -> None:
    space = space_of(num_blocks=11, receipts=True)
    row = admit(space, tokens(6))
    run_step(space)
    assert space.receipt(row).block_steps == (5,)
    assert space.receipt(row).num_computed == 6, "tokens of the sequence"
    assert space.statistics().pools[0].num_in_use == 5
    holders = space.shrink(8)
    assert isinstance(holders, BlockHolders)
    assert (holders.rows.tolist(), holders.num_blocks.tolist()) == ([row], [5])
    inspection = SpaceInspection()
    space.observe(inspection)
    seen = inspection.block("device", held(space, row, CROSS_GROUP)[0])
    assert (seen.rows, seen.group, seen.ref_count) == ((row,), None, 1)


def test_promise_32_check_notices_what_is_wrong() -> None:
    """Blocks that are not the encoder's, a planned part beyond it, and pending entries that nobody writes."""
    for column, value, complaint in (
        (NUM_BLOCKS, 4, "blocks beyond its encoder's|changes beyond"),
        (FIRST_BLOCK, 1, "below"),
    ):
        space = space_of()
        row = admit(space, tokens(6))
        group = space._state.cross_groups[0]
        space._state.rows[row, group.arrays.parameters[1] + column] = value
        with pytest.raises(AssertionError, match=complaint):
            space.check()
    for planned, complaint in ((10, "planned beyond its tokens"), (9, "no row computes the pending block")):
        space = space_of()
        row = admit(space, tokens(6))
        space._state.rows[row, space._state.cross_groups[0].planned] = planned
        with pytest.raises(AssertionError, match=complaint):
            space.check()
    space = space_of()
    row = admit(space, tokens(6))
    only_pool(space).arrays.records[held(space, row, CROSS_GROUP)[0], REF_COUNT] += 1
    with pytest.raises(AssertionError):
        space.check()


# Plans as bytes


def spoilt(plan: StepPlan, kind: int, column: int, value: int) -> bytes:
    """A plan with another number in the line of the directory of a kind of part."""
    words = plan.buffer.copy()
    line = next(number for number, each in enumerate(read_directory(words)) if each[KIND] == kind)
    words[HEADER_WORDS + LINE_WORDS * line + column] = value
    words[CHECKSUM_LOW : CHECKSUM_HIGH + 1] = 0
    seal(words)
    return words.tobytes()


def test_promise_32_a_plan_survives_its_journey_and_a_spoilt_one_is_refused() -> None:
    space = space_of((OWN, FullAttention(2, prefix_caching=False), CROSS))
    row = admit(space, tokens(6))
    plan = space.plan_step()
    there = StepPlan.from_buffer(plan.buffer.tobytes())
    assert there == plan
    assert there.crossing == {2}
    assert written(there, 2) == {row: (0, 9)}
    offset = next(each[OFFSET] for each in read_directory(plan.buffer) if each[KIND] == ENDS)
    for kind, column, value, complaint in (
        (ENDS, LENGTH, 0, "part 12 of 2 has 0 words"),
        (ENDS, OWNER, 0, "as cross-attention"),
        (ENDS, KIND, STARTS, "outside prefix caching|belongs"),
    ):
        with pytest.raises(PlanError, match=complaint):
            StepPlan.from_buffer(spoilt(plan, kind, column, value))
    words = plan.buffer[:-ALIGNMENT].copy()
    words[NUM_WORDS] -= ALIGNMENT
    line = HEADER_WORDS + LINE_WORDS * (len(read_directory(words)) - 1)
    words[line + OFFSET] = words[line + LENGTH] = words[CHECKSUM_LOW] = words[CHECKSUM_HIGH] = 0
    seal(words)
    with pytest.raises(PlanError, match="group 2 has 0 ends, but 1 ranges"):
        StepPlan.from_buffer(words)
    words = plan.buffer.copy()
    words[next(each[OFFSET] for each in read_directory(words) if each[:2] == [STARTS, 2])] = words[offset] + 1
    words[CHECKSUM_LOW : CHECKSUM_HIGH + 1] = 0
    seal(words)
    with pytest.raises(PlanError, match="begins at 10 in group 2, and ends at 9"):
        StepPlan.from_buffer(words)


# Beside other rules


@pytest.mark.parametrize(
    "own",
    [
        (RecurrentState(8, pool="device"), OWN),
        (OWN, RecurrentState(8, pool="device", num_draft_states=3)),
        (OWN, FullAttention(4, num_ahead=1)),
        (OWN, SlidingWindow(6, 4, replay=Replay(12, 1))),
    ],
    ids=str,
)
def test_promise_32_encoders_stand_beside_any_rule(own: tuple[GroupSpec, ...]) -> None:
    space = space_of((*own, CROSS), num_host_blocks=50)
    group = len(own)
    row = admit(space, tokens(9))
    assert written(run_step(space), group) == {row: (0, 9)}
    space.append([row], [7])
    run_step(space)
    space.swap_out([row])
    run_step(space)
    space.swap_in([row])
    plan = run_step(space)
    assert written(plan, group) == {}
    space.check()
    again = admit(space, tokens(9), 5)
    assert written(run_step(space), group) == {again: (0, 5)}
    space.free([row, again])
    space.check()
    assert space.num_live_blocks() == 0


def test_promise_32_encoders_of_rows_with_unknown_tokens_stay_where_they_are() -> None:
    """Ranges are upper bounds where tokens are refused, but an encoder's tokens are all known."""
    space = space_of()
    row = admit(space, tokens(6))
    first = space.plan_step()
    space.append([row], None, [3])
    second = space.plan_step()
    space.fill([row], [7])
    assert written(first) == {row: (0, 9)}
    assert second.compute_in(CROSS_GROUP).starts.tolist() == [9]
    assert space.abort(second.step_id).lost_rows == ()
    space.check()
    space.acknowledge(first.step_id)
    space.append([row], [8])
    assert written(run_step(space)) == {}
