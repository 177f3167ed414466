"""Promise 25: prefixes that come from elsewhere, declared computed or failed in any order with steps in flight."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pagedkv import (
    Allocation,
    BlockSpace,
    FullAttention,
    GroupSpec,
    Load,
    RecurrentState,
    RequestKeys,
    Shortage,
    SlidingWindow,
    hash_request_tokens,
)
from pagedkv.errors import BlockError, ConfigurationError, TokenError
from tests.space.spaces import acknowledge, allocate, cache, hit, new_space, prefill, run_step, tokens, unchanged

pytestmark = pytest.mark.interpreted

FULL = (FullAttention(4),)
HYBRIDS: list[tuple[GroupSpec, ...]] = [
    FULL,
    (FullAttention(4), SlidingWindow(8, 4, num_sink_tokens=2)),
    (FullAttention(4), RecurrentState(8, pool="device")),
    (SlidingWindow(8, 4),),
    (FullAttention(4), SlidingWindow(8, 2)),
    (FullAttention(4), SlidingWindow(8, 4, prefix_caching=False)),
]
PROMPT = tokens(33)


def load(space: BlockSpace, prompt: np.ndarray = PROMPT, num_tokens: int = 32) -> Load:
    """Reserve what fits."""
    answer = space.load(prompt, num_tokens)
    assert isinstance(answer, Load)
    return answer


@pytest.mark.parametrize("groups", HYBRIDS, ids=str)
def test_what_a_load_brought_is_hit_and_before_nobody_hits_it(groups: tuple[GroupSpec, ...]) -> None:
    space = new_space(*groups)
    answer = load(space)
    assert (answer.num_hit_tokens, answer.num_tokens) == (0, 32)
    assert space.statistics().num_running == 0, "it takes no row"
    assert hit(space, PROMPT) == 0
    space.check()
    space.finish_load(answer)
    assert space.statistics().pools[0].num_in_use == 0
    assert hit(space, PROMPT) == 32
    space.check()
    row = allocate(space, PROMPT)
    assert space.plan_step().compute.starts.tolist() == [32]
    filled = {block for blocks in answer.block_ids for block in blocks.tolist() if block}
    for group, _ in enumerate(groups):
        held = {block for block in space.block_ids(row, group)[: 32 // groups[group].block_size] if block}
        assert held <= filled or not groups[group].prefix_caching
    space.check()


def test_a_window_is_loaded_and_no_more() -> None:
    space = new_space(*HYBRIDS[1])
    in_full, in_window = load(space).block_ids
    assert (in_full != 0).tolist() == [True] * 8
    assert (in_window != 0).tolist() == [True] + [False] * 5 + [True] * 2, "a sink, and the window before 32"


def test_what_is_cached_is_held_for_a_load_and_not_brought() -> None:
    space = new_space(num_blocks=12)
    cache(space, PROMPT[:17])
    answer = load(space)
    assert (answer.num_hit_tokens, len(answer.block_ids[0])) == (16, 4)
    big = space.allocate(tokens(13, first=500))
    assert isinstance(big, Shortage), "the load's eight blocks are taken"
    space.finish_load(answer)
    assert hit(space, PROMPT) == 32


def test_there_is_nothing_to_be_loaded_where_all_is_cached() -> None:
    space = new_space()
    cache(space, PROMPT)
    assert space.load(PROMPT, 32) is None
    assert space.load(PROMPT, 3) is None, "less than a block"


def test_a_load_that_finds_too_few_blocks_changes_nothing() -> None:
    space = new_space(num_blocks=8)
    with unchanged(space):
        answer = space.load(PROMPT, 32)
    assert isinstance(answer, Shortage)
    assert (answer.num_needed, answer.num_free) == (8, 7)


@pytest.mark.parametrize("groups", HYBRIDS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 3, 4, 15, 16, 31])
def test_a_load_that_fails_in_the_middle_leaves_what_came_before(
    groups: tuple[GroupSpec, ...], num_tokens: int
) -> None:
    """Where a window or a state was to be hit at the end alone, the rest serves no hit, but for a sink's block."""
    space = new_space(*groups)
    space.finish_load(load(space), num_tokens)
    keeps_whole = all(isinstance(group, FullAttention) for group in groups if group.prefix_caching)
    whole = num_tokens // 4 * 4
    assert hit(space, PROMPT) == (whole if keeps_whole else min(4, whole) if groups is HYBRIDS[1] else 0)
    assert space.statistics().pools[0].num_in_use == 0
    space.check()


def test_loads_end_in_any_order_with_steps_in_flight() -> None:
    space = new_space()
    first, second = load(space), load(space, tokens(33, first=500))
    row = allocate(space, tokens(9, first=900))
    plan = space.plan_step()
    space.finish_load(second)
    third = load(space, tokens(33, first=700))
    space.append(row, [1])
    later = space.plan_step()
    space.finish_load(first)
    acknowledge(space, plan)
    space.finish_load(third)
    acknowledge(space, later)
    assert [hit(space, tokens(33, first=start)) for start in (0, 500, 700)] == [32, 32, 32]
    space.check()


def test_a_match_tells_that_a_load_brings_what_comes_next() -> None:
    space = new_space()
    cache(space, PROMPT[:9])
    answer = load(space)
    assert space.match(PROMPT).loading is answer
    assert space.match(PROMPT).num_tokens == 8
    assert space.match(np.append(PROMPT[:16], 7)).loading is answer
    assert space.match(np.append(PROMPT[:8], tokens(9, first=700))).loading is None, "it goes on otherwise"
    assert space.match(PROMPT, keys=RequestKeys(salt=b"x")).loading is None
    space.finish_load(answer)
    assert space.match(PROMPT).loading is None


def test_two_loads_of_one_prefix_leave_it_once() -> None:
    space = new_space()
    first, second = load(space), load(space)
    space.finish_load(first)
    space.finish_load(second)
    assert hit(space, PROMPT) == 32
    assert space.statistics().pools[0].num_cached == 8
    space.check()


def test_what_was_computed_meanwhile_is_not_stored_twice() -> None:
    space = new_space()
    answer = load(space)
    row = prefill(space, PROMPT)
    space.finish_load(answer)
    assert space.statistics().pools[0].num_in_use == 9
    assert space.match(PROMPT).block_ids[0].tolist() == space.block_ids(row)[:8]
    space.check()


def test_a_hit_on_what_a_step_still_computes_is_no_beginning_of_a_load() -> None:
    """Only a row could take that computation over."""
    space = new_space()
    row = allocate(space, PROMPT[:17])
    answer = load(space)
    assert answer.num_hit_tokens == 0
    space.free(row)
    space.finish_load(answer)
    assert hit(space, PROMPT) == 32
    space.check()


@pytest.mark.parametrize("forget", [BlockSpace.reset_prefix_cache, lambda space: space.set_weights_epoch("new")])
def test_what_was_to_be_forgotten_is_found_by_nobody(forget: object) -> None:
    assert callable(forget)
    space = new_space()
    answer = load(space)
    forget(space)
    assert space.match(PROMPT).loading is None
    space.finish_load(answer)
    assert hit(space, PROMPT) == 0
    assert space.statistics().pools[0].num_in_use == 0
    space.check()


def test_memory_that_is_given_back_fails_the_loads_and_names_them() -> None:
    space = new_space()
    answer = load(space)
    lost = space.invalidate_memory()
    assert (lost.failed_loads, lost.undefined_tickets) == ((answer,), ())
    space.finish_load(answer)
    assert hit(space, PROMPT) == 0


def test_in_order_a_load_waits_for_the_steps_that_may_use_its_blocks() -> None:
    for in_order in (False, True):
        space = new_space(num_blocks=12, in_order=in_order)
        row = allocate(space, tokens(33, first=500))
        plan = space.plan_step()
        space.free(row)
        answer = space.load(PROMPT, 32)
        if in_order:
            assert isinstance(answer, Load)
            assert answer.after_step == plan.step_id
        else:
            assert isinstance(answer, Shortage), "the blocks wait for the step"
        acknowledge(space, plan)
        assert load(space, tokens(5, first=900), 4).after_step is None
        space.check()


def test_extra_keys_are_part_of_what_is_loaded() -> None:
    space = new_space(weights_epoch="1")
    ours = RequestKeys(salt=b"ours", lora_name="a")
    answer = space.load(PROMPT, 32, keys=ours)
    assert isinstance(answer, Load)
    space.finish_load(answer)
    assert (hit(space, PROMPT, ours), hit(space, PROMPT)) == (32, 0)
    space.check()


# In one call


@pytest.mark.parametrize("groups", HYBRIDS, ids=str)
@pytest.mark.parametrize("num_external", [1, 7, 8, 20, 32])
@pytest.mark.parametrize("num_cached", [0, 9, 33])
def test_a_prompt_whose_beginning_comes_from_elsewhere_is_one_call(
    groups: tuple[GroupSpec, ...], num_external: int, num_cached: int
) -> None:
    space = new_space(*groups)
    if num_cached:
        cache(space, PROMPT[:num_cached])
    cached = hit(space, PROMPT)
    admitted = space.allocate(PROMPT, num_external_tokens=num_external, num_lookahead=5)
    assert isinstance(admitted, Allocation)
    space.check()
    plan = space.plan_step()
    assert plan.compute.starts.tolist() == [max(cached, num_external)]
    assert plan.compute.ends.tolist() == [33]
    acknowledge(space, plan)
    space.check()
    space.free(admitted.row)
    assert hit(space, PROMPT) == 32
    space.check()


@pytest.mark.parametrize(
    ("groups", "filled"), [(HYBRIDS[1], [0, 3, 4]), (HYBRIDS[2], []), (FULL, [0, 1, 2, 3, 4])], ids=str
)
def test_what_nobody_brings_of_a_beginning_has_no_name(groups: tuple[GroupSpec, ...], filled: list[int]) -> None:
    """Of 20 tokens a window reads the last seven, and its sinks; of states, only the last is brought, no checkpoint."""
    space = new_space(*groups)
    assert isinstance(space.allocate(PROMPT[:21], num_external_tokens=20), Allocation)
    last = len(groups) - 1
    names = hash_request_tokens(PROMPT, groups[last].block_size)
    assert [index for index, name in enumerate(names) if space.stored_block(name, last) is not None] == filled
    run_step(space)
    space.check()


OUTSIDERS: list[GroupSpec] = [
    FullAttention(4, prefix_caching=False),
    FullAttention(8, pool="other", prefix_caching=False),
    SlidingWindow(7, 4, num_sink_tokens=2, prefix_caching=False),
    RecurrentState(8, pool="other", prefix_caching=False),
]


@pytest.mark.parametrize("outsider", OUTSIDERS, ids=str)
@pytest.mark.parametrize("is_matched", [False, True])
def test_promise_25_a_group_that_stays_out_is_brought_whole_and_the_others_keep_their_hit(
    outsider: GroupSpec,
    is_matched: bool,  # noqa: FBT001
) -> None:
    space = new_space(FullAttention(4), outsider, num_blocks=dict.fromkeys(("device", outsider.pool), 60))
    cache(space, PROMPT[:18])
    cached = space.match(PROMPT)
    admitted = space.allocate(PROMPT, num_external_tokens=19, match=cached if is_matched else None)
    assert isinstance(admitted, Allocation)
    assert admitted.num_hit_tokens == 16
    assert space.block_ids(admitted.row)[:4] == cached.block_ids[0].tolist()
    plan = space.plan_step()
    assert [plan.compute_in(group).starts.tolist() for group in range(2)] == [[19], [19]]
    zeroed = {(part.pool, block) for part in plan.new_blocks for block in part.block_ids.tolist()}
    brought = space.block_ids(admitted.row, 1)[: 19 // outsider.block_size]
    assert not zeroed & {("device", block) for block in cached.block_ids[0].tolist()}
    assert not zeroed & {(outsider.pool, block) for block in brought}
    acknowledge(space, plan)
    space.check()
    space.free(admitted.row)
    assert hit(space, PROMPT) == 32
    space.check()


def test_promise_25_loads_beside_a_local_hit_keep_it_where_a_group_stays_out() -> None:
    space = new_space(FullAttention(16), FullAttention(16, prefix_caching=False), num_blocks=60, max_tokens=256)
    prompt = tokens(120)
    cache(space, prompt[:80])
    assert space.match(prompt).num_tokens == 80
    admitted = space.allocate(prompt, num_external_tokens=99)
    assert isinstance(admitted, Allocation)
    assert admitted.num_hit_tokens == 80


def test_what_is_brought_can_be_hit_in_the_same_step() -> None:
    space = new_space()
    first = space.allocate(PROMPT, num_external_tokens=20)
    second = space.allocate(PROMPT)
    assert isinstance(first, Allocation)
    assert isinstance(second, Allocation)
    assert second.num_hit_tokens == 32
    space.free(first.row)
    assert space.plan_step().compute.starts.tolist() == [20], "what is not brought falls to the other"
    space.check()


def test_where_another_row_computes_the_beginning_all_is_brought() -> None:
    space = new_space()
    other = allocate(space, PROMPT[:9])
    admitted = space.allocate(PROMPT, num_external_tokens=20)
    assert isinstance(admitted, Allocation)
    assert admitted.num_hit_tokens == 0
    space.free(other)
    run_step(space)
    assert hit(space, PROMPT) == 32
    space.check()


# Misuse


def test_misuse_of_loads_is_refused_and_changes_nothing() -> None:
    space = new_space()
    answer, foreign = load(space), load(new_space())
    with unchanged(space):
        for wrong in (foreign, None, 3):
            with pytest.raises(BlockError):
                space.finish_load(wrong)  # type: ignore[arg-type]
        for num_tokens in (33, -1):
            with pytest.raises(TokenError):
                space.finish_load(answer, num_tokens)
        with pytest.raises(TokenError, match="34 tokens cannot be loaded of a prompt that has 33"):
            space.load(PROMPT, 34)
        with pytest.raises(TokenError):
            space.load([], 0)
        with pytest.raises(TokenError, match="one at least must be computed"):
            space.allocate(PROMPT, num_external_tokens=33)
        with pytest.raises(ConfigurationError, match="exclude each other"):
            space.allocate(PROMPT, num_external_tokens=8, num_draft=2)
    space.finish_load(answer)
    with unchanged(space), pytest.raises(BlockError, match="finished before"):
        space.finish_load(answer)
    with pytest.raises(ConfigurationError, match="prefix_caching=False"):
        new_space(prefix_caching=False).load(PROMPT, 8)


@given(st.data())
def test_loads_among_other_operations_keep_the_space_sound(data: st.DataObject) -> None:
    """Whatever runs beside them: what hits was computed or loaded, and everything is given back in the end."""
    outside = data.draw(st.sampled_from([(), *((each,) for each in OUTSIDERS if each.pool == "device")]))
    space = new_space(*data.draw(st.sampled_from(HYBRIDS)), *outside, num_blocks=40, in_order=data.draw(st.booleans()))
    loads: list[Load] = []
    rows: list[int] = []
    for _ in range(data.draw(st.integers(1, 25))):
        prompt = tokens(data.draw(st.integers(1, 33)), first=data.draw(st.sampled_from((0, 0, 500))))
        match data.draw(st.sampled_from(("load", "finish", "allocate", "bring", "free", "step", "reset"))):
            case "load":
                answer = space.load(prompt, data.draw(st.integers(0, len(prompt))))
                loads += [answer] if isinstance(answer, Load) else []
            case "finish" if loads:
                answer = loads.pop(data.draw(st.integers(0, len(loads) - 1)))
                space.finish_load(answer, data.draw(st.integers(0, answer.num_tokens)))
            case "allocate" | "bring" as how if len(rows) < 12:
                num_external = data.draw(st.integers(0, len(prompt) - 1)) if how == "bring" else 0
                admitted = space.allocate(prompt, num_external_tokens=num_external)
                rows += [admitted.row] if isinstance(admitted, Allocation) else []
            case "free" if rows:
                space.free(rows.pop(data.draw(st.integers(0, len(rows) - 1))))
            case "step":
                run_step(space)
            case "reset":
                space.reset_prefix_cache()
        space.check()
    for answer in loads:
        space.finish_load(answer)
    space.free(rows)
    run_step(space)
    assert all(pool.num_in_use == 0 for pool in space.statistics().pools)
    space.check()
