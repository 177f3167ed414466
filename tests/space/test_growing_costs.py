"""What one call does grows no faster than what it concerns; told in executed lines of interpreted loops, not in time.

Run with ``NUMBA_DISABLE_JIT=1``: each line of a loop then counts. Times are in ``benchmarks/growing_costs.py``.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, cast

import pytest

import pagedkv
from pagedkv import SlidingWindow, TenantLimits
from pagedkv.blocks.life_cycle import drop_name
from pagedkv.compilation.compiled import is_compiling_at_all
from tests.space.spaces import allocate, cache, named, new_space, run_step, tokens

if TYPE_CHECKING:
    from _typeshed import TraceFunction

pytestmark = [
    pytest.mark.plain_only,
    pytest.mark.skipif(is_compiling_at_all(), reason="machine code does not tell what it does: NUMBA_DISABLE_JIT=1"),
]

SOURCES = pagedkv.__path__[0]
MOST_GROWTH = 2.6
"""The most by which work may grow where what it concerns doubles; if it grew with the square it would be almost 4."""


def lines_of(run: Callable[[], object]) -> int:
    """Count the lines of the package that a call executes."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(cast("TraceFunction", trace))
    try:
        run()
    finally:
        sys.settrace(before)
    return num_lines


def work_of_acknowledging_equal_forks(count: int) -> int:
    space = new_space(num_blocks=8 * count, max_sequences=2 * count)
    parent = allocate(space, tokens(7))
    run_step(space)
    rows = [parent, *space.fork(parent, count - 1).tolist()]
    space.append(rows, [7] * count)
    step = space.plan_step().step_id
    work = lines_of(lambda: space.acknowledge(step))
    assert len({tuple(space.block_ids(row)) for row in rows}) == 1, "equal blocks are one block now"
    space.check()
    return work


def work_of_matching_windows_with_holes(count: int) -> int:
    """Match a prompt that one window has whole, of which two others have every second block, but not the same."""
    groups = SlidingWindow(2 * count, 4), SlidingWindow(4, 4), SlidingWindow(4, 4)
    space = new_space(*groups, num_blocks=4 * count, max_tokens=5 * count, shed_windows=False)
    prompt = tokens(4 * count + 1)
    cache(space, prompt)
    for group in (1, 2):
        for index, block in named(space, prompt, group).items():
            if index % 2 == group - 1:
                drop_name(space._state.groups[group].pool.arrays, block)
    work = lines_of(lambda: space.match(prompt))
    assert space.match(prompt).num_tokens == 0
    return work


def work_of_matching_what_is_pending(count: int) -> int:
    """Match a prompt that the open step computes, where no group keeps whole prefixes."""
    space = new_space(SlidingWindow(8, 4), SlidingWindow(12, 4), num_blocks=4 * count, max_tokens=5 * count)
    prompt = tokens(4 * count + 1)
    allocate(space, prompt)
    work = lines_of(lambda: space.match(prompt))
    assert space.match(prompt).num_tokens == 4 * count
    return work


def work_of_setting_tenants(count: int) -> int:
    space = new_space(tenants={})

    def set_all() -> None:
        for number in range(count):
            space.set_tenant(f"tenant {number}", TenantLimits(floor=1))

    work = lines_of(set_all)
    assert len(space.config.tenants or ()) == count
    space.check()
    return work


@pytest.mark.parametrize(
    "work",
    [
        work_of_acknowledging_equal_forks,
        work_of_matching_what_is_pending,
        work_of_matching_windows_with_holes,
        work_of_setting_tenants,
    ],
)
def test_work_grows_with_what_it_concerns_and_not_with_its_square(work: Callable[[int], int]) -> None:
    work(4)  # first uses, which import or fill caches
    fewer, more = work(24), work(48)
    assert more < MOST_GROWTH * fewer, f"{fewer} lines at 24, {more} at 48"
