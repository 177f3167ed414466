"""Promise 31: names that cover tokens ahead, for groups whose entries depend on the tokens behind them.

The machine simulates the memory: an entry of such a group is the tokens up to those ahead, and what every row holds is
compared with what it should be.
"""

from collections.abc import Callable, Iterator
from typing import Final, Unpack

import numpy as np
import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedkv import (
    Allocation,
    AllocStatus,
    BlockSpace,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    MediaSpan,
    RecurrentState,
    Replay,
    RequestKeys,
    SlidingWindow,
    SpaceConfig,
    StepPlan,
    TenantLimits,
    hash_block_tokens,
    hash_request_tokens,
)
from pagedkv.blocks.digests import ROOT_DIGEST, root_digest
from pagedkv.blocks.record import KEPT, SPARE
from pagedkv.contract.spec import TokenIds
from pagedkv.errors import ConfigurationError, SharedPrefixError, TruncationError
from pagedkv.space.rows import NUM_PLANNED
from tests.space.spaces import (
    Settings,
    acknowledge,
    allocate,
    cache,
    hit,
    new_space,
    prefill,
    run_step,
    tokens,
    unchanged,
)

pytestmark = pytest.mark.interpreted

PLAIN: Final = FullAttention(4)
AHEAD: Final = FullAttention(4, num_ahead=1)
MIXES: Final[tuple[tuple[GroupSpec, ...], ...]] = (
    (AHEAD,),
    (PLAIN, AHEAD),
    (FullAttention(4, num_ahead=3), FullAttention(2)),
    (PLAIN, FullAttention(2, num_ahead=2), SlidingWindow(6, 4, num_ahead=1)),
    (SlidingWindow(5, 2, num_ahead=2, pool="windows"), FullAttention(4), SlidingWindow(8, 4, pool="windows")),
    (SlidingWindow(6, 4, num_sink_tokens=3, num_ahead=1), ChunkedLocal(8, 4)),
)


def space_of(groups: tuple[GroupSpec, ...] = (PLAIN, AHEAD), **given: Unpack[Settings]) -> BlockSpace:
    given.setdefault("num_blocks", dict.fromkeys((group.pool for group in groups), 101))
    return new_space(*groups, **given)


def changed(prompt: TokenIds, place: int) -> list[int]:
    """The prompt with another token at one place."""
    other = list(prompt)
    other[place] = 10_000 + other[place]
    return other


def block_named(space: BlockSpace, digest: bytes, group: int = 1) -> int | None:
    return space._state.groups[group].pool.prefix_index.find(group, digest)


def named(space: BlockSpace, prompt: TokenIds, group: int = 1) -> list[int]:
    """The logical blocks of a prompt that have a name in a group, by the plain reference."""
    spec = space.config.groups[group]
    names = hash_request_tokens(prompt, spec.block_size, num_ahead=getattr(spec, "num_ahead", 0))
    return [index for index, name in enumerate(names) if block_named(space, name, group)]


# Names


def test_promise_31_the_name_of_a_block_is_a_digest_over_its_tokens_and_those_ahead() -> None:
    prompt = list(range(13))
    names = hash_request_tokens(prompt, 4, num_ahead=2)
    first = hash_block_tokens(root_digest(2), prompt[:6])
    assert names == [first, hash_block_tokens(first, prompt[4:10])], "two tokens are known behind two blocks"
    assert hash_request_tokens(prompt, 4, num_ahead=0) == hash_request_tokens(prompt, 4)
    assert hash_request_tokens(prompt[:5], 4, num_ahead=2) == []


def test_promise_31_no_name_equals_an_ordinary_one_or_one_with_other_tokens_ahead() -> None:
    """Not even where the covered tokens are the same: 6 of them, of blocks of 6, 5 and 4 tokens."""
    prompt = list(range(40))
    names = [
        name for size in (4, 5, 6) for ahead in (0, 1, 2) for name in hash_request_tokens(prompt, size, num_ahead=ahead)
    ]
    assert len(set(names)) == len(names)
    assert root_digest(0) == ROOT_DIGEST
    assert len({root_digest(ahead) for ahead in range(5)}) == 5


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_31_the_space_names_blocks_as_the_reference_does(groups: tuple[GroupSpec, ...]) -> None:
    space = space_of(groups, shed_windows=False)
    prefill(space, tokens(31))
    for index, group in enumerate(groups):
        ahead = getattr(group, "num_ahead", 0)
        assert named(space, tokens(31), index) == list(range((31 - ahead) // group.block_size))
    space.check()


def test_promise_31_check_proves_names_from_the_tokens_ahead() -> None:
    space = space_of()
    prefill(space, tokens(13))
    arrays = space._state.groups[1].pool.arrays
    block = block_named(space, hash_request_tokens(tokens(13), 4, num_ahead=1)[1])
    assert arrays.tokens[block].tolist() == [4, 5, 6, 7, 8]
    arrays.tokens[block, 4] = 99
    with pytest.raises(AssertionError, match="named for other content"):
        space.check()


# Hits


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_promise_31_prompts_that_differ_in_the_next_token_do_not_share_the_block_before(num_blocks: int) -> None:
    space = space_of()
    cache(space, tokens(17))
    other = changed(tokens(17), 4 * num_blocks)
    assert space.match_each(other) == (4 * num_blocks, 4 * (num_blocks - 1))
    assert hit(space, np.array(other)) == 4 * (num_blocks - 1)
    assert space.match_each(tokens(17)) == (16, 16)


@pytest.mark.parametrize("groups", MIXES, ids=str)
@pytest.mark.parametrize("length", range(1, 18))
def test_promise_31_an_equal_prompt_hits_all_whose_tokens_ahead_it_knows(
    groups: tuple[GroupSpec, ...], length: int
) -> None:
    space = space_of(groups, shed_windows=False)
    cache(space, tokens(40))
    sizes = [group.block_size for group in groups]
    aheads = [getattr(group, "num_ahead", 0) for group in groups]
    most = [min(length - 1, length - ahead) // size * size for size, ahead in zip(sizes, aheads, strict=True)]
    assert space.match_each(tokens(length)) == tuple(max(0, each) for each in most)
    alignment = np.lcm.reduce(sizes)
    assert hit(space, tokens(length)) == max(0, min(most)) // alignment * alignment


@pytest.mark.parametrize("place", range(1, 16))
def test_promise_31_every_group_tells_how_far_it_can_prove_a_prompt(place: int) -> None:
    groups = (PLAIN, AHEAD, FullAttention(4, num_ahead=4), FullAttention(2, num_ahead=1))
    space = space_of(groups)
    cache(space, tokens(21))
    expected = [max(0, (place - group.num_ahead) // group.block_size * group.block_size) for group in groups]
    assert list(space.match_each(changed(tokens(21), place))) == expected


def test_promise_31_content_of_another_continuation_is_found_beside_the_first() -> None:
    """Each has a block of its own in the group that looks ahead; the successor of the block before is only one."""
    space = space_of()
    first, second = tokens(13), np.array([*range(8), 100, 101, 102, 103, 104])
    cache(space, first)
    cache(space, second)
    assert space.match_each(first) == space.match_each(second) == (12, 12)
    shared = hash_request_tokens(first, 4)[1]
    one, other = (hash_request_tokens(each, 4, num_ahead=1)[1] for each in (first, second))
    assert block_named(space, shared, 0)
    assert block_named(space, one) != block_named(space, other)


def test_promise_31_the_last_token_of_a_prompt_is_always_computed() -> None:
    space = space_of()
    cache(space, tokens(40))
    for length in (4, 5, 8, 9):
        assert hit(space, tokens(length)) == (length - 1) // 4 * 4


def test_promise_31_rows_of_one_step_share_by_the_tokens_ahead() -> None:
    space = space_of()
    first, second, third = (allocate(space, each) for each in (tokens(13), tokens(13), changed(tokens(13), 8)))
    space.check()
    assert space.block_ids(first, 1)[:3] == space.block_ids(second, 1)[:3]
    assert space.block_ids(third, 1)[:1] == space.block_ids(first, 1)[:1]
    assert space.block_ids(third, 1)[1] != space.block_ids(first, 1)[1]
    assert space.block_ids(third, 0)[1] != space.block_ids(first, 0)[1], "a hit ends in all groups at the same place"
    space.free([first])
    space.check()
    run_step(space)
    assert hit(space, tokens(13)) == 12


def test_promise_31_equal_content_merges_and_content_with_other_tokens_ahead_does_not() -> None:
    space = space_of()
    rows = [allocate(space, each) for each in (tokens(8), changed(tokens(9), 8))]
    run_step(space)
    again = [allocate(space, each) for each in (tokens(8), tokens(8))]
    space.append([rows[0], *again], [8, 8, 8])
    run_step(space)
    space.append([rows[0], *again], [9, 9, 9])
    run_step(space)
    space.check()
    assert len({int(space.block_ids(row, 1)[1]) for row in (rows[0], *again)}) == 1
    assert len({int(space.block_ids(row, 0)[1]) for row in (*rows, *again)}) == 1
    assert space.block_ids(rows[0], 1)[1] != space.block_ids(rows[1], 1)[1]


@pytest.mark.parametrize("ahead", [1, 2])
def test_promise_31_media_that_begin_in_the_tokens_ahead_are_told_apart(ahead: int) -> None:
    space = space_of((PLAIN, FullAttention(4, num_ahead=ahead)))
    start = 8 + ahead - 1
    one, other = (RequestKeys(media=(MediaSpan(start, 3, digest),)) for digest in (b"x", b"y"))
    cache(space, tokens(18), one)
    assert space.match_each(tokens(18), keys=one) == (16, 16)
    assert space.match_each(tokens(18), keys=other) == (8, 4)
    names = hash_request_tokens(tokens(18), 4, one, num_ahead=ahead)
    assert [bool(block_named(space, name)) for name in names] == [True] * len(names)


@pytest.mark.parametrize("keys", [RequestKeys(salt=b"a"), RequestKeys(lora_name="a")], ids=str)
def test_promise_31_other_keys_are_other_names(keys: RequestKeys) -> None:
    space = space_of()
    cache(space, tokens(13), keys)
    assert space.match_each(tokens(13), keys=keys) == (12, 12)
    assert space.match_each(tokens(13)) == (0, 0)


# Publishing


def test_promise_31_a_generated_token_names_the_block_before_it() -> None:
    space = space_of()
    row = prefill(space, tokens(8))
    assert (named(space, tokens(8), 0), named(space, tokens(9))) == ([0, 1], [0])
    space.append([row], [8])
    assert named(space, tokens(9)) == [0, 1], "the token after block 1 is known"
    assert hit(space, tokens(12)) == 8
    run_step(space)
    space.check()


def test_promise_31_with_several_tokens_ahead_the_name_waits_for_the_step_that_completes_the_block() -> None:
    space = space_of((PLAIN, FullAttention(4, num_ahead=3)))
    row = prefill(space, tokens(8))
    space.append([row], [8, 9], counts=[2])
    run_step(space)
    space.append([row], [10])
    assert named(space, tokens(11)) == [0, 1], "position 9, from which the last entry of block 1 is, has been computed"
    space.free([row])
    row = prefill(space, tokens(12, 100))
    space.append([row], [112, 113, 114], counts=[3])
    assert named(space, tokens(15, 100)) == [0, 1], (
        "block 2 is completed with position 113, which the open step computes"
    )
    run_step(space)
    space.append([row], [115])
    assert named(space, tokens(16, 100)) == [0, 1, 2]
    space.check()


def test_promise_31_an_aborted_step_takes_back_the_name_of_a_block_that_it_completes() -> None:
    space = space_of((PLAIN, FullAttention(4, num_ahead=2)))
    row = prefill(space, tokens(8))
    space.append([row], [8])
    plan = space.plan_step()
    space.append([row], [9])
    assert named(space, tokens(10)) == [0, 1]
    space.abort(plan.step_id)
    assert named(space, tokens(10)) == [0]
    space.check()


def test_promise_31_drafts_name_nothing_until_they_are_accepted() -> None:
    space = space_of()
    row = prefill(space, tokens(8))
    space.append([row], [8, 9, 10], counts=[3], num_draft=3)
    run_step(space)
    assert named(space, tokens(9)) == [0]
    space.truncate([row], [9])
    assert named(space, tokens(9)) == [0, 1]
    space.check()


def test_promise_31_other_drafts_are_what_is_named_once_they_are_accepted() -> None:
    space = space_of()
    row = prefill(space, tokens(8))
    space.append([row], [50, 51], counts=[2], num_draft=2)
    space.replace_drafts([row], [8, 9], [2])
    run_step(space)
    space.truncate([row], [10])
    assert named(space, tokens(9)) == [0, 1]
    assert named(space, [*range(8), 50]) == [0]
    space.check()


def test_promise_31_truncation_takes_back_names_that_cover_what_is_gone() -> None:
    space = space_of()
    row = prefill(space, tokens(13))
    space.truncate([row], [8])
    assert space.match_each(tokens(13)) == (12, 4)
    space.check()
    space.append([row], [8])
    assert named(space, tokens(9)) == [0]  # the next step may have to write the entry before it again
    run_step(space)
    space.check()


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.parametrize(("length", "sampled", "kept"), [(7, 0, 4), (4, 1, 4), (9, 0, 5)])
def test_promise_31_a_row_that_goes_on_otherwise_names_no_entry_of_before(
    length: int, sampled: int, kept: int, *, frees: bool
) -> None:
    """Entry 3 is that of the tokens behind it, of the prompt or sampled; no step is asked to write it again."""
    space = space_of((PLAIN, FullAttention(4, num_ahead=kept - 3)))
    row = prefill(space, tokens(length))
    if sampled:
        space.append([row], tokens(sampled, length))
    space.truncate([row], [kept])
    space.append([row], tokens(3, 90), counts=[3])
    if frees:
        space.free([row])
    space.check()
    assert space.match([*range(kept), 90, 91, 92, 93]).num_tokens == 0


def test_promise_31_a_row_whose_drafts_are_refused_names_on() -> None:
    space = space_of()
    row = prefill(space, tokens(4))
    space.append([row], tokens(3, 4), counts=[3], num_draft=2)
    run_step(space)
    space.truncate([row], [5])
    space.append([row], tokens(4, 50), counts=[4])
    assert named(space, [*range(5), 50, 51, 52, 53]) == [0, 1]


def test_promise_31_a_row_whose_lost_tokens_no_step_has_computed_names_on() -> None:
    space = space_of()
    row = allocate(space, tokens(9))
    space.truncate([row], [5])
    space.append([row], tokens(4, 50), counts=[4])
    assert named(space, [*range(5), 50, 51, 52, 53]) == [0, 1]


def test_promise_31_a_row_is_not_rolled_back_to_where_another_holds_a_block_for_the_token_ahead() -> None:
    space = space_of()
    first, second = prefill(space, tokens(13)), prefill(space, tokens(13))
    with unchanged(space), pytest.raises(SharedPrefixError, match="group 1"):
        space.truncate([first], [12])
    space.free([second])
    space.truncate([first], [12])
    space.check()


def test_promise_31_tokens_that_are_filled_in_later_name_blocks_when_their_step_is_over() -> None:
    space = space_of()
    row = allocate(space, tokens(8))
    plan = space.plan_step()
    space.append([row], None)
    later = space.plan_step()
    space.fill([row], [8])
    acknowledge(space, plan)
    assert named(space, tokens(9)) == [0]
    acknowledge(space, later)
    assert named(space, tokens(9)) == [0, 1]
    space.check()


def test_promise_31_a_prompt_in_chunks_is_named_as_a_whole_one() -> None:
    whole, chunked = space_of(), space_of()
    prefill(whole, tokens(21))
    row = prefill(chunked, tokens(8))
    for first in (8, 12):
        chunked.append([row], tokens(4, first), counts=[4])
        run_step(chunked)
    chunked.append([row], tokens(5, 16), counts=[5])
    run_step(chunked)
    assert named(whole, tokens(21)) == named(chunked, tokens(21)) == [0, 1, 2, 3, 4]


def test_promise_31_a_chunk_hits_no_more_than_its_own_tokens_determine() -> None:
    space = space_of((FullAttention(4, num_ahead=3),))
    cache(space, tokens(20))
    answer = space.match(tokens(20))
    assert answer.num_tokens == 16
    for length in range(9, 21):
        allocation = space.allocate(tokens(length), match=space.match(tokens(20)))
        assert isinstance(allocation, Allocation)
        assert allocation.num_hit_tokens == (length - 3) // 4 * 4
        space.check()
        run_step(space)
        space.free([allocation.row])


@pytest.mark.parametrize(("ahead", "length"), [(2, 1), (3, 1), (4, 2)])
def test_promise_31_a_prompt_shorter_than_the_tokens_ahead_is_matched_and_allocated(ahead: int, length: int) -> None:
    space = space_of((PLAIN, FullAttention(4, num_ahead=ahead)))
    answer = space.match(tokens(length))
    assert space.num_allocatable([answer]) == 1
    allocation = space.allocate(tokens(length), match=answer)
    assert isinstance(allocation, Allocation)
    assert allocation.num_hit_tokens == 0
    space.check()


def test_promise_31_what_a_prompt_may_publish_ends_before_a_generated_token() -> None:
    space = space_of()
    allocation = space.allocate(tokens(8), publish="prompt")
    assert isinstance(allocation, Allocation)
    run_step(space)
    space.append([allocation.row], [8])
    assert named(space, tokens(9)) == [0]
    space.check()


# Beside the rest of a space


def test_promise_31_an_evicted_block_is_hit_no_more() -> None:
    space = space_of()
    cache(space, tokens(13))
    while hit(space, tokens(13)):
        assert space.evict(1) == 1
        space.check()
    space.evict(100)
    assert space.match_each(tokens(13)) == (0, 0)


def test_promise_31_windows_beside_it_keep_what_the_agreed_hit_needs() -> None:
    """Of a sequence that ends with a block, the hit ends a block earlier, and the window before that is kept."""
    window = SlidingWindow(5, 4, pool="windows")
    for length in range(13, 30):
        space = space_of((PLAIN, AHEAD, window))
        row = prefill(space, tokens(10))
        for token in range(10, length):
            space.append([row], [token])
            run_step(space)
        space.free([row])
        records = space._state.groups[2].pool.arrays.records
        space.evict(int((records[:, KEPT] == SPARE).sum()), pool="windows")
        space.check()
        assert hit(space, tokens(60)) == (length - 1) // 4 * 4, length


def test_promise_31_swapped_rows_come_back_with_their_names() -> None:
    space = space_of(num_host_blocks=50)
    row = prefill(space, tokens(12))
    space.swap_out([row])
    space.check()
    run_step(space)
    space.evict(100)
    space.swap_in([row])
    run_step(space)
    space.append([row], [12])
    run_step(space)
    space.check()
    assert named(space, tokens(13))[-1:] == [2]


def test_promise_31_a_prompt_is_forgotten_with_the_blocks_that_know_of_it() -> None:
    space = space_of()
    cache(space, tokens(17))
    space.forget(tokens(17), start=8)
    assert space.match_each(tokens(17)) == (8, 4), "block 1 has the token at 8 in its name"
    space.check()


def test_promise_31_counted_epochs_leases_tenants_and_policies_go_with_it() -> None:
    limits = {"a": TenantLimits(cap=40), "b": TenantLimits()}
    space = space_of(weights_epoch=0, leases=True, eviction="adaptive", receipts=True, tenants=limits)
    cache(space, tokens(13))
    space.lease(tokens(13), 10.0)
    space.set_weights_epoch(1)
    assert hit(space, tokens(13)) == 0
    cache(space, tokens(13))
    assert space.match_each(tokens(13)) == (12, 12)
    answer = space.allocate(tokens(21), tenant="a")
    assert isinstance(answer, Allocation)
    assert answer.num_hit_tokens == 12
    assert [share.num_taken for share in space.tenant_shares("a")] == [12], "six blocks in each group"
    run_step(space)
    space.check()
    assert space.match_each(tokens(21)) == (20, 20)


# What is refused


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: FullAttention(4, num_ahead=5), "at most block_size = 4"),
        (lambda: FullAttention(4, num_ahead=-1), "num_ahead"),
        (lambda: FullAttention(4, num_ahead=1, prefix_caching=False), "prefix_caching is False"),
        (lambda: SlidingWindow(2, 4, num_ahead=2), "less than window = 2"),
        (lambda: space_of((AHEAD, RecurrentState(4))), "recurrent state"),
        (lambda: space_of((AHEAD, SlidingWindow(8, 4, replay=Replay(16, 1)))), "replay"),
        (lambda: space_of(min_partial_hit=1), "min_partial_hit=0"),
        (lambda: space_of(events=True), "events=False"),
        (lambda: space_of(explain=True), "explain=False"),
    ],
)
def test_promise_31_configurations_that_are_not_served_are_refused_with_the_reason(
    made: Callable[[], object], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        made()


def test_promise_31_operations_that_are_not_served_are_refused_with_the_reason() -> None:
    space = space_of()
    row = prefill(space, tokens(13))
    brought = np.zeros((3, 32), np.uint8)
    with unchanged(space):
        for refused in (
            lambda: space.fork(row),
            lambda: space.fork(row, at=8),
            lambda: space.load(tokens(20), 16),
            lambda: space.withdraw([1]),
            lambda: space.explain(tokens(13)),
            space.stored_blocks,
            lambda: space.stored_block(bytes(32)),
            lambda: space.next_victims(3),
            lambda: space.match(tokens(13), digests=brought),
        ):
            with pytest.raises(ConfigurationError, match=r"num_ahead=1\) cover tokens ahead"):
                refused()


def test_promise_31_without_prefix_caching_nothing_is_named_and_all_is_served() -> None:
    space = space_of(prefix_caching=False, events=False)
    row = prefill(space, tokens(13))
    assert len(space.fork(row, 2)) == 2
    space.check()


# The memory

MOST_TOKENS: Final = 40
MOST_IN_FLIGHT: Final = 3
NO_ENTRY: Final = (-1,)


class Sequence:
    """A live row: its tokens, the accepted ones, those computed, and how far each group's entries are written."""

    def __init__(self, prompt: list[int], num_hit: int, num_groups: int) -> None:
        self.tokens, self.num_accepted, self.num_computed = prompt, len(prompt), num_hit
        self.written = [num_hit] * num_groups


class AheadMachine(RuleBasedStateMachine):
    """A space with a simulated memory. ``aheads`` are the tokens ahead on which entries depend, by group."""

    groups: tuple[GroupSpec, ...] = (PLAIN, AHEAD)
    aheads: tuple[int, ...] | None = None

    @initialize(num_blocks=st.sampled_from((9, 14, 40)), in_order=st.booleans(), sheds=st.booleans())
    def build(self, num_blocks: int, *, in_order: bool, sheds: bool) -> None:
        """Build a space."""
        pools = dict.fromkeys((group.pool for group in self.groups), num_blocks)
        self.space = BlockSpace(
            SpaceConfig(
                self.groups,
                num_blocks=pools,
                num_host_blocks=dict.fromkeys(pools, 12),
                max_sequences=5,
                max_tokens=MOST_TOKENS,
                watermark=0.0,
                in_order=in_order,
                shed_windows=sheds,
                receipts=True,
            )
        )
        self.depend = self.aheads or tuple(getattr(group, "num_ahead", 0) for group in self.groups)
        self.memory: dict[tuple[int, str, int, int], tuple[int, ...]] = {}
        self.rows: dict[int, Sequence] = {}
        self.in_flight: list[StepPlan] = []
        self.arriving: set[int] = set()  # rows that the open plan moves in
        self.swapped: dict[int, Sequence] = {}
        self.prompts: list[list[int]] = [[]]

    # What the device does

    def _slots(self, row: int, group: int) -> Iterator[tuple[int, tuple[int, str, int, int]]]:
        """The positions of a row whose blocks it holds, with their places in memory."""
        spec, table = self.groups[group], self.space.block_ids(row, group)
        for position in range(len(self.rows[row].tokens)):
            block = table[position // spec.block_size]
            if block:
                yield position, (group, spec.pool, block, position % spec.block_size)

    def _complete(self, row: int) -> None:
        """Write the entries whose step has run, and whose tokens ahead are known."""
        sequence = self.rows[row]
        for group, ahead in enumerate(self.depend if row not in self.arriving else ()):
            end = min(sequence.num_computed - max(0, ahead - 1), len(sequence.tokens) - ahead)
            for position, place in self._slots(row, group):
                if sequence.written[group] <= position < end:
                    self.memory[place] = tuple(sequence.tokens[: position + ahead + 1])
            sequence.written[group] = max(sequence.written[group], end)

    def _move(self, plan: StepPlan) -> None:
        for swaps, source, target in ((plan.swaps_out, "", "host "), (plan.swaps_in, "host ", "")):
            for moves in swaps:
                for src, dst in zip(moves.src_ids.tolist(), moves.dst_ids.tolist(), strict=True):
                    for group, spec in enumerate(self.groups):
                        for offset in range(spec.block_size if spec.pool == moves.pool else 0):
                            held = self.memory.get((group, source + spec.pool, src, offset), NO_ENTRY)
                            self.memory[group, target + spec.pool, dst, offset] = held
        assert not plan.copies, "nothing is forked"

    @precondition(lambda self: len(self.in_flight) < MOST_IN_FLIGHT)
    @rule()
    def launch(self) -> None:
        """Plan a step; the device carries it out at once, and is believed when it is acknowledged."""
        plan = self.space.plan_step()
        self.in_flight.append(plan)
        self._move(plan)
        arrived, self.arriving = self.arriving & self.rows.keys(), set()
        for row in arrived:
            self._complete(row)
        compute = plan.compute
        for row, start, end in zip(compute.rows.tolist(), compute.starts.tolist(), compute.ends.tolist(), strict=True):
            sequence = self.rows[row]
            sequence.num_computed = end
            for group, ahead in enumerate(self.depend):
                sequence.written[group] = min(sequence.written[group], max(0, start - max(0, ahead - 1)))
            self._complete(row)
        self._verify()

    @precondition(lambda self: self.in_flight)
    @rule()
    def settle(self) -> None:
        """Acknowledge the oldest step."""
        self.space.acknowledge(self.in_flight.pop(0).step_id)
        self._verify()

    @rule()
    def step(self) -> None:
        """Run everything."""
        self.launch()
        while self.in_flight:
            self.settle()

    @precondition(lambda self: self.in_flight and not any(plan.swaps_in or plan.swaps_out for plan in self.in_flight))
    @rule()
    def fail(self) -> None:
        """Steps fail: what they wrote is undefined, their rows compute again, and those that are lost are freed."""
        aborted = self.space.abort(self.in_flight[0].step_id)
        self.in_flight.clear()
        for lost in aborted.lost_rows:
            self.space.free([lost])
            self.rows.pop(lost, None)
            self.swapped.pop(lost, None)
            self.arriving.discard(lost)
        for row, sequence in self.rows.items():
            sequence.num_computed = min(sequence.num_computed, int(self.space._state.rows[row, NUM_PLANNED]))
            for group, ahead in enumerate(self.depend):
                end = max(0, sequence.num_computed - max(0, ahead - 1))
                for position, place in self._slots(row, group):
                    if end <= position < sequence.written[group]:
                        self.memory[place] = NO_ENTRY
                sequence.written[group] = min(sequence.written[group], end)

    def _verify(self) -> None:
        """Whatever a row holds is the row's own, as far as it can be complete."""
        for row, sequence in self.rows.items():
            for group, ahead in enumerate(self.depend if row not in self.arriving else ()):
                for position, place in self._slots(row, group):
                    if position < sequence.written[group] and self._is_computed(row):
                        held = self.memory.get(place, NO_ENTRY)
                        assert held == tuple(sequence.tokens[: position + ahead + 1]), f"row {row}, group {group}"

    def _is_computed(self, row: int) -> bool:
        return self.rows[row].num_computed == len(self.rows[row].tokens)

    # What the scheduler does

    @rule(origin=st.integers(0, 30), cut=st.integers(0, 24), new=st.lists(st.integers(0, 1), max_size=9))
    def admit(self, origin: int, cut: int, new: list[int]) -> None:
        """Admit the beginning of a prompt seen before, and new tokens."""
        prompt = [*self.prompts[origin % len(self.prompts)][:cut], *new][: MOST_TOKENS - 8] or [0]
        if len(self.rows) + len(self.swapped) == 5:
            return
        allocation = self.space.allocate(prompt)
        self.prompts.append(prompt)
        if isinstance(allocation, Allocation):
            self.rows[int(allocation.row)] = Sequence(prompt, allocation.num_hit_tokens, len(self.groups))

    def _row(self, place: int) -> int:
        return list(self.rows)[place % len(self.rows)]

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 4), new=st.lists(st.integers(0, 1), min_size=1, max_size=6), num_draft=st.integers(0, 3))
    def append(self, place: int, new: list[int], num_draft: int) -> None:
        """Append tokens, the last ones perhaps drafts."""
        row = self._row(place)
        sequence, num_draft = self.rows[row], min(num_draft, len(new))
        if len(sequence.tokens) + len(new) > MOST_TOKENS:
            return
        if self.space.append([row], new, counts=[len(new)], num_draft=num_draft) is None:
            sequence.tokens = sequence.tokens + new
            sequence.num_accepted = len(sequence.tokens) - num_draft
            self.prompts.append(sequence.tokens)
            self._complete(row)

    @precondition(lambda self: self.rows)
    @rule(token=st.integers(0, 1))
    def decode(self, token: int) -> None:
        """Append a token to each row."""
        for place in range(len(self.rows)):
            self.append(place, [token], 0)

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 4), new=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def redraft(self, place: int, new: list[int]) -> None:
        """Replace drafts that no step has computed."""
        row = self._row(place)
        sequence = self.rows[row]
        num_draft = len(sequence.tokens) - sequence.num_accepted
        if num_draft < len(new) or sequence.num_computed > sequence.num_accepted:
            return
        self.space.replace_drafts([row], new, [len(new)])
        sequence.tokens = [*sequence.tokens[: -len(new)], *new]
        sequence.written = [
            min(written, max(0, len(sequence.tokens) - len(new) - ahead))
            for written, ahead in zip(sequence.written, self.depend, strict=True)
        ]
        self._complete(row)

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 4), back=st.integers(0, 6))
    def truncate(self, place: int, back: int) -> None:
        """Roll a row back, unless it is refused."""
        row = self._row(place)
        sequence = self.rows[row]
        length = max(1, len(sequence.tokens) - back)
        try:
            self.space.truncate([row], [length])
        except (SharedPrefixError, TruncationError):
            return
        sequence.tokens = sequence.tokens[:length]
        sequence.num_accepted, sequence.num_computed = length, min(length, sequence.num_computed)
        sequence.written = [
            min(written, max(0, length - ahead)) for written, ahead in zip(sequence.written, self.depend, strict=True)
        ]

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 4))
    def end(self, place: int) -> None:
        """Free a row."""
        row = self._row(place)
        self.space.free([row])
        del self.rows[row]
        self.arriving.discard(row)

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        """Evict cached blocks."""
        for pool in self.space.config.pool_names:
            self.space.evict(count, pool=pool)

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 4))
    def swap_out(self, place: int) -> None:
        """Move a row to the host."""
        row = self._row(place)
        if self.space.can_swap_out([row]) is AllocStatus.OK:
            self.space.swap_out([row])
            self.swapped[row] = self.rows.pop(row)
            self.arriving.discard(row)

    @precondition(lambda self: self.swapped)
    @rule(place=st.integers(0, 4))
    def swap_in(self, place: int) -> None:
        """Move it back."""
        row = list(self.swapped)[place % len(self.swapped)]
        if self.space.can_swap_in([row]) is AllocStatus.OK:
            self.space.swap_in([row])
            self.rows[row] = self.swapped.pop(row)
            self.arriving.add(row)

    @invariant()
    def holds(self) -> None:
        """Every invariant of the space holds."""
        if hasattr(self, "space"):
            self.space.check()


# Each kind of model, in the machine


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_31_whatever_happens_every_row_holds_its_own_entries(groups: tuple[GroupSpec, ...]) -> None:
    machine = type("Machine", (AheadMachine,), {"groups": groups})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))


SEARCH: Final = settings(max_examples=500, deadline=None, database=None, phases=[Phase.generate])


@pytest.mark.plain_only
@pytest.mark.parametrize(("groups", "aheads"), [((PLAIN,), (1,)), ((FullAttention(4, num_ahead=1),), (2,))], ids=str)
def test_promise_31_names_that_cover_too_little_are_found_out(
    groups: tuple[GroupSpec, ...], aheads: tuple[int, ...]
) -> None:
    """Entries depend on one token more than names cover: some row holds what is another one's."""
    machine = type("Machine", (AheadMachine,), {"groups": groups, "aheads": aheads})
    with pytest.raises(AssertionError, match="row"):
        run_state_machine_as_test(machine, settings=SEARCH)
