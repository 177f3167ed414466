"""Promise 23: recurrent states are kept at the ends of prompts, whatever the interval, and prompts hit there."""

import numpy as np
import pytest

from pagedkv import (
    Allocation,
    BlockSpace,
    FullAttention,
    MediaSpan,
    PrefixHit,
    RecurrentState,
    RequestKeys,
    Shortage,
    SlidingWindow,
    TenantLimits,
    hash_block_tokens,
    hash_request_tokens,
)
from pagedkv.blocks.digests import ROOT_DIGEST
from pagedkv.contract.keys import NO_KEYS
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import TruncationError
from pagedkv.space.rows import NUM_ACCEPTED, NUM_BLOCKS, NUM_COMMON, NUM_PLANNED, NUM_TOKENS
from tests.space.spaces import acknowledge, hit, new_space, run_step, tokens, unchanged

HYBRID = FullAttention(4), RecurrentState(16)
POOLS = {"device": 101, "state": 11}


def hybrid(num_states: int = 10, **settings: object) -> BlockSpace:
    """Blocks of 4 tokens and a state every 16, so many of which can be had."""
    return new_space(*HYBRID, num_blocks={"device": 101, "state": num_states + 1}, **settings)  # type: ignore[arg-type]


def begin(space: BlockSpace, prompt: TokenIds, keys: RequestKeys = NO_KEYS) -> tuple[int, PrefixHit]:
    """Compute a prompt up to where its state is to be kept; return its row, and what it hit."""
    answer = space.match(prompt, keys=keys)
    allocation = space.allocate(np.asarray(prompt)[: answer.checkpoint or len(prompt)], keys=keys, match=answer)
    assert isinstance(allocation, Allocation)
    assert allocation.checkpoint == answer.checkpoint
    run_step(space)
    space.check()
    return allocation.row, answer


def serve(space: BlockSpace, prompt: TokenIds, keys: RequestKeys = NO_KEYS) -> int:
    """Serve a prompt from beginning to end, in the chunks of its answer; return how many tokens hit."""
    row, answer = begin(space, prompt, keys)
    rest = np.asarray(prompt)[space.num_tokens(row) :]
    if len(rest):
        assert space.append(row, rest) is None
        run_step(space)
    space.free(row)
    space.check()
    return answer.num_tokens


@pytest.mark.interpreted
def test_promise_23_a_prompt_asked_again_hits_to_the_end_of_its_last_full_block() -> None:
    """With an interval of 544, 1,248 tokens of 1,249 hit: 1,088 without a state at the prompt's end."""
    space = new_space(FullAttention(16), RecurrentState(544), num_blocks={"device": 300, "state": 9}, max_tokens=3000)
    prompt = tokens(1249)
    assert space.match(prompt).checkpoint == 1248
    assert serve(space, prompt) == 0
    assert serve(space, prompt) == 1248
    assert serve(space, tokens(2000)) == 1248


def test_promise_23_without_a_chunk_that_ends_there_the_last_interval_hits() -> None:
    space = hybrid()
    row = space.allocate(tokens(30))
    assert isinstance(row, Allocation)
    assert row.checkpoint == 28
    run_step(space)
    assert hit(space, tokens(30)) == 16


@pytest.mark.interpreted
@pytest.mark.parametrize("length", range(1, 40))
def test_promise_23_every_length_hits_as_far_as_attention_does(length: int) -> None:
    space = hybrid()
    serve(space, tokens(length))
    assert hit(space, tokens(length)) == (length - 1) // 4 * 4
    assert space.match(tokens(length)).checkpoint == 0


@pytest.mark.interpreted
@pytest.mark.parametrize("length", range(1, 12))
def test_promise_23_where_there_are_states_alone_all_but_the_last_token_hits(length: int) -> None:
    space = new_space(RecurrentState(5, pool="device"))
    serve(space, tokens(length))
    assert hit(space, tokens(length)) == length - 1


@pytest.mark.interpreted
def test_promise_23_states_of_different_intervals_are_kept_together() -> None:
    """At 24 one of them has an interval's end; both have one at 48."""
    groups = RecurrentState(16), FullAttention(4), RecurrentState(24), SlidingWindow(6, 2)
    space = new_space(*groups, num_blocks={"device": 201, "state": 31})
    for length in (25, 30, 50):
        serve(space, tokens(length))
        assert hit(space, tokens(length)) == (length - 1) // 4 * 4
    assert hit(space, tokens(27)) == 24


@pytest.mark.interpreted
def test_promise_23_of_prompts_that_branch_each_hits_its_own_longest_state() -> None:
    space = hybrid()
    serve(space, tokens(22))
    serve(space, [*range(22), *range(100, 108)])
    serve(space, [*range(22), *range(200, 204)])
    assert [hit(space, [*range(22), *range(first, first + 20)]) for first in (22, 100, 200, 300)] == [20, 28, 24, 20]
    assert hit(space, [*range(18), 7, 7, 7, 7]) == 16


@pytest.mark.interpreted
def test_promise_23_the_row_that_made_a_state_goes_on_from_a_copy() -> None:
    space = hybrid()
    row, _ = begin(space, tokens(22))
    kept = space.block_ids(row, 1)[-1]
    assert space.append(row, [20, 21]) is None
    plan = space.plan_step()
    (copy,) = plan.copies
    assert copy.pool == "state"
    assert (copy.src_ids.tolist(), copy.dst_ids.tolist()) == ([kept], space.block_ids(row, 1)[-1:])
    assert kept not in space.block_ids(row, 1)
    acknowledge(space, plan)
    assert space.append(row, [22]) is None
    assert run_step(space).copies == ()


@pytest.mark.interpreted
def test_promise_23_a_hit_goes_on_from_a_copy_and_leaves_the_state_to_others() -> None:
    space = hybrid()
    serve(space, tokens(22))
    first, second = (space.allocate(tokens(22)) for _ in range(2))
    assert isinstance(first, Allocation)
    assert isinstance(second, Allocation)
    assert first.num_hit_tokens == second.num_hit_tokens == 20
    assert space.block_ids(first.row, 1)[-1] != space.block_ids(second.row, 1)[-1]
    plan = run_step(space)
    assert plan.compute.starts.tolist() == [20, 20]
    assert len(set(plan.copies[0].src_ids.tolist())) == 1
    assert hit(space, tokens(22)) == 20


@pytest.mark.interpreted
def test_promise_23_forks_of_a_kept_state_copy_it_each() -> None:
    space = hybrid()
    row, _ = begin(space, tokens(22))
    children = space.fork(row, 2)
    assert space.append([row, *children], [1, 2, 3]) is None
    assert len(run_step(space).copies[0].src_ids) == 3
    space.check()
    assert hit(space, tokens(22)) == 20


@pytest.mark.interpreted
def test_promise_23_a_row_short_of_blocks_goes_on_in_place() -> None:
    """One block of states: what was kept of the prompt gives way."""
    space = hybrid(1)
    row, _ = begin(space, tokens(6))
    assert hit(space, tokens(6)) == 4
    assert space.can_append([row], [9])
    assert space.append(row, tokens(9, first=4)) is None
    assert run_step(space).copies == ()
    space.check()
    assert hit(space, tokens(6)) == 0


@pytest.mark.interpreted
def test_promise_23_rows_that_share_a_kept_state_and_are_short_of_blocks_share_it_no_more() -> None:
    space = hybrid(2)
    row, _ = begin(space, tokens(6))
    (child,) = space.fork(row)
    assert space.can_append([row, child])
    assert space.append([row, child], [1, 2]) is None
    assert len(run_step(space).copies[0].src_ids) == 1
    space.check()
    (child,) = space.fork(row)
    with unchanged(space):
        assert not space.can_append([row, child])
        assert space.append([row, child], [1, 2]) == Shortage("state", num_needed=1, num_free=0)


@pytest.mark.interpreted
def test_promise_23_a_hit_short_of_blocks_takes_the_state_over() -> None:
    """One block of states: without this the prompt could hit, and never be admitted."""
    space = hybrid(1)
    row, _ = begin(space, tokens(6))
    (kept,) = space.block_ids(row, 1)
    space.free(row)
    other = space.allocate(tokens(6))
    assert isinstance(other, Allocation)
    assert other.num_hit_tokens == 4
    assert space.block_ids(other.row, 1) == [kept]
    plan = run_step(space)
    assert plan.copies == ()
    assert kept not in [block for new in plan.new_blocks if new.pool == "state" for block in new.block_ids]
    space.check()
    assert hit(space, tokens(6)) == 0


@pytest.mark.interpreted
def test_promise_23_a_tenant_at_its_cap_takes_the_state_itself_over_though_another_block_is_free() -> None:
    limits = {"a": TenantLimits(cap={"device": 100, "state": 1})}
    space = hybrid(2, tenants=limits)
    for prompt in (tokens(6), tokens(6, first=100)):
        allocation = space.allocate(prompt[:4], match=space.match(prompt), tenant="a")
        assert isinstance(allocation, Allocation)
        run_step(space)
        (kept,) = space.block_ids(allocation.row, 1)
        space.free(allocation.row)
    other = space.allocate(tokens(6, first=100), tenant="a")
    assert isinstance(other, Allocation)
    assert other.num_hit_tokens == 4
    assert space.block_ids(other.row, 1) == [kept]
    assert run_step(space).copies == ()
    space.check()


@pytest.mark.interpreted
def test_promise_23_a_state_that_is_held_is_not_taken_over() -> None:
    space = hybrid(1)
    begin(space, tokens(6))
    with unchanged(space):
        assert space.allocate(tokens(6)) == Shortage("state", num_needed=1, num_free=0)


@pytest.mark.interpreted
def test_promise_23_a_state_that_a_step_in_flight_writes_can_be_hit_and_is_withdrawn_with_it() -> None:
    space = hybrid()
    answer = space.match(tokens(22))
    maker = space.allocate(tokens(20), match=answer)
    assert isinstance(maker, Allocation)
    assert hit(space, tokens(22)) == 0
    plan = space.plan_step()
    other = space.allocate(tokens(22))
    assert isinstance(other, Allocation)
    assert other.num_hit_tokens == 20
    aborted = space.abort(plan.step_id)
    assert aborted.rewound_rows == (maker.row,)
    assert aborted.lost_rows == (other.row,)
    space.check()
    assert hit(space, tokens(22)) == 0
    run_step(space)
    assert hit(space, tokens(22)) == 20


@pytest.mark.interpreted
def test_promise_23_of_two_rows_that_compute_the_same_state_one_gives_the_name() -> None:
    space = hybrid()
    rows = []
    for _ in range(2):
        allocation = space.allocate(tokens(20), match=space.match(tokens(22)))
        assert isinstance(allocation, Allocation)
        rows.append(allocation.row)
    run_step(space)
    space.check()
    assert space.append(rows, [20, 21]) is None
    assert len(run_step(space).copies[0].src_ids) == 1
    assert hit(space, tokens(22)) == 20


@pytest.mark.interpreted
def test_promise_23_a_row_swapped_out_at_its_kept_state_leaves_it_cached() -> None:
    space = hybrid(num_host_blocks={"device": 20, "state": 5})
    row, _ = begin(space, tokens(22))
    space.swap_out([row])
    run_step(space)
    assert hit(space, tokens(22)) == 20
    space.swap_in([row])
    assert space.append(row, [20]) is None
    run_step(space)
    space.check()
    assert hit(space, tokens(22)) == 20


@pytest.mark.interpreted
def test_promise_23_a_reset_forgets_kept_states_and_rows_of_before_keep_none() -> None:
    space = hybrid()
    answer = space.match(tokens(22))
    assert isinstance(space.allocate(tokens(20), match=answer), Allocation)
    serve(space, tokens(14))
    space.reset_prefix_cache()
    run_step(space)
    space.check()
    assert hit(space, tokens(22)) == hit(space, tokens(14)) == 0
    serve(space, tokens(14))
    assert hit(space, tokens(14)) == 12


@pytest.mark.interpreted
def test_promise_23_where_there_are_states_alone_rows_of_before_a_reset_keep_none() -> None:
    space = new_space(RecurrentState(16, pool="device"))
    assert isinstance(space.allocate(tokens(5), match=space.match(tokens(6))), Allocation)
    space.reset_prefix_cache()
    run_step(space)
    space.check()
    assert hit(space, tokens(6)) == 0


@pytest.mark.interpreted
def test_promise_23_where_there_are_states_alone_a_row_is_lost_with_the_step_that_writes_its_state() -> None:
    space = new_space(RecurrentState(16, pool="device"))
    maker = space.allocate(tokens(5), match=space.match(tokens(6)))
    assert isinstance(maker, Allocation)
    plan = space.plan_step()
    other = space.allocate(tokens(6))
    assert isinstance(other, Allocation)
    assert other.num_hit_tokens == 5
    assert space.abort(plan.step_id).lost_rows == (other.row,)
    space.check()


@pytest.mark.interpreted
def test_promise_23_an_evicted_state_is_not_hit() -> None:
    space = hybrid(3)
    serve(space, tokens(22))
    for first in range(100, 400, 100):
        serve(space, tokens(22, first=first))
    assert hit(space, tokens(22)) == 0
    assert hit(space, tokens(22, first=300)) == 20
    space.check()


@pytest.mark.interpreted
def test_promise_23_of_two_long_prompts_the_states_that_they_passed_go_first() -> None:
    """Five states of each, of which eight fit: the ends outlive what lies between."""
    space = hybrid(8)
    for first in (0, 1000):
        serve(space, tokens(70, first=first))
    lengths = [16, 32, 48, 64, 68]
    assert [hit(space, [*range(length), 7]) for length in lengths] == [0, 0, 0, 64, 68]
    assert [hit(space, [*range(1000, 1000 + length), 7]) for length in lengths] == lengths
    for first in (2000, 3000):
        serve(space, tokens(22, first=first))
    assert hit(space, tokens(70)) == hit(space, [*range(68), 7]) == 68
    assert [hit(space, [*range(1000, 1000 + length), 7]) for length in lengths] == [0, 0, 0, 64, 68]
    space.check()


KEYED = {
    "salt": (RequestKeys(salt=b"a"), RequestKeys(salt=b"b")),
    "medium in the tail": (RequestKeys(media=(MediaSpan(17, 2, b"x"),)), RequestKeys(media=(MediaSpan(17, 2, b"y"),))),
    "adapter": (RequestKeys(lora_name="a"), NO_KEYS),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("length", [14, 22])
@pytest.mark.parametrize("pair", KEYED.values(), ids=KEYED.keys())
def test_promise_23_other_keys_do_not_hit(pair: tuple[RequestKeys, RequestKeys], length: int) -> None:
    space = hybrid()
    serve(space, tokens(length), pair[0])
    assert hit(space, tokens(length), pair[0]) == (length - 1) // 4 * 4
    other = hit(space, tokens(length), pair[1])
    assert other <= (16 if pair[1].media and length > 16 else 0) or pair[1].media_reach > length


@pytest.mark.interpreted
def test_promise_23_a_medium_behind_the_kept_state_does_not_matter() -> None:
    """Neither for the prompt that computes the state, whose next block the medium reaches into, nor for a hit."""
    space = hybrid()
    prompts = [RequestKeys(media=(MediaSpan(2, 3, b"x"), MediaSpan(21, 20, digest))) for digest in (b"y", b"z")]
    serve(space, tokens(22), prompts[0])
    assert hit(space, tokens(42), prompts[1]) == 20
    assert serve(space, tokens(42), prompts[1]) == 20
    assert hit(space, tokens(42), prompts[1]) == 40
    assert hit(space, tokens(42), prompts[0]) == 20


@pytest.mark.interpreted
def test_promise_23_the_name_covers_parent_tail_and_length() -> None:
    space = hybrid(events=True)
    serve(space, tokens(22))
    parent = hash_request_tokens(tokens(16), 16)[0]
    wanted = hash_block_tokens(parent, tokens(4, first=16))
    stored = space.stored_block(wanted, group=1)
    assert stored is not None
    assert stored.token_ids.tolist() == [16, 17, 18, 19]
    assert stored.parent_digest == parent
    events = next(events for events in space.drain_events() if events.pool == "state")
    parents = zip(events.digests, events.parent_digests, strict=True)
    assert {digest.tobytes(): above.tobytes() for digest, above in parents}[wanted] == parent
    serve(space, tokens(6, first=50))
    first = space.stored_block(hash_block_tokens(ROOT_DIGEST, tokens(4, first=50)), group=1)
    assert first is not None
    assert first.parent_digest == ROOT_DIGEST


@pytest.mark.interpreted
def test_promise_23_questions_change_nothing() -> None:
    space = hybrid()
    row, _ = begin(space, tokens(22))
    serve(space, tokens(14))
    with unchanged(space):
        assert hit(space, tokens(22)) == 20
        space.can_allocate(tokens(22))
        space.can_append([row])
        with pytest.raises(TruncationError):
            space.truncate([row], [18])


@pytest.mark.interpreted
def test_promise_23_rolled_back_behind_its_kept_state_a_row_leaves_it_cached() -> None:
    space = hybrid()
    allocation = space.allocate(tokens(20), match=space.match(tokens(22)))
    assert isinstance(allocation, Allocation)
    plan = space.plan_step()
    space.truncate([allocation.row], [16])
    space.check()
    assert hit(space, tokens(22)) == 20
    space.append(allocation.row, [1, 2])
    acknowledge(space, plan)
    run_step(space)
    space.check()
    assert hit(space, tokens(22)) == 20


@pytest.mark.interpreted
def test_promise_23_what_a_hit_takes_is_told_beforehand() -> None:
    space = hybrid()
    serve(space, tokens(22))
    answer = space.match(tokens(22))
    assert [tail.group for tail in answer.tails] == [1]
    assert answer.num_blocks_needed["state"] == 2
    before = space.num_free_blocks("state")
    space.allocate(tokens(22), match=answer)
    assert before - space.num_free_blocks("state") == 2
    run_step(space)
    assert before - space.num_free_blocks("state") == 1


@pytest.mark.interpreted
@pytest.mark.parametrize("is_outside", [False, True], ids=["no caching", "a state outside"])
def test_promise_23_where_no_state_is_cached_nothing_is_to_be_kept(is_outside: bool) -> None:  # noqa: FBT001
    state = RecurrentState(16, prefix_caching=not is_outside)
    space = new_space(FullAttention(4), state, num_blocks=POOLS, prefix_caching=is_outside)
    assert space.match(tokens(22)).checkpoint == 0
    allocation = space.allocate(tokens(22))
    assert isinstance(allocation, Allocation)
    assert allocation.checkpoint == 0


@pytest.mark.interpreted
def test_promise_17_a_kept_state_that_was_written_since_is_noticed() -> None:
    space = hybrid()
    row, _ = begin(space, tokens(22))
    space._state.rows[row, [NUM_TOKENS, NUM_ACCEPTED, NUM_PLANNED]] += 1
    space._state.rows[row, NUM_COMMON + NUM_BLOCKS] += 1
    full = space._state.groups[0]
    full.arrays.table[row, 5] = (full.pool.acquire(1) or [0])[0]
    with pytest.raises(AssertionError, match="is kept, but was written since"):
        space.check()


@pytest.mark.interpreted
def test_promise_17_a_kept_state_under_the_name_of_others_is_noticed() -> None:
    space = hybrid()
    row, _ = begin(space, tokens(22))
    space._state.groups[1].pool.arrays.tokens[space.block_ids(row, 1)[-1], 2] += 1
    with pytest.raises(AssertionError, match="is kept for other tokens"):
        space.check()
