"""What admission promises where groups differ (docs/design.md, Promises: 1, 15, 16), each by direct examples."""

import pytest

from pagedkv import (
    AllocStatus,
    BlockSpace,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    RecurrentState,
    SlidingWindow,
    TenantLimits,
)
from pagedkv.errors import ConfigurationError, TokenError
from pagedkv.space.admission import Admission, peak_free_blocks_needed
from tests.space.spaces import allocate, cache, held, hit, new_space, prefill, run_step, tokens, unchanged

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def prefill_in_chunks(space: BlockSpace, num_tokens: int, max_chunk: int) -> int:
    """Serve a prompt in chunks, each step acknowledged before the next; return the most blocks held at a time."""
    hits = space.match(tokens(num_tokens)).num_tokens
    usable = space.num_free_blocks()
    row = allocate(space, tokens(min(num_tokens, hits + max_chunk)))
    most = usable - space.num_free_blocks()
    run_step(space)
    while (length := space.num_tokens(row)) < num_tokens:
        chunk = tokens(min(max_chunk, num_tokens - length), first=length)
        assert space.append(row, chunk, [len(chunk)]) is None
        most = max(most, usable - space.num_free_blocks())
        run_step(space)
    return most


@pytest.mark.interpreted
def test_promise_01_never_means_never_where_windows_give_blocks_back() -> None:
    space = new_space(SlidingWindow(8, block_size=16), num_blocks=20)
    assert space.can_allocate(tokens(400)) is NEVER, "in one step it needs 25 blocks"
    assert space.can_allocate(tokens(400), max_chunk=16) is OK
    assert prefill_in_chunks(space, 400, 16) == 2


MIXES: tuple[tuple[GroupSpec, ...], ...] = (
    (FullAttention(4),),
    (SlidingWindow(6, 4),),
    (SlidingWindow(5, 2, num_sink_tokens=5),),
    (FullAttention(4), SlidingWindow(7, 2)),
    (ChunkedLocal(8, 4), FullAttention(4)),
    (FullAttention(4), RecurrentState(8, pool="device")),
)


@pytest.mark.interpreted
@pytest.mark.parametrize("max_chunk", [1, 3, 8, 64])
@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_01_the_most_blocks_of_a_chunked_prefill_are_counted_exactly(
    groups: tuple[GroupSpec, ...], max_chunk: int
) -> None:
    """With a pool of exactly as many blocks as it takes the answer is OK, with one less it is NEVER."""
    for num_cached in (0, 17, 33):
        num_tokens = 49
        roomy = new_space(*groups, num_blocks=200)
        most = prefill_in_chunks(roomy, num_tokens, max_chunk)
        exact = new_space(*groups, num_blocks=most + 1)
        assert exact.can_allocate(tokens(num_tokens), max_chunk=max_chunk) is OK
        assert prefill_in_chunks(exact, num_tokens, max_chunk) == most
        short = new_space(*groups, num_blocks=max(2, most))
        assert short.can_allocate(tokens(num_tokens), max_chunk=max_chunk) is NEVER
        if num_cached:
            warm = new_space(*groups, num_blocks=200)
            cache(warm, tokens(num_cached))
            match = warm.match(tokens(num_tokens))
            counted = peak_free_blocks_needed(warm._state, Admission(match._prompt, 0, 1, max_chunk), match)
            assert prefill_in_chunks(warm, num_tokens, max_chunk) == counted["device"]


@pytest.mark.interpreted
def test_promise_15_where_a_chunk_begins_nothing_before_it_is_asked_for() -> None:
    """The chunk before the hit's end is gone from the chunked group; the full group vouches for its tokens."""
    space = new_space(
        FullAttention(4), ChunkedLocal(8, block_size=4, pool="local"), num_blocks={"device": 50, "local": 8}
    )
    row = prefill(space, tokens(24))
    assert held(space, row, group=1) == []
    space.free(row)
    cache(space, tokens(26, first=500))  # evicts the chunks, in a pool of 7
    assert hit(space, tokens(26)) == 24
    again = allocate(space, tokens(26))
    assert space.block_ids(again, 1)[:6] == [0] * 6
    run_step(space)
    space.check()
    space.append(again, tokens(8, first=26), [8])
    run_step(space)
    space.free(again)
    assert hit(space, tokens(35)) == 32, "the digest chain went on behind the gap"
    space.check()


def test_promise_15_chunks_alone_must_show_what_was_computed() -> None:
    """With chunked groups only, nothing else shows that these tokens were ever seen."""
    space = new_space(ChunkedLocal(8, block_size=4))
    assert hit(space, tokens(25)) == 0


@pytest.mark.interpreted
def test_promise_16_a_hit_does_not_mix_pending_and_settled_blocks() -> None:
    """The window lost what the full group still caches: to compute it for the window must not write that again."""
    space = new_space(FullAttention(4), SlidingWindow(4, 2, pool="window"), num_blocks={"device": 60, "window": 20})
    cache(space, tokens(16))
    cached = [space.match(tokens(17)).num_tokens]
    cache(space, tokens(37, first=500))
    first, second = allocate(space, tokens(13)), allocate(space, tokens(13))
    assert (cached, hit(space, tokens(17))) == ([16], 0)
    assert not set(space.block_ids(first)[:3]) & set(space.block_ids(second)[:3]), "the cached ones carry the names"
    space.free(first)
    assert run_step(space).compute.starts.tolist() == [0]
    space.check()


@pytest.mark.interpreted
def test_promise_14_sinks_are_held_although_the_window_has_moved_on() -> None:
    space = new_space(SlidingWindow(5, block_size=4, num_sink_tokens=4))
    row = prefill(space, tokens(8))
    space.truncate(row, [7])
    space.check()


@pytest.mark.interpreted
def test_promise_11_what_lies_beyond_the_length_need_not_be_there() -> None:
    space = new_space(SlidingWindow(1, block_size=3, num_sink_tokens=2))
    row = prefill(space, tokens(6))
    space.truncate(row, [2])
    assert space.num_tokens(row) == 2
    space.check()


@pytest.mark.interpreted
def test_promise_14_a_fork_that_waited_slides_with_the_step_it_waited_for() -> None:
    space = new_space(SlidingWindow(2, block_size=2))
    parent = allocate(space, tokens(17))
    (child,) = space.fork(parent).tolist()
    run_step(space)
    assert len(held(space, parent)) == len(held(space, child)) == 1
    space.check()


@pytest.mark.interpreted
def test_promise_01_a_first_chunk_takes_the_whole_hit_also_what_it_does_not_read() -> None:
    """A hit that ends where a chunk begins has a block that nothing reads any more, and that is taken all the same."""
    groups = FullAttention(1, pool="full", prefix_caching=False), ChunkedLocal(1, 1, pool="chunks")
    space = new_space(*groups, num_blocks={"full": 40, "chunks": 12})
    cache(space, tokens(2))
    prompt = [*tokens(1), *tokens(18, first=90)]
    found = space.match(prompt)
    assert found.num_tokens == 1
    assert space.can_allocate(prompt, match=found, max_chunk=11) is LATER
    assert space.can_allocate(prompt, match=found, max_chunk=10) is OK
    assert space.allocate(prompt[:11], match=found)


# How many of some prompts fit


def num_served_one_by_one(space: BlockSpace, prompts: list[list[int]]) -> int:
    for place, prompt in enumerate(prompts):
        if space.can_allocate(prompt) is not OK:
            return place
        allocate(space, prompt)
    return len(prompts)


@pytest.mark.interpreted
@pytest.mark.parametrize("watermark", [0.0, 0.3])
@pytest.mark.parametrize("num_blocks", [2, 3, 5, 9, 14, 20, 101])
@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_01_as_many_prompts_fit_as_can_be_allocated_one_after_another(
    groups: tuple[GroupSpec, ...], num_blocks: int, watermark: float
) -> None:
    space = new_space(*groups, num_blocks=num_blocks, watermark=watermark, max_sequences=5)
    prompts = [tokens(length, first=100 * length).tolist() for length in (3, 9, 17, 6, 2, 30)]
    counted = space.num_allocatable([space.match(prompt) for prompt in prompts])
    assert counted == num_served_one_by_one(space, prompts)


@pytest.mark.interpreted
@pytest.mark.parametrize("num_blocks", [5, 6, 7, 8, 9])
def test_promise_01_what_several_prompts_hit_is_counted_once(num_blocks: int) -> None:
    """Its four blocks are free, and taken by the first; each needs one more."""
    space = new_space(num_blocks=num_blocks)
    cache(space, tokens(16))
    prompts = [[*tokens(16).tolist(), last] for last in range(6)]
    assert space.num_allocatable([space.match(prompt) for prompt in prompts]) == num_blocks - 5
    assert num_served_one_by_one(space, prompts) == num_blocks - 5


def test_promise_01_tenants_are_counted_beside_one_another() -> None:
    space = new_space(num_blocks=21, tenants={"a": TenantLimits(cap=5), "b": TenantLimits(floor=8)})
    answers = [space.match(tokens(8, first=first)) for first in range(0, 900, 100)]
    assert space.num_allocatable(answers, tenants=["a"] * 9) == 2
    assert space.num_allocatable(answers, tenants=["a", "b"] * 4 + ["b"]) == 4
    assert space.num_allocatable(answers, tenants=["b"] * 9) == 9
    assert space.num_allocatable(answers) == 6
    assert space.num_allocatable([]) == 0


def test_promise_01_lookahead_and_vacant_rows_count_for_each() -> None:
    space = new_space(num_blocks=9, max_sequences=3, max_tokens=20)
    answers = [space.match(tokens(8, first=first)) for first in range(0, 900, 100)]
    assert space.num_allocatable(answers) == 3
    assert space.num_allocatable(answers, num_lookahead=1) == 2
    with unchanged(space), pytest.raises(TokenError, match="8 tokens and 13 lookahead slots"):
        space.num_allocatable(answers, num_lookahead=13)
    with unchanged(space), pytest.raises(ConfigurationError, match="tenants must name one tenant"):
        space.num_allocatable(answers, tenants=[None])
    with unchanged(space), pytest.raises(ConfigurationError, match="matches must be a list"):
        space.num_allocatable([tokens(8)])  # type: ignore[list-item]


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_01_prompts_that_were_touched_fit_as_they_were_counted(groups: tuple[GroupSpec, ...]) -> None:
    """The pool is full of other content, which is evicted in place of what they hit."""
    space = new_space(*groups, num_blocks=71, max_sequences=100)
    prompts = [[*tokens(25, first=first).tolist(), 7] for first in (0, 1000, 2000)]
    for prompt in prompts:
        cache(space, prompt[:-1])
    for first in range(3000, 6000, 1000):
        cache(space, tokens(9, first=first))
    for prompt in prompts:
        space.touch(prompt)
    several = [prompt for prompt in prompts for _ in range(30)]
    answers = [space.match(prompt) for prompt in several]
    counted = space.num_allocatable(answers)
    assert 0 < counted < len(several)
    for prompt, answer in zip(several[:counted], answers, strict=False):
        assert hit(space, prompt) == answer.num_tokens == 24
        allocate(space, prompt)


@pytest.mark.interpreted
@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_01_slots_for_others_stay_free_whatever_the_room_of_a_row(groups: tuple[GroupSpec, ...]) -> None:
    """Whole blocks, as many as lookahead slots take where a row has room for these; not multiplied by forks."""
    long, short = (new_space(*groups, num_blocks=30, max_tokens=most, watermark=0) for most in (400, 12))
    for space in (long, short):
        allocate(space, tokens(10, first=500))
    answers = []
    for num_slots in range(0, 200, 4):
        answer = short.can_allocate(tokens(9), num_lookahead=1, num_reserved=num_slots)
        assert answer is long.can_allocate(tokens(9), num_lookahead=1 + num_slots)
        answers.append(answer)
    assert {answers[0], answers[-1]} == ({OK} if isinstance(groups[0], RecurrentState) else {OK, NEVER})
    with unchanged(short), pytest.raises(TokenError):
        short.can_allocate(tokens(9), num_lookahead=4)
    sixteen = {count: short.can_allocate(tokens(4), num_reserved=16, num_sequences=count) for count in (1, 3)}
    assert sixteen[1] is sixteen[3]


def test_promise_08_slots_for_others_stay_free_when_rows_come_back() -> None:
    space = new_space(num_blocks=13, num_host_blocks=12, max_tokens=16, watermark=0)
    row = allocate(space, tokens(8))
    run_step(space)
    space.swap_out([row])
    run_step(space)
    allocate(space, tokens(4, first=100))
    room = {count: space.can_swap_in([row], num_reserved=count) for count in (0, 4, 32, 36, 40, 100)}
    assert room == {0: OK, 4: OK, 32: OK, 36: LATER, 40: NEVER, 100: NEVER}
