"""Plans: what closing a step costs in spaces of any size, restoring a plan, and the inputs of attention kernels."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Row, timed
from benchmarks.operations import BLOCK_SIZE, NUM_BLOCKS, admit, batch_of, new_space, prompt, run_step
from pagedkv import BlockSpace, FullAttention, Shortage, SpaceConfig, StepPlan

__all__ = ["OPERATIONS"]

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]

NUM_ROWS = 1024
NUM_TOKENS = 1024


def cycle_of_few_rows() -> Iterator[Row]:
    """Append, plan and acknowledge one row of many: it costs what changed. Average over 16 steps, one fills a block."""
    for num_rows in (1024, 100_000):
        config = SpaceConfig((FullAttention(BLOCK_SIZE),), NUM_BLOCKS, max_sequences=num_rows, max_tokens=4096)
        space = BlockSpace(config)
        row = np.array([admit(space, prompt(100))], np.int32)
        timing = timed(_cycles(space, row), num_runs=50)
        assert space.num_tokens(int(row[0])) == 100 + 52 * BLOCK_SIZE
        space.check()
        yield Row(f"append, plan and acknowledge one row, max_sequences {num_rows:,}", timing.divided_by(16), "step")


def cycle_of_all_rows() -> Iterator[Row]:
    """The same with every row, in the order of their numbers and in any order."""
    shuffled = np.random.default_rng(0).permutation(NUM_ROWS)
    for name, order in (("ascending", np.arange(NUM_ROWS)), ("in any order", shuffled)):
        space = new_space()
        rows = batch_of(space, [96 + index % BLOCK_SIZE for index in range(NUM_ROWS)])[order]
        timing = timed(_cycles(space, rows), num_runs=6)
        assert space.lengths(rows).sum() == sum(96 + index % BLOCK_SIZE + 8 * 16 for index in range(NUM_ROWS))
        space.check()
        yield Row(f"append, plan and acknowledge 1,024 rows, {name}", timing.divided_by(16), "step")


def _cycles(space: BlockSpace, rows: Int32Array) -> Callable[[], None]:
    tokens = prompt(len(rows))

    def run_steps() -> None:
        for _ in range(BLOCK_SIZE):
            space.append(rows, tokens)
            run_step(space)

    return run_steps


def overlapped_cycle() -> Iterator[Row]:
    """Overlapped steps: append unknown tokens, plan, fill and acknowledge the step before; beside the usual cycle."""
    space = new_space()
    rows = batch_of(space, [96 + index % BLOCK_SIZE for index in range(NUM_ROWS)])
    tokens = prompt(NUM_ROWS)
    space.append(rows, tokens)
    plans = [space.plan_step()]

    def run_steps() -> None:
        for _ in range(BLOCK_SIZE):
            space.append(rows, None)
            plans.append(space.plan_step())
            space.fill(rows, tokens)
            space.acknowledge(plans.pop(0).step_id)

    named_before = space.statistics().pools[0].num_named
    num_runs, num_warm_ups = 14, 2
    timing = timed(run_steps, num_runs=num_runs, num_warm_ups=num_warm_ups)
    named = space.statistics().pools[0].num_named - named_before
    assert abs(named - NUM_ROWS * (num_runs + num_warm_ups)) <= NUM_ROWS // BLOCK_SIZE, f"{named} blocks were published"
    space.check()
    yield Row(
        "append unknown, plan, fill and acknowledge 1,024 rows, one step in flight", timing.divided_by(16), "step"
    )
    others = new_space()
    usual = timed(
        _cycles(others, batch_of(others, [96 + index % BLOCK_SIZE for index in range(NUM_ROWS)])),
        num_runs=num_runs,
        num_warm_ups=num_warm_ups,
    )
    yield Row("the same with known tokens, none in flight: append, plan and acknowledge", usual.divided_by(16), "step")


def read_plans() -> Iterator[Row]:
    """Restore plans from their bytes, and look at their parts."""
    space = new_space()
    rows = batch_of(space, [96 + index % BLOCK_SIZE for index in range(NUM_ROWS)])
    space.append(rows, prompt(NUM_ROWS))
    decode = space.plan_step()
    space.free(rows)
    _admit_all(space)
    for name, plan in (("1,024 decoding rows", decode), ("1,024 prompts of 1k tokens", space.plan_step())):
        packed = plan.buffer.tobytes()
        assert StepPlan.from_buffer(packed) == plan
        restoring = timed(partial(StepPlan.from_buffer, packed), num_runs=50)
        yield Row(f"restore a plan from its buffer, {name}, {len(packed) / 1024:.0f} KiB", restoring)
        looking = timed(partial(_restore_and_look, packed), num_runs=50)
        yield Row(f"the same, and make views of its parts, {name}", looking)


def _restore_and_look(packed: bytes) -> object:
    return StepPlan.from_buffer(packed).compute


def kernel_inputs() -> Iterator[Row]:
    """Slots of a prefill of 1,024 x 1k tokens and of a decode step; pages of the rows."""
    space = new_space()
    rows = _admit_all(space)
    prefill = space.plan_step()
    slots = space.slot_mapping(prefill)
    table = space.block_table()[rows, : NUM_TOKENS // BLOCK_SIZE]
    assert np.array_equal(slots, _slots_of(table))
    filling = timed(lambda: space.slot_mapping(prefill), num_runs=9)
    yield Row("slot mapping, 1,024 rows x 1k tokens", filling, "step")
    yield Row("the same in NumPy, all rows equally long", timed(lambda: _slots_of(table), num_runs=9), "step")
    lists = space.page_lists(rows)
    assert np.array_equal(lists.indices, table.ravel())
    yield Row("page lists, 1,024 rows x 1k tokens", timed(lambda: space.page_lists(rows), num_runs=25), "step")
    space.append(rows, prompt(NUM_ROWS))
    decode = space.plan_step()
    assert len(space.slot_mapping(decode)) == NUM_ROWS
    yield Row("slot mapping, 1,024 decoding rows", timed(lambda: space.slot_mapping(decode), num_runs=50), "step")


def _slots_of(table: Int32Array) -> Int64Array:
    """Slots of blocks that are full, in order."""
    slots: Int64Array = (table[:, :, None] * np.int64(BLOCK_SIZE) + np.arange(BLOCK_SIZE)).ravel()
    return slots


def _admit_all(space: BlockSpace) -> Int32Array:
    """Give every row of a space a prompt of its own."""
    return np.array([_row_of(space, seed) for seed in range(NUM_ROWS)], np.int32)


def _row_of(space: BlockSpace, seed: int) -> int:
    allocation = space.allocate(prompt(NUM_TOKENS, seed))
    assert not isinstance(allocation, Shortage), str(allocation)
    return allocation.row


OPERATIONS: tuple[Callable[[], Iterator[Row]], ...] = (
    cycle_of_few_rows,
    cycle_of_all_rows,
    overlapped_cycle,
    read_plans,
    kernel_inputs,
)
