"""The executor: stale memory, swaps that are read beside a step, steps in flight, and a device that fails."""

import pytest
import torch

from pagedkv import BlockSpace, FullAttention, Shortage, SpaceConfig, StepPlan
from pagedkv.device import BlockTables, KeyValueShape, KVStorage, PlanExecutor, StepInputs
from pagedkv.errors import DeviceLostError, StepError, StorageError, TensorError


def body_of(config: SpaceConfig, device: torch.device) -> PlanExecutor:
    storage = KVStorage(config, [KeyValueShape(1, 1, 4, dtype=torch.float32)], device)
    return PlanExecutor(storage, BlockTables(config, max_batched_tokens=64, device=device))


def nothing(_: StepInputs) -> None:
    """A forward pass of a model without layers."""


@pytest.mark.parametrize("in_order", [False, True])
def test_several_steps_are_in_flight_and_done_in_order(device: torch.device, in_order: bool) -> None:  # noqa: FBT001
    config = SpaceConfig((FullAttention(4),), num_blocks=50, max_sequences=4, max_tokens=64, in_order=in_order)
    space, executor = BlockSpace(config), body_of(config, device)
    row = space.allocate([1, 2, 3]).row
    plans = []
    for _ in range(3):
        plans.append(space.plan_step())
        space.append(row, [4])
    for plan in plans:
        executor.launch(plan, nothing)
    assert executor.num_in_flight == 3
    done = executor.wait()
    assert done == tuple(plan.step_id for plan in plans)
    assert (executor.num_in_flight, executor.done()) == (0, ())
    for step_id in done:
        space.acknowledge(step_id)


def test_what_an_aborted_step_refused_counts_no_more(device: torch.device) -> None:
    """A step with an unknown token is aborted and planned anew: it begins where the step before it left off."""
    config = SpaceConfig((FullAttention(4),), num_blocks=50, max_sequences=4, max_tokens=64)
    space, executor = BlockSpace(config), body_of(config, device)
    starts: list[int] = []

    def launch() -> StepPlan:
        plan = space.plan_step()
        executor.launch(plan, lambda inputs: starts.extend(inputs.starts[0].tolist()))
        return plan

    row = space.allocate(range(6)).row
    launch()
    space.append(row, [6, 7, 8], num_draft=2)
    drafted = launch()
    rows, refused = torch.tensor([[row], [2]], dtype=torch.int32, device=device)
    executor.tables.record_refused(drafted.step_id, rows, refused)
    space.append(row, None, [1])  # planned as position 9
    aborted = launch()
    executor.abort(space.abort(aborted.step_id))
    launch()
    assert starts == [0, 6, 7, 7]


def test_stale_nan_in_a_recycled_block_never_reaches_an_output(device: torch.device) -> None:
    """The last slots of a row's block are masked by zero weights: zero times NaN would be NaN."""
    config = SpaceConfig((FullAttention(4),), num_blocks=5, max_sequences=4, max_tokens=16)
    space, executor = BlockSpace(config), body_of(config, device)
    executor.storage.keys(0, 0)[1:] = torch.nan
    space.allocate([1, 2])
    seen = executor.launch(space.plan_step(), lambda inputs: executor.storage.keys(0, 0)[inputs.block_tables[0].long()])
    weights = torch.zeros(seen.shape[2], device=device)
    assert not bool((seen[0, 0, :, 0, 0] * weights).isnan().any())
    careless = PlanExecutor(executor.storage, BlockTables(config, device=device), zero_new_blocks=False)
    executor.storage.keys(0, 0)[1:] = torch.nan
    space = BlockSpace(config)
    space.allocate([1, 2])
    careless.launch(space.plan_step(), nothing)
    assert bool(executor.storage.keys(0, 0)[1].isnan().any()), "the test could not fail"


@pytest.mark.parametrize("stale", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_stale_numbers_reach_no_output_of_attention(device: torch.device, stale: float) -> None:
    """Masked positions weigh nothing, but nothing times infinity is NaN: what is masked must be finite as well.

    Rows come and go, so that each block is handed out several times, and holds what is stale before each.
    """
    config = SpaceConfig((FullAttention(4),), num_blocks=8, max_sequences=4, max_tokens=16, prefix_caching=False)
    space, executor = BlockSpace(config), body_of(config, device)

    def attend(inputs: StepInputs) -> torch.Tensor:
        content = torch.ones(inputs.num_tokens, 1, 4, device=device)
        executor.transfers.reshape_and_cache(0, 0, content, content, inputs.slot_mappings[0])
        blocks = inputs.padded_block_table(0).long()
        keys, values = (tensor[blocks].flatten(1, 2)[:, :, 0] for tensor in both)
        is_seen = torch.arange(keys.shape[1], device=device) < inputs.seq_lens[0][:, None]
        weights = (keys.sum(2) / 4).masked_fill(~is_seen, -torch.inf).softmax(1)
        return (weights[:, :, None] * values).sum(1)

    both = (executor.storage.keys(0, 0), executor.storage.values(0, 0))
    used: set[int] = set()
    for length in (5, 6, 9, 2, 3):
        for tensor in both:
            tensor[1:] = stale
        row = space.allocate(range(length)).row
        used.update(space.block_ids(row))
        output = executor.launch(space.plan_step(), attend)
        assert torch.equal(output, torch.ones_like(output))
        for step_id in executor.wait():
            space.acknowledge(step_id)
        space.free(row)
    assert len(used) < 5 * 2, "blocks were handed out again"


def test_a_hit_inside_a_block_copies_that_block(device: torch.device) -> None:
    """All layers, keys and values; what the row computes itself goes behind what it hit."""
    config = SpaceConfig((FullAttention(4),), num_blocks=9, max_sequences=4, max_tokens=16, min_partial_hit=1)
    space = BlockSpace(config)
    storage = KVStorage(config, [KeyValueShape(3, 2, 4, dtype=torch.float32)], device)
    executor = PlanExecutor(storage, BlockTables(config, max_batched_tokens=64, device=device))

    def run(number: int) -> StepPlan:
        def write(inputs: StepInputs) -> None:
            for layer in range(3):
                content = torch.full((inputs.num_tokens, 2, 4), 10.0 * number + layer, device=device)
                executor.transfers.reshape_and_cache(0, layer, content, -content, inputs.slot_mappings[0])

        plan = space.plan_step()
        executor.launch(plan, write)
        for step_id in executor.wait():
            space.acknowledge(step_id)
        return plan

    space.free(space.allocate([1, 2, 3, 4, 5, 6, 7, 8]).row)
    first = space.allocate([1, 2, 3, 4, 5, 6, 7, 8]).row
    run(1)
    second = space.allocate([1, 2, 3, 4, 5, 6, 0, 0, 0]).row
    plan = run(2)
    assert [len(moves.src_ids) for moves in plan.copies] == [1]
    mine, theirs = space.block_ids(second), space.block_ids(first)
    assert (mine[0], mine[1] == theirs[1]) == (theirs[0], False)
    for layer in range(3):
        for sign, view in ((1, storage.keys(0, layer)), (-1, storage.values(0, layer))):
            assert (sign * view[mine[1], :, 0, 0]).tolist() == [10.0 + layer] * 2 + [20.0 + layer] * 2
            assert (sign * view[theirs[1], :, 0, 0]).tolist() == [10.0 + layer] * 4, "the source stays"


def test_a_space_goes_on_after_sleep(device: torch.device) -> None:
    """Its memory is other memory then: what was cached hits no more, and new rows read what they wrote."""
    config = SpaceConfig((FullAttention(4),), num_blocks=9, num_host_blocks=3, max_sequences=4, max_tokens=16)
    space, executor = BlockSpace(config), body_of(config, device)

    def write(inputs: StepInputs) -> None:
        content = torch.arange(1.0, inputs.num_tokens + 1, device=device)[:, None, None].expand(-1, 1, 4)
        executor.transfers.reshape_and_cache(0, 0, content, content, inputs.slot_mappings[0])

    def run() -> None:
        executor.launch(space.plan_step(), write)
        for step_id in executor.wait():
            space.acknowledge(step_id)

    row = space.allocate(range(6)).row
    run()
    space.free(row)
    space.invalidate_memory()
    executor.storage.sleep()
    with pytest.raises(StorageError, match="asleep"):
        executor.transfers.swap_out("device", [1], [1])
    executor.storage.wake()
    executor.storage.keys(0, 0)[1:] = torch.nan
    again = space.allocate(range(6))
    assert not isinstance(again, Shortage)
    assert again.num_hit_tokens == 0
    run()
    blocks = torch.tensor(space.block_ids(again.row), device=device)
    assert executor.storage.keys(0, 0)[blocks][:, :, 0, 0].flatten().tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


def test_swapped_rows_come_back_as_they_were(device: torch.device) -> None:
    config = SpaceConfig((FullAttention(4),), num_blocks=9, num_host_blocks=5, max_sequences=4, max_tokens=32)
    space, executor = BlockSpace(config), body_of(config, device)
    row = space.allocate(range(7)).row

    def write(inputs: StepInputs) -> None:
        content = torch.arange(1.0, 8.0, device=device)[:, None, None].expand(-1, 1, 4)
        executor.transfers.reshape_and_cache(0, 0, content, content, inputs.slot_mappings[0])

    steps = [(lambda: None, write), (lambda: space.swap_out(row), nothing), (lambda: space.swap_in(row), nothing)]
    for change, forward in steps:
        change()
        executor.launch(space.plan_step(), forward)
        for step_id in executor.wait():
            space.acknowledge(step_id)
        if change is steps[1][0]:
            space.reset_prefix_cache()
            executor.storage.keys(0, 0)[1:] = torch.nan
    blocks = torch.tensor(space.block_ids(row), device=device)
    assert executor.storage.keys(0, 0)[blocks][:, :, 0, 0].flatten()[:7].tolist() == list(range(1, 8))


class FailingModel:
    """A model whose kernels bring the device down."""

    def __call__(self, _: StepInputs) -> None:
        """Fail as torch does."""
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_fails_ends_the_executor(device: torch.device) -> None:
    """What was told to be done stays so; everything else is lost, and nothing goes on."""
    config = SpaceConfig((FullAttention(4),), num_blocks=50, max_sequences=4, max_tokens=64)
    space, executor = BlockSpace(config), body_of(config, device)
    space.allocate([1, 2, 3])
    executor.launch(space.plan_step(), nothing)
    assert executor.wait() == (1,)
    executor.launch(space.plan_step(), nothing)
    with pytest.raises(DeviceLostError, match="illegal memory access") as caught:
        executor.launch(space.plan_step(), FailingModel())
    assert (caught.value.done_steps, caught.value.lost_steps) == ((1,), (2, 3))
    for ask in (executor.done, executor.wait, lambda: executor.launch(space.plan_step(), nothing)):
        with pytest.raises(DeviceLostError, match="it failed before"):
            ask()


def test_storage_and_tables_lie_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SpaceConfig((FullAttention(4),), num_blocks=5, max_sequences=4, max_tokens=16)
    storage, tables = KVStorage(config, [KeyValueShape(1, 1, 4)]), BlockTables(config)
    monkeypatch.setattr(tables, "device", torch.device("cuda", 3))
    with pytest.raises(TensorError, match="the storage is on cpu, but the tables are on cuda:3"):
        PlanExecutor(storage, tables)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no streams")
def test_steps_in_order_stay_on_one_stream() -> None:
    config = SpaceConfig((FullAttention(4),), num_blocks=50, max_sequences=4, max_tokens=64, in_order=True)
    space, executor = BlockSpace(config), body_of(config, torch.device("cuda", 0))
    executor.launch(space.plan_step(), nothing)
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(StepError, match="run in order, on one stream"):
        executor.launch(space.plan_step(), nothing)


def test_slots_are_padded_behind_a_step_whose_entries_travelled_ahead(device: torch.device) -> None:
    """Its packets are pulled without slots, which hold those of the step before until then."""
    config = SpaceConfig((FullAttention(1),), num_blocks=400, max_sequences=4, max_tokens=200)
    space = BlockSpace(config)
    storage = KVStorage(config, [KeyValueShape(1, 1, 4, dtype=torch.float32)], device)
    tables = BlockTables(config, max_batched_tokens=200, device=device, packet_entries=32)
    executor = PlanExecutor(storage, tables)
    for tokens in (range(150), range(300, 400)):
        space.allocate(list(tokens))
        inputs = executor.launch(space.plan_step(), lambda inputs: inputs)
        slots = inputs.slot_mappings[0].tolist()
        assert -1 not in slots[: len(tokens)]
        assert set(slots[len(tokens) :]) == {-1}
