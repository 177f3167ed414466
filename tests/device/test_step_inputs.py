"""What a step's kernels are told of it: rows, positions and places, and how that reads in a debugger."""

import torch

from pagedkv import BlockSpace, FullAttention, SlidingWindow, SpaceConfig
from pagedkv.device import BlockTables, KeyValueShape, KVStorage, PlanExecutor, StepInputs

CONFIG = SpaceConfig((FullAttention(4), SlidingWindow(8, 4)), num_blocks=50, max_sequences=8, max_tokens=64)


def body(device: torch.device) -> tuple[BlockSpace, PlanExecutor]:
    shape = KeyValueShape(1, 1, 4, dtype=torch.float32)
    tables = BlockTables(CONFIG, max_batched_tokens=16, device=device)
    return BlockSpace(CONFIG), PlanExecutor(KVStorage(CONFIG, [shape, shape], device), tables)


def same(inputs: StepInputs) -> StepInputs:
    """Give what a step is told."""
    return inputs


def test_rows_and_positions_are_told_by_place(device: torch.device) -> None:
    space, executor = body(device)
    first, second, third = (space.allocate([10 * row + at for at in range(3 + row)]).row for row in range(3))
    inputs = executor.launch(space.plan_step(), same)
    assert inputs.rows.tolist() == [first, second, third]
    assert inputs.positions().tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, -1, -1, -1, -1]
    assert inputs.places(1).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, -1, -1, -1, -1]
    space.free(second)
    space.append([third, first], [7, 8, 9], [2, 1])
    inputs = executor.launch(space.plan_step(), same)
    assert inputs.rows.tolist() == [first, third], "in the order of the plan's ranges"
    assert inputs.positions()[: inputs.num_tokens].tolist() == [3, 5, 6]
    assert inputs.places()[: inputs.num_tokens].tolist() == [0, 1, 1]


def test_a_step_without_rows_has_no_positions(device: torch.device) -> None:
    space, executor = body(device)
    inputs = executor.launch(space.plan_step(), same)
    assert inputs.rows.tolist() == []
    assert set(inputs.positions().tolist()) == set(inputs.places().tolist()) == {-1}


def test_a_step_s_inputs_read_in_a_line(device: torch.device) -> None:
    """Not as arrays of all rows, groups and steps."""
    space, executor = body(device)
    space.allocate(range(5))
    inputs = executor.launch(space.plan_step(), same)
    assert repr(inputs) == "StepInputs(step 1: 1 rows, 5 tokens, 2 block tables)"
