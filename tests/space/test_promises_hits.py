"""What may hit at all: never what another step could still change, nor what was to be forgotten."""

import pytest

from pagedkv import FullAttention, RecurrentState, SlidingWindow
from tests.space.spaces import allocate, hit, new_space, prefill, run_step, tokens


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
