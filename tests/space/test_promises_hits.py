"""What may hit at all: never what another step could still change, nor what was to be forgotten."""

from typing import Any

import pytest

from pagedkv import Allocation, AllocStatus, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.errors import ConfigurationError
from tests.space.spaces import allocate, cache, hit, new_space, prefill, run_step, tokens, unchanged


@pytest.mark.interpreted
def test_promise_07_a_hit_ends_before_settled_blocks_behind_pending_ones() -> None:
    """A row comes back from the host while another computes its first block anew: its second one is settled."""
    space = new_space(num_blocks=5, num_host_blocks=4)
    row = prefill(space, tokens(9))
    assert space.swap_out(row)
    run_step(space)
    space.free(prefill(space, tokens(16, first=50)))
    assert hit(space, tokens(10)) == 0
    allocate(space, tokens(4))
    assert space.swap_in(row)
    assert hit(space, tokens(10)) == 4, "whoever takes over what is pending must not write the second block again"
    run_step(space)
    assert hit(space, tokens(10)) == 8
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize("other", [FullAttention(4), SlidingWindow(8, 4)], ids=["full", "window"])
def test_promise_15_beside_a_state_nothing_of_the_open_step_hits(other: FullAttention | SlidingWindow) -> None:
    space = new_space(other, RecurrentState(4), num_blocks={"device": 101, "state": 31})
    row = allocate(space, tokens(9))
    assert hit(space, tokens(9)) == 0
    run_step(space)
    assert hit(space, tokens(9)) == 8
    space.free(row)


@pytest.mark.interpreted
def test_promise_10_what_comes_back_from_the_host_after_a_reset_is_not_found() -> None:
    space = new_space(num_host_blocks=10)
    row = prefill(space, tokens(9))
    assert space.swap_out(row)
    run_step(space)
    space.reset_prefix_cache()
    assert space.swap_in(row)
    run_step(space)
    assert hit(space, tokens(10)) == 0
    space.check()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "groups", [(FullAttention(4),), (FullAttention(4), SlidingWindow(8, 4)), (SlidingWindow(8, 4),)], ids=str
)
@pytest.mark.parametrize("most", [0, 3, 4, 11, 12, 100])
def test_promise_25_a_hit_is_bounded_by_who_asks(groups: tuple[GroupSpec, ...], most: int) -> None:
    space = new_space(*groups)
    prompt = tokens(21)
    cache(space, prompt)
    hits = min(most // 4 * 4, 20)
    answer = space.match(prompt, max_hit_tokens=most)
    assert (answer.num_tokens, answer.max_hit_tokens) == (hits, most)
    assert space.can_allocate(prompt, match=answer) is AllocStatus.OK
    cache(space, tokens(5, first=500))  # the answer is out of date
    admitted = space.allocate(prompt, match=answer)
    assert isinstance(admitted, Allocation)
    assert admitted.num_hit_tokens == hits
    (computed,) = space.plan_step().compute.starts.tolist()
    assert computed == hits
    space.check()


def test_promise_25_a_bound_is_a_number_of_tokens() -> None:
    space = new_space()
    wrong: Any
    for wrong in (-1, 1.5, "all"):
        with unchanged(space), pytest.raises(ConfigurationError, match="max_hit_tokens"):
            space.match(tokens(5), max_hit_tokens=wrong)
