"""How the cost of one call grows with the tenants or forks that it concerns: linearly, or with a logarithm above.

Each operation is measured at several sizes; the times may not grow faster than the sizes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.measure import Row, Timing, timed
from benchmarks.operations import BLOCK_SIZE, FULL, NUM_BLOCKS, Int32Array, allocated, prompt, run_step
from pagedkv import BlockSpace, Shortage, SpaceConfig, StepPlan, TenantLimits

__all__ = ["OPERATIONS"]

NUM_ROWS: Final = 1_024
NUM_FORKS: Final = (1_000, 4_000)
Forked = tuple[BlockSpace, Int32Array]


def appends_by_tenants() -> Iterator[Row]:
    """Append a token to each of 1,024 rows, which belong to no tenants, or to many."""
    for num_tenants in (0, 64, 256, 1_024):
        tenants = {str(number): TenantLimits() for number in range(num_tenants)} or None
        space = BlockSpace(SpaceConfig(FULL, num_blocks=NUM_BLOCKS, max_sequences=NUM_ROWS, tenants=tenants))
        names = [str(number % num_tenants) if num_tenants else None for number in range(NUM_ROWS)]
        found = [allocated(space.allocate(prompt(97, number), tenant=name)) for number, name in enumerate(names)]
        rows = np.array([allocation.row for allocation in found], np.int32)
        run_step(space)
        go_back = partial(space.truncate, rows, np.full(NUM_ROWS, 97))
        timing = timed(partial(space.append, rows, prompt(NUM_ROWS)), before=go_back, num_runs=15)
        assert {space.num_tokens(row) for row in rows.tolist()} == {98}
        space.check()
        yield Row(f"append a token to {NUM_ROWS:,} rows of {num_tenants:,} tenants", timing)


def tenants_set() -> Iterator[Row]:
    """Add n tenants to a space, one after the other."""
    for count in (250, 1_000):
        config = SpaceConfig(FULL, num_blocks=NUM_BLOCKS, tenants={})
        timing = _timed_once(partial(BlockSpace, config), partial(_set_tenants, count))
        yield Row(f"set_tenant for {count:,} new tenants", timing.divided_by(count), "tenant")


def _set_tenants(count: int, space: BlockSpace) -> None:
    for number in range(count):
        space.set_tenant(f"tenant {number}", TenantLimits(cap=100, floor=1))


def forks_that_leave_a_block() -> Iterator[Row]:
    """Append a first token to a prompt that has not run yet, and to its n forks; and to one that has run."""
    for is_computed in (False, True):
        for count in NUM_FORKS:
            timing = _timed_once(partial(_fork, count, is_computed=is_computed), _append)
            told = "has run" if is_computed else "has not run"
            yield Row(f"first append to {count:,} forks of a prompt that {told}", timing)


def equal_forks() -> Iterator[Row]:
    """Acknowledge a step in which n forks have computed the same full block."""
    for count in NUM_FORKS:
        timing = _timed_once(partial(_planned, count, is_equal=True), _acknowledge)
        yield Row(f"acknowledge {count:,} equal forks", timing)


def aborts() -> Iterator[Row]:
    """Abort a step with n forks, each of which it gives a copy of a block."""
    for count in NUM_FORKS:
        timing = _timed_once(partial(_planned, count, is_equal=False), _abort)
        yield Row(f"abort with {count:,} forks", timing)


def _fork(count: int, *, is_computed: bool) -> Forked:
    """Fork a prompt whose next token completes a block."""
    space = BlockSpace(SpaceConfig(FULL, num_blocks=NUM_BLOCKS, max_sequences=count + 1))
    parent = allocated(space.allocate(prompt(4 * BLOCK_SIZE - 1))).row
    if is_computed:
        run_step(space)
    return space, np.array([parent, *space.fork(parent, count)], np.int32)


def _append(forked: Forked, *, is_equal: bool = False) -> None:
    space, rows = forked
    answer = space.append(rows, np.zeros_like(rows) if is_equal else rows)
    assert not isinstance(answer, Shortage), str(answer)


def _planned(count: int, *, is_equal: bool) -> tuple[BlockSpace, StepPlan]:
    forked = _fork(count, is_computed=True)
    _append(forked, is_equal=is_equal)
    return forked[0], forked[0].plan_step()


def _acknowledge(planned: tuple[BlockSpace, StepPlan]) -> None:
    space, plan = planned
    space.acknowledge(plan.step_id)


def _abort(planned: tuple[BlockSpace, StepPlan]) -> None:
    space, plan = planned
    space.abort(plan.step_id)


def _timed_once(make: Callable[[], Any], run: Callable[[Any], object]) -> Timing:
    """Time one call on a space, alone or first of a pair, that is made anew for each run."""
    made: list[Any] = []

    def renew() -> None:
        made[:] = [make()]

    timing = timed(lambda: run(made[0]), before=renew, num_runs=5, num_warm_ups=1)
    space = made[0][0] if isinstance(made[0], tuple) else made[0]
    space.check()
    return timing


OPERATIONS = (appends_by_tenants, tenants_set, forks_that_leave_a_block, equal_forks, aborts)
