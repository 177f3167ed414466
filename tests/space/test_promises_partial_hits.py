"""Promise 24: the leading tokens of the next cached block hit as well, by a copy in the plan, if they are enough."""

from itertools import product

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    AllocStatus,
    BlockSpace,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    Load,
    MediaSpan,
    RecurrentState,
    RequestKeys,
    Shortage,
    SlidingWindow,
    SpaceConfig,
)
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import ConfigurationError, TokenError, TooManySequencesError
from tests.space.partial_prompts import OTHERS, copies_of, leaving, space_of
from tests.space.spaces import (
    acknowledge,
    allocate,
    cache,
    hit,
    new_space,
    only_pool,
    prefill,
    run_step,
    tokens,
    unchanged,
)

# What hits


@pytest.mark.interpreted
def test_promise_24_a_prompt_that_leaves_a_chain_inside_a_block_hits_its_leading_tokens() -> None:
    space = space_of()
    source = prefill(space, tokens(12))
    answer = space.match(leaving(6))
    assert (answer.num_tokens, answer.num_whole_tokens) == (6, 4)
    assert [blocks.tolist() for blocks in answer.block_ids] == [space.block_ids(source)[:1]]
    (tail,) = answer.tails
    assert (tail.group, tail.block, tail.logical_index, tail.num_tokens) == (0, space.block_ids(source)[1], 1, 2)
    allocation = space.allocate(leaving(6), match=answer)
    assert isinstance(allocation, Allocation)
    assert allocation.num_hit_tokens == 6
    mine, theirs = space.block_ids(allocation.row), space.block_ids(source)
    assert (mine[0], len(mine)) == (theirs[0], 4)
    assert not set(mine[1:]) & set(theirs)
    plan = space.plan_step()
    assert copies_of(plan) == [("device", theirs[1], mine[1])]
    assert [(plan.compute.starts.tolist(), plan.compute.ends.tolist())] == [([6], [14])]
    assert mine[1] not in [block for new in plan.new_blocks for block in new.block_ids.tolist()]
    acknowledge(space, plan)
    space.check()
    assert hit(space, leaving(6, 9)) == 12


@pytest.mark.interpreted
@pytest.mark.parametrize("length", range(1, 17))
def test_promise_24_a_prompt_that_ends_inside_a_block_hits_all_but_its_last_token(length: int) -> None:
    space = space_of()
    cache(space, tokens(16))
    assert hit(space, tokens(length)) == length - 1
    row = allocate(space, tokens(length))
    plan = run_step(space)
    assert (plan.compute.starts.tolist(), plan.compute.ends.tolist()) == ([length - 1], [length])
    space.free(row)
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", [(FullAttention(4),), (FullAttention(4), SlidingWindow(5, 4))], ids=str)
def test_promise_24_unless_it_is_asked_for_hits_end_where_blocks_end(groups: tuple[GroupSpec, ...]) -> None:
    space = new_space(*groups)
    cache(space, tokens(12))
    for at in range(12):
        answer = space.match(leaving(at))
        assert (answer.num_tokens, answer.tails) == (at // 4 * 4, ())


@pytest.mark.interpreted
@pytest.mark.parametrize(("least", "at"), list(product([1, 2, 3, 4], range(9))))
def test_promise_24_it_is_done_where_it_saves_enough_tokens(least: int, at: int) -> None:
    space = space_of(min_partial_hit=least)
    cache(space, tokens(12))
    assert hit(space, leaving(at)) == (at if at % 4 >= least else at // 4 * 4)


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", [(FullAttention(4),), (FullAttention(4), FullAttention(2))], ids=str)
@pytest.mark.parametrize("most", range(14))
def test_promise_24_a_bound_on_the_hit_may_lie_inside_a_block(groups: tuple[GroupSpec, ...], most: int) -> None:
    space = space_of(*groups)
    cache(space, tokens(12))
    answer = space.match(leaving(10), max_hit_tokens=most)
    assert answer.num_tokens == min(most, 10)
    allocation = space.allocate(leaving(10), match=answer)
    assert isinstance(allocation, Allocation)
    assert allocation.num_hit_tokens == min(most, 10)
    run_step(space)
    space.check()


@pytest.mark.interpreted
def test_promise_24_where_prompts_branched_before_the_last_to_leave_serves_the_next() -> None:
    space = space_of()
    for first in (100, 200, 300):
        cache(space, [*range(6), *range(first, first + 10)])
    assert hit(space, leaving(6)) == 6
    assert hit(space, [*range(6), 300, 301, *OTHERS]) == 8
    assert hit(space, [*range(6), 300, *OTHERS]) == 7


@pytest.mark.interpreted
def test_promise_24_tokens_that_are_equal_behind_another_prefix_do_not_hit() -> None:
    space = space_of()
    cache(space, tokens(12))
    assert hit(space, [9, 9, 9, 9, 4, 5, 6, 7, 8]) == 0
    assert hit(space, [*range(5), 9, 9, 9, 8, 9, 10, 11, 12]) == 5


@pytest.mark.interpreted
def test_promise_24_digests_brought_by_the_caller_grant_nothing_inside_a_block() -> None:
    space = space_of()
    cache(space, tokens(12))
    for row in (np.zeros((3, 32), np.uint8), np.ones((3, 32), np.uint8)):
        assert space.match(leaving(6, 6), digests=row).num_tokens in {0, 2, 6}
    space.allocate(tokens(12, first=50), digests=np.zeros((3, 32), np.uint8))
    run_step(space)
    assert hit(space, [*range(50, 52), *OTHERS]) in {0, 2}
    assert hit(space, [*range(6), *OTHERS]) in {0, 6}


KEYED = {
    "salt": (RequestKeys(salt=b"a"), RequestKeys(salt=b"b")),
    "adapter": (RequestKeys(lora_name="a"), NO_KEYS),
    "medium": (RequestKeys(media=(MediaSpan(1, 2, b"x"),)), RequestKeys(media=(MediaSpan(1, 2, b"y"),))),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", [(FullAttention(4),), (SlidingWindow(9, 4),)], ids=str)
@pytest.mark.parametrize("pair", KEYED.values(), ids=KEYED.keys())
def test_promise_24_other_keys_do_not_hit(pair: tuple[RequestKeys, RequestKeys], groups: tuple[GroupSpec, ...]) -> None:
    space = space_of(*groups)
    cache(space, tokens(12), pair[0])
    assert hit(space, leaving(3), pair[0]) == 3
    assert hit(space, leaving(6), pair[0]) == 6
    assert hit(space, leaving(3), pair[1]) == hit(space, leaving(6), pair[1]) == 0
    space.set_weights_epoch("b")
    assert hit(space, leaving(3), pair[0]) == 0


@pytest.mark.interpreted
@pytest.mark.parametrize(("start", "expected"), [(4, 4), (5, 5), (6, 6), (7, 6), (12, 6)])
def test_promise_24_a_medium_that_begins_behind_what_hits_does_not_matter(start: int, expected: int) -> None:
    space = space_of()
    cache(space, tokens(12))
    assert hit(space, leaving(6), RequestKeys(media=(MediaSpan(start, 2, b"x"),))) == expected
    cache(space, tokens(12), RequestKeys(media=(MediaSpan(2, 4, b"y"), MediaSpan(7, 2, b"z"))))
    assert hit(space, leaving(6), RequestKeys(media=(MediaSpan(2, 4, b"y"), MediaSpan(7, 2, b"z")))) == 6
    assert hit(space, leaving(6), RequestKeys(media=(MediaSpan(2, 4, b"y"),))) == 4


# Room


@pytest.mark.interpreted
def test_promise_24_a_small_pool_is_never_stuck_for_it() -> None:
    """Three blocks: with no room for a copy, the row continues in the block itself, which no other row holds."""
    space = space_of(num_blocks=4)
    cache(space, tokens(12))
    answer = space.match(leaving(6, 5))
    (tail,) = answer.tails
    assert answer.num_blocks_needed == {"device": 4}
    assert space.can_allocate(leaving(6, 5), match=answer) is AllocStatus.OK
    allocation = space.allocate(leaving(6, 5), match=answer)
    assert isinstance(allocation, Allocation)
    assert allocation.num_hit_tokens == 6
    assert space.block_ids(allocation.row)[1] == tail.block
    plan = run_step(space)
    assert plan.copies == ()
    assert tail.block not in [block for new in plan.new_blocks for block in new.block_ids.tolist()]
    space.check()
    assert hit(space, leaving(6, 5)) == 8


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", [(FullAttention(4),), (FullAttention(4), SlidingWindow(5, 4))], ids=str)
@pytest.mark.parametrize("watermark", [0.0, 0.2])
def test_promise_24_questions_and_answers_agree_in_pools_of_any_size(
    groups: tuple[GroupSpec, ...], watermark: float
) -> None:
    for num_blocks, at, num_held in product(range(8, 18), (5, 6, 8, 11), (0, 1, 2)):
        space = space_of(*groups, num_blocks=num_blocks, watermark=watermark)
        space.allocate(tokens(12))
        run_step(space)
        space.free(0)
        for place in range(num_held):
            space.allocate(tokens(3, first=900 + 10 * place))
        run_step(space)
        answer = space.match(leaving(at))
        status = space.can_allocate(leaving(at), match=answer)
        assert status is space.can_allocate(leaving(at))
        before = space.num_free_blocks()
        allocation = space.allocate(leaving(at), match=answer)
        if status is AllocStatus.OK:
            assert isinstance(allocation, Allocation)
        if isinstance(allocation, Allocation):
            assert allocation.num_hit_tokens == answer.num_tokens
            assert before - space.num_free_blocks() <= answer.num_blocks_needed["device"]
        space.check()
        run_step(space)
        space.check()


@pytest.mark.interpreted
def test_promise_24_questions_change_nothing() -> None:
    space = space_of(FullAttention(4), SlidingWindow(5, 4))
    row = prefill(space, tokens(12))
    cache(space, leaving(6))
    with unchanged(space):
        assert hit(space, leaving(6, 3)) == 8
        assert hit(space, [*range(6), 900, 901, 902]) == 6
        space.can_allocate([*range(6), 900, 901, 902])
        space.can_append([row])


# Several groups

MIXES: dict[str, tuple[GroupSpec, ...]] = {
    "full and window": (FullAttention(4), SlidingWindow(5, 4)),
    "window and full": (SlidingWindow(9, 4, num_sink_tokens=2), FullAttention(4)),
    "two sizes": (FullAttention(4), FullAttention(8)),
    "three sizes": (FullAttention(8), SlidingWindow(7, 4), SlidingWindow(3, 2)),
    "chunks": (FullAttention(4), ChunkedLocal(8, 4)),
    "chunks that begin inside blocks": (FullAttention(4), ChunkedLocal(6, 4)),
    "windows alone": (SlidingWindow(5, 4),),
    "chunks alone": (ChunkedLocal(8, 4),),
    "one outside": (FullAttention(4), SlidingWindow(5, 2, prefix_caching=False)),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("at", range(4, 17))
def test_promise_24_all_groups_serve_what_a_running_sequence_holds(groups: tuple[GroupSpec, ...], at: int) -> None:
    """The other sequence has not moved on yet: its windows hold what lies before."""
    space = space_of(*groups, num_blocks=200)
    maker = allocate(space, tokens(16))
    space.plan_step()  # in flight: windows slide once it is acknowledged
    answer = space.match(leaving(at, 9))
    assert answer.num_tokens == at
    row = allocate(space, leaving(at, 9))
    plan = space.plan_step()
    assert plan.compute.starts.tolist() == [at]
    sizes = [group.block_size for group in groups if group.prefix_caching]
    assert len(copies_of(plan)) == sum(at % size > 0 for size in sizes)
    for step in list(space._ledger.in_flight):
        space.acknowledge(step.plan.step_id)
    space.check()
    space.free([maker, row])
    space.check()


@pytest.mark.interpreted
def test_promise_24_where_a_window_is_gone_the_hit_is_shorter() -> None:
    space = space_of(FullAttention(4), SlidingWindow(5, 4), num_blocks={"device": 60})
    cache(space, tokens(32))
    for first in range(1000, 1400, 100):  # evicts what the window has passed, and no other block
        space.free(prefill(space, tokens(40, first=first)))
    assert hit(space, leaving(30)) in {0, 30}
    assert hit(space, leaving(14)) in {0, 14}
    space.check()


@pytest.mark.interpreted
def test_promise_24_a_window_keeps_the_block_in_which_prompts_have_left_it() -> None:
    """As it keeps the window before: the third prompt that leaves there hits as far as the second one."""
    space = space_of(FullAttention(4), SlidingWindow(5, 4), num_blocks=31)
    cache(space, tokens(48))
    for first in (1000, 2000):
        prompt = [*range(14), *range(first, first + 30)]
        assert hit(space, prompt) == 14
        cache(space, prompt)
    for first in range(3000, 3300, 100):
        assert hit(space, [*range(14), *range(first, first + 9)]) == 14
        cache(space, [*range(14), *range(first, first + 9)])
        space.check()


@pytest.mark.interpreted
def test_promise_24_a_window_keeps_that_block_while_others_take_those_that_it_sheds() -> None:
    space = space_of(FullAttention(4), SlidingWindow(5, 4), num_blocks=31)
    for prompt in (range(48), [*range(14), *range(1000, 1030)], [*range(14), *range(2000, 2030)]):
        cache(space, [*prompt])
    cache(space, tokens(29, first=5000))
    assert hit(space, [*range(14), *range(3000, 3009)]) == 14


@pytest.mark.interpreted
@pytest.mark.parametrize("num_equal", [1, 2, 3])
def test_promise_24_a_block_of_a_window_without_its_prefix_does_not_begin_a_prompt(num_equal: int) -> None:
    """It was loaded without the blocks before it, so nothing but its digest shows that it follows them."""
    space = space_of(FullAttention(4), SlidingWindow(5, 4), num_blocks=60)
    for prompt in (tokens(33), np.array([*range(500, 528), *range(5)], np.int32)):
        load = space.load(prompt, 32)
        assert isinstance(load, Load)
        space.finish_load(load)
    assert hit(space, [*range(num_equal), *range(900, 920)]) == 0, (
        "the window has a block 0, 1, 2, 3, which is no first"
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("at", range(4, 24))
def test_promise_24_with_states_it_ends_where_a_state_is(at: int) -> None:
    """States every 5 tokens, blocks of 4: behind each state that is cached, whatever the blocks."""
    space = space_of(FullAttention(4), RecurrentState(5), num_blocks={"device": 101, "state": 31})
    maker = allocate(space, tokens(24))
    run_step(space)
    assert hit(space, leaving(at)) == at // 5 * 5
    row = allocate(space, leaving(at))
    plan = run_step(space)
    assert [pool for pool, _, _ in copies_of(plan)] == ["device"] * (at // 5 * 5 % 4 > 0)
    space.free([maker, row])
    space.check()


@pytest.mark.interpreted
def test_promise_24_with_states_in_coarse_blocks_it_ends_where_a_state_is_kept() -> None:
    """A state that is kept at a prompt's end, in the middle of an interval and at the end of a block."""
    space = space_of(FullAttention(4), RecurrentState(16), num_blocks={"device": 101, "state": 31})
    answer = space.match(tokens(22))
    allocation = space.allocate(tokens(answer.checkpoint), match=answer)
    assert isinstance(allocation, Allocation)
    run_step(space)
    space.append(allocation.row, tokens(12, first=answer.checkpoint))
    run_step(space)
    answer = space.match(leaving(22))
    assert (answer.num_tokens, answer.num_whole_tokens) == (20, 20)
    space.check()


# What is reported


@pytest.mark.interpreted
def test_promise_24_receipts_count_what_hit_inside_blocks() -> None:
    space = space_of(receipts=True)
    cache(space, tokens(12))
    row = allocate(space, leaving(6))
    assert space.receipt(row).num_hit == 0
    run_step(space)
    receipt = space.receipt(row)
    assert (receipt.num_hit, receipt.num_hit_inside, receipt.num_computed) == (6, 2, 8)
    whole = allocate(space, leaving(4, 3))
    run_step(space)
    assert (space.receipt(whole).num_hit, space.receipt(whole).num_hit_inside) == (4, 0)
    total = space.statistics().receipts
    assert total is not None
    assert (total.num_hit, total.num_hit_inside) == (10, 2)
    space.check()


@pytest.mark.interpreted
def test_promise_24_statistics_count_the_source_as_a_block_that_hit() -> None:
    space = space_of()
    cache(space, tokens(12))
    allocate(space, leaving(6))
    assert space.statistics().pools[0].num_hit_blocks == 2


@pytest.mark.interpreted
@pytest.mark.parametrize("is_held", [True, False])
def test_promise_24_an_answer_tells_the_free_blocks_that_an_allocation_takes(*, is_held: bool) -> None:
    space = space_of()
    row = prefill(space, tokens(12))
    if not is_held:
        space.free(row)
    before = space.num_free_blocks()
    answer = space.match(leaving(6))
    allocate(space, leaving(6))
    assert before - space.num_free_blocks() == answer.num_blocks_needed["device"] == (3 if is_held else 5)
    run_step(space)


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", [(FullAttention(4),), (FullAttention(4), SlidingWindow(9, 4))], ids=str)
def test_promise_24_a_prompt_overwritten_where_a_block_is_hit_in_part_is_noticed(groups: tuple[GroupSpec, ...]) -> None:
    space = space_of(*groups)
    cache(space, tokens(12))
    prompt = np.array(leaving(6), np.int32)
    answer = space.match(prompt)
    prompt[5] = 77
    with unchanged(space), pytest.raises(TokenError, match="tokens 4 to 5 have been overwritten"):
        space.allocate(prompt, match=answer)


@pytest.mark.interpreted
def test_promise_24_the_first_chunk_of_a_prompt_takes_the_answer_for_the_whole() -> None:
    for length in range(1, 15):
        space, same = space_of(), space_of()
        for each in (space, same):
            cache(each, tokens(12))
        answer = space.match(leaving(6))
        mine, other = space.allocate(leaving(6)[:length], match=answer), same.allocate(leaving(6)[:length])
        assert isinstance(mine, Allocation)
        assert isinstance(other, Allocation)
        assert mine.num_hit_tokens == other.num_hit_tokens == min(6, length - 1)
        run_step(space)
        space.check()


@pytest.mark.interpreted
def test_promise_24_loads_and_what_the_engine_brings_begin_where_blocks_end() -> None:
    space = space_of()
    cache(space, tokens(12))
    load = space.load(leaving(6, 10), 16)
    assert load is not None
    assert not isinstance(load, Shortage)
    assert (load.num_hit_tokens, load.num_tokens) == (4, 16)
    space.finish_load(load)
    row = space.allocate([*range(6), *range(700, 720)], num_external_tokens=20)
    assert isinstance(row, Allocation)
    assert row.num_hit_tokens == 4
    few = space.allocate([*range(6), *range(800, 820)], num_external_tokens=5)
    assert isinstance(few, Allocation)
    assert few.num_hit_tokens == 6
    run_step(space)
    space.check()


@pytest.mark.interpreted
def test_promise_24_a_row_that_goes_on_as_its_source_does_gives_its_copy_back() -> None:
    space = space_of()
    maker = prefill(space, tokens(12))
    row = allocate(space, tokens(7))
    run_step(space)
    space.append(row, [7])
    run_step(space)
    run_step(space)
    assert space.block_ids(row) == space.block_ids(maker)[:2]
    space.check()


def test_promise_24_what_is_no_number_of_tokens_is_refused() -> None:
    for wrong in (-1, 1.5, "2", None):
        with pytest.raises(ConfigurationError):
            space_of(min_partial_hit=wrong)


def token_ids_of(space: BlockSpace, block: int) -> list[int]:
    """Tokens that are noted of a block."""
    return [int(token) for token in only_pool(space).arrays.tokens[block]]


@pytest.mark.interpreted
def test_promise_24_the_copy_is_named_for_its_own_tokens_alone() -> None:
    space = space_of()
    cache(space, tokens(12))
    row = allocate(space, leaving(6, 3))
    run_step(space)
    assert token_ids_of(space, space.block_ids(row)[1]) == leaving(6, 3)[4:8]
    assert space.num_cached_blocks() == 2
    space.append(row, tokens(4, first=90))
    run_step(space)
    space.check()
    assert hit(space, [*leaving(6, 3), *range(90, 95)]) == 12


def test_a_refused_allocation_leaves_no_block_chosen_for_the_next_one() -> None:
    """It was to take over the block inside which its hit ends, and found no row."""
    config = SpaceConfig((FullAttention(4),), num_blocks=5, max_sequences=1, watermark=0.0, min_partial_hit=1)
    space = BlockSpace(config)
    space.free(prefill(space, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    row = prefill(space, [90, 91, 92])
    prompt = [1, 2, 3, 4, 5, 6, 80, 81, 82]  # its copy of the second block has no room beside that block
    assert space.match(prompt).num_tokens == 6
    with pytest.raises(TooManySequencesError):
        space.allocate(prompt)
    space.free(row)
    space.allocate([70, 71, 72, 73, 74], num_external_tokens=2)  # this kind once took what the refused one had chosen
    space.check()
