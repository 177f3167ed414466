"""Plans: their table entries and positions are all that a device needs of the tables."""

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv import BlockSpace, FullAttention, RecurrentState, SlidingWindow, SpaceConfig, StepPlan
from pagedkv.errors import StepError
from tests.space.spaces import acknowledge, allocate, new_space, prefill, run_step, tokens

GROUPS = FullAttention(4), SlidingWindow(8, 2, num_sink_tokens=3), RecurrentState(8)
POOLS = {"device": 201, "state": 31}


class DeviceTables:
    """The block tables of a device, built from the plans alone."""

    def __init__(self, space: BlockSpace) -> None:
        self.space = space
        self.tables: list[npt.NDArray[np.int32]] = [np.zeros((16, 600), np.int32) for _ in GROUPS]

    def carry_out(self, *plans: StepPlan) -> None:
        """Write the entries of the plans."""
        for writes in (writes for plan in plans for writes in plan.table_writes):
            ends = np.cumsum(writes.counts).tolist()
            runs = zip(writes.rows.tolist(), writes.starts.tolist(), writes.counts.tolist(), ends, strict=True)
            for row, start, count, end in runs:
                self.tables[writes.group][row, start : start + count] = writes.block_ids[end - count : end]
            assert ends[-1] == len(writes.block_ids)

    def require_equal(self, rows: list[int]) -> None:
        """Compare with the space's tables, but for entries that left a window: they are not read."""
        for group, table in enumerate(self.tables):
            for row in rows:
                blocks = np.array(self.space.block_ids(row, group))
                np.testing.assert_array_equal(table[row, : len(blocks)][blocks != 0], blocks[blocks != 0])


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(3))
def test_tables_follow_from_the_plans(seed: int) -> None:
    """Prompts, growth, forks, copies, hits, merges, lookahead given back, frees; up to two steps in flight."""
    rng = np.random.default_rng(seed)
    space = new_space(*GROUPS, num_blocks=POOLS)
    device = DeviceTables(space)
    rows: list[int] = []
    in_flight: list[StepPlan] = []
    for _ in range(60):
        rows.append(allocate(space, tokens(int(rng.integers(1, 30)), first=100 * int(rng.integers(3)))))
        growing = rng.permutation(rows)[:3].tolist()
        space.append(growing, tokens(len(growing)), num_lookahead=int(rng.integers(6)))
        in_flight.append(space.plan_step())
        rows += space.fork(growing[0]).tolist()
        space.append(rows[-1:], [7])
        space.truncate(rows[-1:], [space.num_tokens(rows[-1])])
        in_flight.append(space.plan_step())
        device.carry_out(*in_flight[-2:])
        device.require_equal(rows)
        while len(in_flight) > 2 * rng.integers(2):
            acknowledge(space, in_flight.pop(0))
        while len(rows) > 6:
            space.free([rows.pop(int(rng.integers(len(rows))))])
    space.check()


def test_a_plan_tells_only_what_has_changed() -> None:
    space = new_space()
    row = prefill(space, tokens(6))
    space.append([row], [6])
    assert run_step(space).table_writes == ()
    space.append([row], [7, 8], [2])
    (writes,) = run_step(space).table_writes
    assert (writes.rows.tolist(), writes.starts.tolist(), writes.counts.tolist()) == ([row], [2], [1])
    assert writes.block_ids.tolist() == space.block_ids(row)[2:]


@pytest.mark.interpreted
def test_several_changes_of_one_table_are_told_together() -> None:
    """First a new block at its end, then a copy on write before it."""
    space = new_space()
    row = prefill(space, tokens(6))
    space.append(row, [6], num_lookahead=2)
    space.fork(row)
    space.append(row, [7])
    (writes,) = (writes for writes in space.plan_step().table_writes)
    mine = np.repeat(writes.rows, writes.counts) == row
    assert writes.block_ids[mine].tolist() == space.block_ids(row)[1:3]


def test_a_swapped_in_row_is_told_whole() -> None:
    space = new_space(num_host_blocks=11)
    row = prefill(space, tokens(10))
    space.swap_out([row])
    assert run_step(space).table_writes == ()
    space.swap_in([row])
    (writes,) = space.plan_step().table_writes
    assert (writes.starts.tolist(), writes.block_ids.tolist()) == ([0], space.block_ids(row))


@pytest.mark.interpreted
def test_a_step_computes_what_no_step_has_computed() -> None:
    """A chunked prefill beside a decode, and a prefix hit: one thing, positions that are not computed yet."""
    space = new_space()
    decoding = prefill(space, tokens(5))
    chunked = allocate(space, tokens(8, first=100))
    space.append([decoding], [5])
    first = space.plan_step()
    space.append([decoding, chunked], tokens(9), [1, 8])
    hitting = allocate(space, [*range(5), 60])
    second = space.plan_step()
    compute = [
        list(zip(plan.compute.rows.tolist(), plan.compute.starts.tolist(), plan.compute.ends.tolist(), strict=True))
        for plan in (first, second)
    ]
    assert compute == [
        [(decoding, 5, 6), (chunked, 0, 8)],
        sorted([(decoding, 6, 7), (chunked, 8, 16), (hitting, 4, 6)]),
    ]
    acknowledge(space, first, second)


def test_an_empty_step_is_a_step() -> None:
    space = new_space()
    first, second = space.plan_step(), space.plan_step()
    assert (first.compute.rows.tolist(), first.table_writes, first.copies) == ([], (), ())
    assert second.step_id == first.step_id + 1
    acknowledge(space, first, second)


def test_after_an_abort_tables_are_told_again() -> None:
    """The device may never have carried the failed plan out."""
    space = new_space()
    row = prefill(space, tokens(4))
    space.append([row], tokens(6, first=4), [6])
    failed = space.plan_step()
    space.abort(failed.step_id)
    (writes,) = failed.table_writes
    (again,) = run_step(space).table_writes
    assert set(writes.block_ids.tolist()) <= set(again.block_ids.tolist())
    assert again.block_ids.tolist() == space.block_ids(row)[int(again.starts[0]) :]


def test_what_another_row_computes_cannot_be_declared_computed() -> None:
    """Else, were that row freed or its step to fail, the work would fall to a row whose window has moved on."""
    window = SlidingWindow(window=5, block_size=2, num_sink_tokens=3)
    space = BlockSpace(SpaceConfig(groups=(window,), num_blocks=30, max_sequences=4, max_tokens=40))
    parent = allocate(space, [0] * 16)
    child = int(space.fork(parent)[0])
    for _ in range(2):  # in the open step, then in flight
        before = space.statistics()
        with pytest.raises(StepError, match=rf"row {parent} computes blocks that row {child} shares"):
            space.mark_computed(child)
        assert space.statistics() == before
        step = space.plan_step().step_id
    space.mark_computed([parent, child])
    space.abort(step)
    space.free(parent)
    space.check()
    assert len(space.plan_step().compute.rows) == 0


def test_a_row_is_declared_computed_when_its_sharers_are_settled() -> None:
    space = BlockSpace(SpaceConfig(groups=(FullAttention(4),), num_blocks=30, max_sequences=4, max_tokens=40))
    parent = allocate(space, [0] * 8)
    space.acknowledge(space.plan_step().step_id)
    child = int(space.fork(parent)[0])
    space.append(child, [1] * 8, [8])
    space.append(parent, [2])
    space.mark_computed(child)
    assert len(space.computed_block_ids(child)) == 4


@pytest.mark.interpreted
def test_declaring_reaches_a_sink_that_a_rolled_back_row_writes_again() -> None:
    """The window had moved past the sink's block; rolled back into it, the row has it below its first block."""
    space = new_space(SlidingWindow(5, 2, num_sink_tokens=3))
    row = prefill(space, tokens(7))
    space.truncate(row, [1])
    space.append(row, [9])
    space.mark_computed(row)
    space.check()
    run_step(space)
    space.check()
