"""Promise 27: leases, priority, forgetting, and sequences that publish their prompts only."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from pagedkv import (
    Allocation,
    AllocStatus,
    BlockSpace,
    FullAttention,
    GroupSpec,
    PrefixGone,
    RecurrentState,
    RequestKeys,
    Shortage,
    SlidingWindow,
    SpaceConfig,
)
from pagedkv.blocks.auditing import check_pool
from pagedkv.errors import ConfigurationError
from tests.compiling import TESTED_POLICIES
from tests.space.spaces import allocate, cache, hit, new_space, only_pool, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted

MIXES: list[tuple[GroupSpec, ...]] = [
    (FullAttention(4),),
    (FullAttention(4), SlidingWindow(8, 4)),
    (FullAttention(4), RecurrentState(8, pool="device")),
]
FULL = MIXES[0]
PROMPT = tokens(33)
OTHER = tokens(17, first=500)


def leasing(
    *groups: GroupSpec,
    num_blocks: int = 101,
    eviction: str = "lru",
    num_host_blocks: int = 0,
    min_partial_hit: int = 0,
) -> BlockSpace:
    """Build a space that keeps leases; its clock shows 10 seconds."""
    config = SpaceConfig(
        groups or FULL,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_sequences=16,
        max_tokens=1000,
        watermark=0.0,
        leases=True,
        eviction=eviction,
        min_partial_hit=min_partial_hit,
    )
    space = BlockSpace(config)
    space.advance(10)
    return space


def press(space: BlockSpace, num_left: int) -> None:
    """Hand free blocks out, and take them back without content, until so many free ones were left alone."""
    pool = only_pool(space)
    taken = pool.acquire(space.num_free_blocks() - num_left)
    assert taken is not None
    check_pool(pool)
    pool.release(taken)
    space.check()


@pytest.mark.parametrize("eviction", TESTED_POLICIES)
@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_what_is_leased_survives_all_that_is_not(groups: tuple[GroupSpec, ...], eviction: str) -> None:
    space = leasing(*groups, eviction=eviction)
    space.free([prefill(space, PROMPT)], keep_until_s=20)
    space.check()
    cache(space, OTHER)
    num_leased = int((only_pool(space).arrays.leases[1:] > 0).sum())
    press(space, num_leased)
    assert (hit(space, PROMPT), hit(space, OTHER)) == (32, 0)
    row = prefill(space, PROMPT)
    space.check()
    space.free([row])
    space.check()
    cache(space, OTHER)
    press(space, int((only_pool(space).arrays.leases[1:] > 0).sum()))
    assert hit(space, PROMPT) == 32, "a hit ends no lease"


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_a_lease_keeps_all_that_hits_inside_blocks_too(groups: tuple[GroupSpec, ...]) -> None:
    space = leasing(*groups, min_partial_hit=1)
    cache(space, PROMPT)
    longer = np.append(PROMPT[:-3], tokens(5, first=900))
    kept = space.lease(longer, 20)
    assert kept == hit(space, longer) >= 24
    press(space, int((only_pool(space).arrays.leases[1:] > 0).sum()))
    assert hit(space, longer) == kept


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_a_lease_never_keeps_anybody_waiting(groups: tuple[GroupSpec, ...]) -> None:
    space, plain = leasing(*groups, num_blocks=41), new_space(*groups, num_blocks=41)
    for each, end in ((space, 1e9), (plain, None)):
        for first in (0, 1000):
            each.free([prefill(each, tokens(33, first=first))], keep_until_s=end)
    for length in range(1, 160, 3):
        prompt = tokens(length, first=5000)
        assert space.can_allocate(prompt) is plain.can_allocate(prompt)
    most = next(n for n in range(160, 0, -1) if space.can_allocate(tokens(n, first=5000)) is AllocStatus.OK)
    row = allocate(space, tokens(most, first=5000))
    space.check()
    run_step(space)
    space.free([row])
    space.check()


def test_promise_27_the_lease_that_ends_last_goes_first_and_leaves_what_is_shared_to_the_others() -> None:
    space = leasing()
    prompts = [np.append(PROMPT[:8], tokens(5, first=first)) for first in (100, 200, 300)]
    for prompt, end in zip(prompts, (30, 20, 25), strict=True):
        space.free([prefill(space, prompt)], keep_until_s=end)
    found = []
    for num_left in (5, 4, 3):
        press(space, num_left)
        found.append([hit(space, prompt) for prompt in prompts])
    assert found[:3] == [[12, 12, 12], [8, 12, 12], [8, 12, 8]]
    space.check()


def test_promise_27_a_lease_that_others_share_whole_gives_way_to_theirs() -> None:
    space = leasing()
    space.free([prefill(space, PROMPT)], keep_until_s=20)
    assert space.lease(PROMPT[:17], 50) == 16
    press(space, 8)
    assert hit(space, PROMPT) == 32
    press(space, 7)
    assert hit(space, PROMPT) == 28, "the tail of the longer one goes first, whichever ends last"
    space.check()


@pytest.mark.parametrize("eviction", TESTED_POLICIES)
def test_promise_27_a_lease_that_is_over_is_like_none(eviction: str) -> None:
    space = leasing(eviction=eviction)
    space.free([prefill(space, PROMPT)], keep_until_s=20)
    running = prefill(space, OTHER)
    assert space.lease(OTHER, 15) == 16
    space.advance(20)
    space.check()
    space.free([running])
    space.check()
    assert not (only_pool(space).arrays.leases[1:] > 0).any()
    cache(space, tokens(17, first=900))
    press(space, 4)
    assert hit(space, PROMPT) == 0


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_what_is_cached_can_be_leased_and_a_later_end_counts(groups: tuple[GroupSpec, ...]) -> None:
    space = leasing(*groups)
    cache(space, PROMPT)
    assert space.lease(PROMPT, 50) == 32
    space.check()
    assert space.lease(PROMPT, 30) == 32
    assert space.lease(tokens(9, first=3000), 30) == 0
    assert space.lease(PROMPT, 30, keys=RequestKeys(salt=b"x")) == 0
    space.advance(40)
    space.check()
    cache(space, OTHER)
    press(space, int((only_pool(space).arrays.leases[1:] > 0).sum()))
    assert hit(space, PROMPT) == 32


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_27_supersession_and_windows_leave_leased_content_alone(groups: tuple[GroupSpec, ...]) -> None:
    space = leasing(*groups)
    old = prefill(space, PROMPT)
    new = prefill(space, np.append(PROMPT[:16], [9, 9, 9]))
    assert space.lease(np.append(PROMPT, [1]), 50) == 32
    space.append([old], tokens(40, first=700), [40])
    run_step(space)
    space.free([old], superseded_by=new)
    space.check()
    assert hit(space, np.append(PROMPT, [1])) == 32
    space.free([new])
    space.check()
    space.advance(60)
    space.check()


@pytest.mark.parametrize(
    "end", [BlockSpace.reset_prefix_cache, BlockSpace.invalidate_memory, lambda space: space.forget(PROMPT)]
)
def test_promise_27_content_that_is_given_up_ends_its_lease(end: Callable[[BlockSpace], object]) -> None:
    space = leasing(num_host_blocks=20)
    space.free([prefill(space, PROMPT)], keep_until_s=20)
    end(space)
    space.check()
    assert hit(space, PROMPT) == 0
    assert not (only_pool(space).arrays.leases[1:] > 0).any()


@pytest.mark.parametrize("eviction", TESTED_POLICIES)
def test_promise_27_priority_orders_what_is_cached(eviction: str) -> None:
    space = leasing(eviction=eviction)
    for first, priority in ((0, 1), (100, 0), (200, -1)):
        space.free([prefill(space, tokens(9, first=first))], priority=priority)
    space.free([prefill(space, tokens(9, first=300))], keep_until_s=11)
    space.check()
    found = []
    for num_left in (8, 6, 4, 2):
        press(space, num_left)
        found.append([hit(space, tokens(9, first=first)) > 0 for first in (200, 100, 0, 300)])
    assert found == [[True] * 4, [False, True, True, True], [False, False, True, True], [False, False, False, True]]
    space.advance(10**6)
    space.check()


def test_promise_27_what_a_step_in_flight_computes_is_leased_once_it_is_over() -> None:
    space = leasing()
    row = allocate(space, PROMPT)
    plan = space.plan_step()
    space.free([row], keep_until_s=20)
    space.check()
    space.acknowledge(plan.step_id)
    space.check()
    cache(space, OTHER)
    press(space, 8)
    assert hit(space, PROMPT) == 32


# Publishing the prompt alone


@pytest.mark.parametrize("groups", MIXES, ids=str)
@pytest.mark.parametrize("chunk", [33, 12])
def test_promise_27_a_sequence_can_publish_its_prompt_alone(groups: tuple[GroupSpec, ...], chunk: int) -> None:
    space = new_space(*groups, num_host_blocks=60)
    answer = space.match(PROMPT)
    admitted = space.allocate(PROMPT[:chunk], match=answer, publish="prompt")
    assert isinstance(admitted, Allocation)
    row = admitted.row
    run_step(space)
    while space.num_tokens(row) < 33:
        space.append([row], PROMPT[space.num_tokens(row) :][:chunk], [min(chunk, 33 - space.num_tokens(row))])
        run_step(space)
    assert hit(space, PROMPT) == 32
    (child,) = space.fork(row).tolist()
    space.append([row, child], [*tokens(20, first=700), *tokens(20, first=800)], [20, 20])
    run_step(space)
    space.append([row], None)
    plan = space.plan_step()
    space.fill([row], [5]) if False else space.acknowledge(plan.step_id)
    for first, other in ((700, row), (800, child)):
        assert hit(space, np.concatenate([PROMPT, tokens(21, first=first)])) <= 32, other
    space.check()
    space.free([row, child])
    space.check()
    assert hit(space, np.append(PROMPT, tokens(20, first=700))) == 32
    again = prefill(space, np.append(PROMPT, tokens(20, first=700)))
    assert hit(space, np.append(PROMPT, tokens(20, first=700))) > 32, "whoever has the row next publishes all"
    space.free([again])


def test_promise_27_what_is_published_is_one_of_three() -> None:
    space = new_space()
    wrong: Any
    for wrong in ("answer", 1, None, ""):
        with unchanged(space), pytest.raises(ConfigurationError, match="publish must be True or False"):
            space.allocate(PROMPT, publish=wrong)


# Forgetting


@pytest.mark.parametrize("groups", MIXES, ids=str)
@pytest.mark.parametrize("start", [0, 16, 18])
def test_promise_27_what_is_forgotten_is_found_by_nobody(groups: tuple[GroupSpec, ...], start: int) -> None:
    space = new_space(*groups, num_host_blocks=60)
    longer = np.append(PROMPT, tokens(20, first=700))
    cache(space, np.append(PROMPT[:16], OTHER))
    cache(space, longer)
    row = prefill(space, np.append(PROMPT, [5, 6, 7]))
    assert hit(space, longer) > 32
    before = hit(space, np.append(PROMPT[:16], OTHER))
    num_names = sum(pool.num_named for pool in space.statistics().pools)
    num_dropped = space.forget(PROMPT, start=start)
    space.check()
    assert sum(pool.num_named for pool in space.statistics().pools) == num_names - num_dropped
    assert hit(space, longer) <= start // 4 * 4
    assert hit(space, np.append(PROMPT[:16], OTHER)) == (before if start >= 16 else 0)
    space.append([row], tokens(20, first=900), [20])
    run_step(space)
    assert space.swap_out([row])
    run_step(space)
    space.check()
    assert space.swap_in([row])
    run_step(space)
    space.free([row])
    assert hit(space, longer) <= start // 4 * 4, "rows that held it do not bring it back"
    assert space.forget(PROMPT, start=start) == 0
    cache(space, longer)
    assert hit(space, longer) > 32
    space.check()


def test_promise_27_what_loads_meanwhile_is_forgotten_as_well() -> None:
    space = new_space()
    load = space.load(PROMPT, 32)
    assert space.forget(PROMPT[:9]) == 0
    space.finish_load(load)  # type: ignore[arg-type]
    assert hit(space, PROMPT) == 0
    space.check()


def test_promise_27_other_keys_are_other_content_and_stay() -> None:
    space = new_space()
    ours = RequestKeys(salt=b"ours")
    cache(space, PROMPT)
    cache(space, PROMPT, ours)
    assert space.forget(PROMPT, keys=ours) == 8
    assert (hit(space, PROMPT), hit(space, PROMPT, ours)) == (32, 0)
    assert space.forget(PROMPT, keys=RequestKeys(salt=b"nobody's")) == 0
    assert new_space(prefix_caching=False).forget(PROMPT) == 0


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)
"""Blocks of a prompt, each of one repeated token."""


@given(cached=st.lists(prompts, min_size=1, max_size=6), running=st.lists(prompts, max_size=2), data=st.data())
def test_promise_27_a_forgotten_branch_leaves_what_others_continue_or_use(
    cached: list[list[int]], running: list[list[int]], data: st.DataObject
) -> None:
    """The reference: the set of all beginnings; a branch loses those that begin nothing else and are in no row."""
    space = leasing()
    for each in cached:
        cache(space, in_blocks(each))
    for each in running:
        prefill(space, in_blocks(each))
    branch = data.draw(st.sampled_from(cached))
    space.lease(in_blocks(branch), 100.0)
    known = {tuple(each[:length]) for each in [*cached, *running] for length in range(1, len(each) + 1)}
    used = {tuple(each[:length]) for each in running for length in range(1, len(each) + 1)}
    own: list[tuple[int, ...]] = [tuple(branch[:length]) for length in range(1, len(branch) + 1)]
    kept = max(
        [len(each) - 1 for each in known if each not in own and each[:-1] in own]  # another branch leaves there
        + [len(each) for each in used if each in own],
        default=0,
    )
    assert space.forget_branch(in_blocks(branch)) == len(branch) - kept
    space.check()
    left = known - set(own[kept:])
    for one in known:
        longest = max((length for length in range(1, len(one) + 1) if one[:length] in left), default=0)
        assert hit(space, in_blocks(one)) == 4 * longest


def in_blocks(branch: Sequence[int]) -> npt.NDArray[np.int32]:
    """Make a prompt of whole blocks, and one token more."""
    return np.append(np.repeat(np.array(branch, np.int32), 4), np.int32(9))


def test_promise_27_a_branch_of_windows_alone_stays() -> None:
    space = new_space(SlidingWindow(8, 4))
    cache(space, PROMPT)
    assert space.forget_branch(PROMPT) == 0
    assert hit(space, PROMPT) == 32


# Bad input


@pytest.mark.parametrize("end", [10, 9.5, 0, -1, float("inf"), float("nan"), "20", None, True])
def test_promise_27_a_lease_in_the_past_or_without_end_is_refused(end: Any) -> None:  # noqa: ANN401 - whatever callers bring
    space = leasing()
    row = prefill(space, PROMPT)
    with unchanged(space), pytest.raises(ConfigurationError):
        space.lease(PROMPT, end)
    if end is not None:
        with unchanged(space), pytest.raises(ConfigurationError):
            space.free([row], keep_until_s=end)


@pytest.mark.parametrize("now", [9.9, -1, float("nan"), float("inf"), "11", None])
def test_promise_27_a_clock_that_goes_back_is_refused(now: Any) -> None:  # noqa: ANN401 - whatever callers bring
    space = leasing()
    with unchanged(space), pytest.raises(ConfigurationError):
        space.advance(now)
    space.advance(10)


def test_promise_27_wishes_that_exclude_each_other_are_refused() -> None:
    space = leasing()
    row, other = prefill(space, PROMPT), prefill(space, OTHER)
    wrong: Any
    for wrong in (
        {"priority": 2},
        {"priority": True},
        {"priority": "high"},
        {"priority": 1, "keep_until_s": 20},
        {"priority": -1, "superseded_by": other},
        {"superseded_by": other, "keep_until_s": 20},
    ):
        with unchanged(space), pytest.raises(ConfigurationError):
            space.free([row], **wrong)


def test_promise_27_leases_are_to_be_asked_for_and_cost_nothing_otherwise() -> None:
    space = new_space()
    row = prefill(space, PROMPT)
    for wish in (
        lambda: space.lease(PROMPT, 20),
        lambda: space.free([row], keep_until_s=20),
        lambda: space.free([row], priority=1),
    ):
        with unchanged(space), pytest.raises(ConfigurationError, match="no leases are kept"):
            wish()
    assert only_pool(space).arrays.leases.nbytes == 0
    assert only_pool(leasing()).nbytes - only_pool(space).nbytes == 16 * 101


@pytest.mark.parametrize("eviction", TESTED_POLICIES)
def test_promise_27_a_lease_is_over_at_its_end_also_of_what_was_in_use_then(eviction: str) -> None:
    """Its last reference is released when its lease has just ended: it is evicted before what is still leased."""
    space = leasing(eviction=eviction)
    running = prefill(space, PROMPT)
    assert space.lease(PROMPT, 20) == 32
    cache(space, OTHER)
    assert space.lease(OTHER, 21) == 16
    space.advance(20)
    space.free([running])
    space.check()
    leased = int((only_pool(space).arrays.leases[1:] > 0).sum())
    assert leased == 4, "the blocks of the other one"
    press(space, 4)
    assert (hit(space, PROMPT), hit(space, OTHER)) == (0, 16)


@pytest.mark.parametrize("groups", MIXES, ids=str)
@pytest.mark.parametrize("at", [None, 32, 20])
def test_promise_27_a_fork_of_a_sequence_that_publishes_its_prompt_alone_does_the_same(
    groups: tuple[GroupSpec, ...],
    at: int | None,
) -> None:
    space = new_space(*groups, num_host_blocks=60)
    admitted = space.allocate(PROMPT, publish="prompt")
    assert isinstance(admitted, Allocation)
    run_step(space)
    forked = space.fork(admitted.row) if at is None else space.fork(admitted.row, at=at)
    if isinstance(forked, PrefixGone):
        return
    assert not isinstance(forked, Shortage)
    child = int(forked[0])
    num_tokens = space.num_tokens(child)
    own = tokens(40, first=800)
    for first in (0, 20):
        space.append([child], own[first : first + 20], [20])
        run_step(space)
        space.check()
    whole = np.concatenate([PROMPT[:num_tokens], own])
    assert hit(space, np.append(whole, 1)) <= len(PROMPT), "what it computed behind the prompt"
    space.free([child, admitted.row])
    assert hit(space, np.append(whole, 1)) <= len(PROMPT)
    space.check()


@pytest.mark.parametrize("when", ["never", "while it runs", "when freed", "when cached", "when cached, then longer"])
def test_of_one_sequence_the_tail_goes_before_the_head_whenever_it_was_leased(when: str) -> None:
    """Under the lease and after its end, one block that is taken costs the last block of the prefix."""
    for seconds, ends in ((100.0, False), (5.0, True)):
        space = BlockSpace(SpaceConfig((FullAttention(4),), num_blocks=6, watermark=0.0, leases=True))
        prompt = list(range(17))
        row = prefill(space, prompt)
        if when == "while it runs":
            space.lease(prompt, seconds)
        space.free(row, keep_until_s=seconds if when == "when freed" else None)
        if when.startswith("when cached"):
            space.lease(prompt, seconds)
        if when.endswith("longer"):
            space.lease(prompt, seconds + 1)
        if ends:
            space.advance(10.0)
        space.allocate(range(90, 98))  # one block is empty, the other one is evicted
        assert space.match(prompt).num_tokens == 12
        space.check()
