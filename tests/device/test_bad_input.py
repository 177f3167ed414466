"""What bad input gets: an error of ours before any kernel is launched, and nothing written.

slot out of range                  test_keys_that_do_not_fit_are_refused; what does not exist is never written
table overflow                     test_numbers_beyond_the_tables_are_refused, by a plan;
                                   test_calls_that_do_not_fit_the_tables_are_refused, by calls;
                                   test_slots_of_drafts_beyond_their_table_are_refused
mismatched dtype, device or shape  test_keys_that_do_not_fit_are_refused, test_states_that_do_not_fit_are_refused,
                                   test_refusals_that_do_not_fit_are_refused
an unpinned buffer                 test_packets_that_are_not_pinned_are_refused, test_host_blocks_that_are_not_...
freeing with copies in flight      test_memory_in_use_is_not_given_back
a row twice in one batch           test_a_row_twice_in_one_batch_is_refused; by a plan: "row 0 follows row 0"
Triton where there is none         test_triton_on_a_cpu_is_refused, test_a_gpu_without_triton_is_refused
a plan twice, or out of order      test_a_plan_that_is_carried_out_twice_is_refused, test_a_plan_out_of_order_is_...
a buffer of another version        test_a_buffer_of_another_version_is_refused, test_a_plan_of_another_space_is_...
another configuration              test_storage_and_tables_of_different_configurations_are_refused,
                                   test_a_plan_of_a_space_with_another_configuration_is_refused
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pagedkv import BlockSpace, FullAttention, RecurrentState, SlidingWindow, SpaceConfig, StepPlan
from pagedkv.contract.answers import AbortedSteps
from pagedkv.device import (
    BlockTables,
    Companion,
    KeyValueShape,
    KVStorage,
    LatentShape,
    PlanExecutor,
    StateShape,
    StateTensor,
    StepInputs,
    Transfers,
)
from pagedkv.device.block_tables import PacketRing
from pagedkv.device.kernels.selection import kernels_for
from pagedkv.device.memory import PoolMemory
from pagedkv.device.shapes import Pieces
from pagedkv.device.tensors import as_device
from pagedkv.errors import (
    BlockError,
    ConfigurationError,
    DeviceUnavailableError,
    NoHostPoolError,
    PagedKVError,
    PlanError,
    StepError,
    StorageError,
    TensorError,
)
from tests.device.kernels.suite import same_bytes
from tests.plan_packing import pack, parts_of, repacked

CONFIG = SpaceConfig((FullAttention(4),), num_blocks=20, num_host_blocks=5, max_sequences=4, max_tokens=40)
SHAPE = KeyValueShape(2, 2, 8, dtype=torch.float32)


def nothing(_: StepInputs) -> None:
    """A forward pass of a model without layers."""


class Setting:
    """A space with a body, and one plan of it that was not carried out."""

    def __init__(self, device: torch.device) -> None:
        self.space = BlockSpace(CONFIG)
        self.storage = KVStorage(CONFIG, [SHAPE], device)
        self.tables = BlockTables(CONFIG, max_batched_tokens=16, device=device)
        self.executor = PlanExecutor(self.storage, self.tables)
        self.space.allocate([1, 2, 3, 4, 5])
        self.space.allocate([6, 7])
        self.plan = self.space.plan_step()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Assert that nothing is written inside."""
        pool = self.storage.pools["device"]
        arrays = (pool.device_bytes, pool.host_bytes, self.tables.arrays.tables, self.tables.arrays.slots)
        before = [array.clone() for array in arrays]
        yield
        assert all(same_bytes(array, old) for array, old in zip(arrays, before, strict=True))

    def refuses(self, plan: StepPlan, error: type[PagedKVError], told: str) -> None:
        """Assert that a plan is refused, and the right one is carried out afterwards."""
        with self.unchanged(), pytest.raises(error, match=told):
            self.executor.launch(plan, nothing)
        self.executor.launch(self.plan, nothing)
        assert self.executor.wait() == (self.plan.step_id,)


@pytest.fixture
def setting(device: torch.device) -> Setting:
    return Setting(device)


def test_a_plan_that_is_carried_out_twice_is_refused(setting: Setting) -> None:
    setting.executor.launch(setting.plan, nothing)
    with setting.unchanged(), pytest.raises(StepError, match="step 1 cannot be executed: step 2 is next"):
        setting.executor.launch(setting.plan, nothing)
    with pytest.raises(StepError, match="step 1 cannot be executed after step 1"):
        setting.tables.step(setting.plan)


def test_a_plan_out_of_order_is_refused(setting: Setting) -> None:
    setting.executor.launch(setting.plan, nothing)
    skipped, later = setting.space.plan_step(), setting.space.plan_step()
    with (
        setting.unchanged(),
        pytest.raises(StepError, match=f"step {later.step_id} .*step {skipped.step_id} is next"),
    ):
        setting.executor.launch(later, nothing)
    setting.executor.launch(skipped, nothing)
    setting.executor.launch(later, nothing)


def test_a_buffer_of_another_version_is_refused(setting: Setting) -> None:
    octets = bytearray(setting.plan.buffer.tobytes())
    octets[4] += 1
    with pytest.raises(PlanError, match="version 6 of the layout"):
        StepPlan.from_buffer(octets)


def test_a_plan_of_another_space_is_refused(setting: Setting) -> None:
    other = BlockSpace(replace(CONFIG, groups=(FullAttention(4), FullAttention(4))))
    fingerprint = setting.plan.buffer[8:12].tobytes()
    renamed = StepPlan.from_buffer(pack(parts_of(setting.plan), ("elsewhere",), 1, fingerprint=fingerprint))
    with setting.unchanged(), pytest.raises(PlanError, match="of another space: version 5"):
        setting.tables.stage(renamed)
    setting.refuses(other.plan_step(), PlanError, "of another space: its configuration has the fingerprint")


OTHERWISE: dict[str, SpaceConfig] = {
    "block size": replace(CONFIG, groups=(FullAttention(2),)),
    "rule": replace(CONFIG, groups=(SlidingWindow(8, 4),)),
    "window": replace(CONFIG, groups=(SlidingWindow(9, 4),)),
    "prefix caching of a group": replace(CONFIG, groups=(FullAttention(4), FullAttention(4, prefix_caching=False))),
    "number of groups": replace(CONFIG, groups=(FullAttention(4), FullAttention(4))),
    "name of the pool": replace(CONFIG, groups=(FullAttention(4, pool="other"),)),
    "blocks": replace(CONFIG, num_blocks=19),
    "host blocks": replace(CONFIG, num_host_blocks=4),
    "rows": replace(CONFIG, max_sequences=3),
    "length": replace(CONFIG, max_tokens=36),
    "prefix caching": replace(CONFIG, prefix_caching=False),
    "order of steps": replace(CONFIG, in_order=True),
}
"""Configurations in which the numbers of a plan mean something else."""


@pytest.mark.parametrize("what", OTHERWISE)
def test_storage_and_tables_of_different_configurations_are_refused(what: str) -> None:
    other = OTHERWISE[what]
    storage, tables = KVStorage(CONFIG, [SHAPE]), BlockTables(CONFIG, max_batched_tokens=16)
    with pytest.raises(ConfigurationError, match="storage and tables must be built from the space's configuration"):
        PlanExecutor(storage, BlockTables(other, max_batched_tokens=16))
    with pytest.raises(ConfigurationError, match="but they differ: "):
        PlanExecutor(KVStorage(other, [SHAPE] * len(other.groups)), tables)


@pytest.mark.parametrize("what", OTHERWISE)
def test_a_plan_of_a_space_with_another_configuration_is_refused(setting: Setting, what: str) -> None:
    """Its blocks and rows exist here as well: without the fingerprint it would be carried out."""
    other = BlockSpace(OTHERWISE[what])
    other.allocate([1, 2, 3])
    plan = other.plan_step()
    with setting.unchanged(), pytest.raises(PlanError, match="of another space"):
        setting.tables.stage(plan)
    setting.refuses(plan, PlanError, "of another space")


def test_a_plan_of_a_space_that_differs_in_what_no_device_sees_is_carried_out(setting: Setting) -> None:
    other = BlockSpace(
        replace(CONFIG, watermark=0.2, events=True, eviction="hazard", weights_epoch="v2", receipts=True)
    )
    other.allocate([1, 2, 3])
    plan = other.plan_step()
    setting.executor.launch(plan, nothing)
    assert setting.executor.wait() == (plan.step_id,)


def test_transfers_of_another_storage_are_refused() -> None:
    storage, other = KVStorage(CONFIG, [SHAPE]), KVStorage(CONFIG, [SHAPE])
    with pytest.raises(ConfigurationError, match="got those of another"):
        PlanExecutor(storage, BlockTables(CONFIG), transfers=Transfers(other))


def test_what_is_no_plan_is_refused(setting: Setting) -> None:
    setting.refuses(setting.plan.buffer, PlanError, "a step is a StepPlan")  # type: ignore[arg-type]


def changed(plan: StepPlan, **numbers: int) -> StepPlan:
    """Repack a plan with one number of its table writes, or of its ranges, replaced."""
    parts = parts_of(plan)
    (writes,) = parts.table_writes
    arrays = {name: getattr(writes, name).copy() for name in ("rows", "starts", "block_ids")}
    ranges = {name: getattr(parts.compute, name).copy() for name in ("rows", "ends")}
    for name, number in numbers.items():
        where = ranges if name.startswith("compute_") else arrays
        where[name.removeprefix("compute_")][-1] = number
    parts = replace(parts, table_writes=(replace(writes, **arrays),), compute=replace(parts.compute, **ranges))
    return repacked(parts, plan)


@pytest.mark.parametrize(
    ("numbers", "error", "told"),
    [
        ({"starts": 10}, PlanError, "would have 11 entries, but its table has room for 10"),
        ({"rows": 4}, PlanError, "the plan writes row 4 of group 0, but the tables have 4"),
        ({"block_ids": 20}, PlanError, "names block 20 in group 0, but its pool has 20"),
        ({"compute_rows": 9}, PlanError, "the plan computes row 9"),
        ({"compute_rows": 0}, PlanError, "row 0 follows row 0"),
        ({"compute_ends": 30}, TensorError, "computes 35 positions, but there are slots for 16"),
    ],
)
def test_numbers_beyond_the_tables_are_refused(
    setting: Setting, numbers: dict[str, int], error: type[PagedKVError], told: str
) -> None:
    setting.refuses(changed(setting.plan, **numbers), error, told)


def test_a_long_row_beside_a_new_one_is_no_overflow(device: torch.device) -> None:
    """One run begins at the table's last entry, another one is long: neither is beyond it."""
    space, tables = BlockSpace(CONFIG), BlockTables(CONFIG, max_batched_tokens=64, device=device)
    row = space.allocate(range(36)).row
    tables.step(space.plan_step())
    space.append(row, [7])
    other = space.allocate(range(100, 120)).row
    inputs = tables.step(space.plan_step())
    told = [inputs.padded_block_table(0)[place].tolist() for place in range(2)]
    assert told == [space.block_ids(row), space.block_ids(other) + [0] * 5]


def test_slots_of_drafts_beyond_their_table_are_refused(device: torch.device) -> None:
    """And plans of spaces that keep another number of draft states, or none."""
    config = SpaceConfig((RecurrentState(4, num_draft_states=3),), num_blocks=12, max_sequences=4, max_tokens=40)
    space, tables = BlockSpace(config), BlockTables(config, max_batched_tokens=16, device=device)
    row = space.allocate([1, 2, 3]).row
    tables.step(space.plan_step())
    space.append(row, [4, 5], num_draft=2)
    plan = space.plan_step()
    parts = parts_of(plan)
    *first, slots = parts.table_writes
    assert slots.group == 1
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        (
            {"starts": slots.starts + np.int32(2)},
            "the draft states of group 0 would have .* entries, but its table has",
        ),
        ({"block_ids": slots.block_ids + np.int32(12)}, "in the draft states of group 0, but its pool has 12"),
        ({"rows": slots.rows + np.int32(4)}, "writes row 4 of the draft states of group 0"),
    )
    for change, told in changes:
        wrong = repacked(replace(parts, table_writes=(*first, replace(slots, **change))), plan)
        with pytest.raises(PlanError, match=told):
            tables.step(wrong)
    tables.step(plan)
    without = BlockTables(replace(config, groups=(RecurrentState(4),)), device=device)
    with pytest.raises(PlanError, match="of another space"):
        without.step(plan)


def test_moves_beyond_a_pool_are_refused(setting: Setting) -> None:
    parts = parts_of(setting.plan)
    (new,) = parts.new_blocks
    beyond = replace(new, block_ids=np.array([20], np.int32))
    setting.refuses(repacked(replace(parts, new_blocks=(beyond,)), setting.plan), BlockError, "from 0 to 19, got 20")


def test_a_failed_forward_pass_leaves_core_and_body_agreed(setting: Setting) -> None:
    """The exception comes through; both sides abort, and the next plan computes the same positions."""

    def fail(_: StepInputs) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        setting.executor.launch(setting.plan, fail)
    with pytest.raises(StepError, match="step 1 failed: abort it"):
        setting.executor.launch(setting.space.plan_step(), nothing)
    aborted = setting.space.abort(setting.plan.step_id)
    setting.executor.abort(aborted)
    again = setting.space.plan_step()
    inputs = setting.executor.launch(again, lambda inputs: inputs)
    assert inputs.slot_mappings[0, :7].tolist() == setting.space.slot_mapping(again).tolist()
    assert setting.executor.wait() == (again.step_id,)


def test_steps_that_are_done_are_not_aborted(setting: Setting) -> None:
    setting.executor.launch(setting.plan, nothing)
    assert setting.executor.wait() == (1,)
    with pytest.raises(StepError, match="step 1 cannot be aborted"):
        setting.executor.abort(AbortedSteps((setting.plan.step_id,), (), ()))


# Tensors


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda key, slots: (key[:, :1], slots), r"key must have the shape \[3, 2, 8\], got \[3, 1, 8\]"),
        (lambda key, slots: (key.int(), slots), "key must be of torch.float32 or"),
        (lambda key, slots: (key, slots.int()), "slot_mapping must be of torch.int64, got torch.int32"),
        (lambda key, slots: (key, slots[:2]), "3 tokens need as many slots, got 2"),
        (lambda key, slots: (key.to("meta"), slots), "key must be on .*, got one on meta"),
        (lambda key, slots: (key, slots + 100), "has slot 107, but there are 80 slots"),
        (lambda key, slots: (key, slots - 100), "has slot -100"),
    ],
)
def test_keys_that_do_not_fit_are_refused(
    setting: Setting,
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    told: str,
) -> None:
    where = setting.storage.device
    key, slots = change(torch.zeros(3, 2, 8, device=where), torch.tensor([0, 5, 7], device=where))
    transfers = Transfers(setting.storage)
    with setting.unchanged(), pytest.raises(TensorError, match=told):
        transfers.reshape_and_cache(0, 0, key, key, slots, check_slots=True)


def test_states_that_do_not_fit_are_refused(device: torch.device) -> None:
    storage = KVStorage(SpaceConfig((RecurrentState(4),), 9), [StateShape(1, (StateTensor("scan", (4,)),))], device)
    transfers = Transfers(storage)
    before = storage.pools["state"].device_bytes.clone()
    blocks = torch.tensor([1, 2], dtype=torch.int32, device=device)
    states = torch.ones(2, 4, device=device)
    for index, given, told in (
        (blocks.float(), {"scan": states}, "must be of"),
        (blocks, {"scan": states[:1]}, r"scan must have the shape \[2, 4\], got \[1, 4\]"),
        (blocks, {"scan": states.double()}, "scan must be of torch.float32"),
        (blocks, {"scan": states.to("meta")}, "scan must be on"),
        (blocks, {"conv": states}, r"has the tensors \['scan'\], got \['conv'\]"),
    ):
        with pytest.raises(TensorError, match=told):
            transfers.scatter_states(0, 0, index, given)
    assert same_bytes(storage.pools["state"].device_bytes, before)


def test_refusals_that_do_not_fit_are_refused(setting: Setting) -> None:
    where = setting.tables.device
    rows = torch.tensor([0, 1], dtype=torch.int32, device=where)
    for counts, told in (
        (rows[:1], r"counts must have the shape \[2\], got \[1\]"),
        (rows.float(), "counts must be of torch.int32 or"),
        (rows.to("meta"), "counts must be on"),
    ):
        with pytest.raises(TensorError, match=told):
            setting.tables.record_refused(1, rows, counts)


def test_wrong_groups_layers_and_kinds_are_refused(setting: Setting) -> None:
    storage = setting.storage
    for ask, told in (
        (lambda: storage.keys(1, 0), "group must be at most 0"),
        (lambda: storage.keys(0, 2), "layer of the group must be at most 1"),
        (lambda: storage.latents(0, 0), "group 0 has no latents"),
        (lambda: storage.states(0, 0), "group 0 has no states"),
        (lambda: storage.scales(0), "group 0 has no scales"),
        (lambda: storage.pages(0, 0, 3), "blocks of 4 tokens cannot be divided into pages of 3"),
        (lambda: setting.tables.state_blocks(0, 1), "group 0 has no states"),
        (lambda: setting.tables.state_writes(0, 1), "group 0 has no states"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            ask()


@pytest.mark.parametrize(
    ("sources", "destinations", "told"),
    [
        ([20], [1], "from 0 to 19, got 20 to 20"),
        ([-1], [1], "from 0 to 19, got -1 to -1"),
        ([1, 2], [3, 3], "two blocks have the same destination"),
        ([1, 2], [2, 3], "source and destination in one call"),
        ([1, 2], [3], "2 sources and 1 destinations"),
        ([1.5], [2], "flat array of integers"),
    ],
)
def test_copies_that_cannot_be_are_refused(
    setting: Setting, sources: list[int], destinations: list[int], told: str
) -> None:
    with setting.unchanged(), pytest.raises(BlockError, match=told):
        Transfers(setting.storage).copy("device", sources, destinations)


def test_swaps_that_cannot_be_are_refused(setting: Setting) -> None:
    transfers = Transfers(setting.storage)
    with setting.unchanged(), pytest.raises(BlockError, match="from 0 to 4, got 5"):
        transfers.swap_out("device", [1], [5])
    with pytest.raises(ConfigurationError, match="no pool 'elsewhere'"):
        transfers.swap_in("elsewhere", [1], [1])
    without = Transfers(KVStorage(replace(CONFIG, num_host_blocks=0), [SHAPE], setting.storage.device))
    with pytest.raises(NoHostPoolError, match="has no host pool"):
        without.swap_out("device", [1], [1])


def test_memory_in_use_is_not_given_back(setting: Setting) -> None:
    class Copy:
        done = False

        def is_done(self) -> bool:
            return self.done

        def __repr__(self) -> str:
            return "a copy"

    copy = Copy()
    setting.storage.began(copy)
    for give_back in (setting.storage.sleep, setting.storage.close):
        with (
            setting.unchanged(),
            pytest.raises(StorageError, match="1 copies or steps are in flight, the first is a copy"),
        ):
            give_back()
    copy.done = True
    setting.storage.sleep()
    with pytest.raises(StorageError, match="is asleep"):
        setting.executor.launch(setting.plan, nothing)
    with pytest.raises(StorageError, match="already asleep"):
        setting.storage.sleep()
    setting.storage.wake()
    with pytest.raises(StorageError, match="awake"):
        setting.storage.wake()
    setting.executor.launch(setting.plan, nothing)


A_GPU = torch.device("cuda", 0)
NOT_PINNED = "must be in pinned host memory, got memory that the system may move"


def test_packets_that_are_not_pinned_are_refused() -> None:
    with pytest.raises(TensorError, match=f"the ring of packets {NOT_PINNED}"):
        PacketRing(torch.zeros(4, 64, dtype=torch.int32), A_GPU)


def test_host_blocks_that_are_not_pinned_are_refused() -> None:
    """Before anything is allocated on the GPU, so this holds on a machine without one."""
    sizes = {"num_blocks": 9, "num_host_blocks": 2, "block_nbytes": 64, "pieces": Pieces((0,), (64,), (64,))}
    memory = torch.zeros(128, dtype=torch.uint8)
    with pytest.raises(TensorError, match=f"the host pool of 'device' {NOT_PINNED}"):
        PoolMemory("device", device=A_GPU, host_bytes=memory, **sizes)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU copies from any memory")
def test_a_storage_refuses_host_memory_that_is_not_pinned() -> None:
    memory = torch.zeros(5 * SHAPE.block_nbytes(4), dtype=torch.uint8)
    with pytest.raises(TensorError, match=f"the host pool of 'device' {NOT_PINNED}"):
        KVStorage(CONFIG, [SHAPE], "cuda", host_memory={"device": memory})


def test_host_memory_that_does_not_fit_is_refused() -> None:
    nbytes = 5 * SHAPE.block_nbytes(4)
    for memory, told in (
        (torch.zeros(nbytes + 1, dtype=torch.uint8), f"must have the shape \\[{nbytes}\\], got \\[{nbytes + 1}\\]"),
        (torch.zeros(nbytes, dtype=torch.int8), "must be of torch.uint8"),
        (torch.zeros(2 * nbytes, dtype=torch.uint8)[::2], "must be contiguous"),
        (torch.zeros(nbytes, dtype=torch.uint8, device="meta"), "must be on cpu"),
    ):
        with pytest.raises(TensorError, match=f"the host pool of 'device' {told}"):
            KVStorage(CONFIG, [SHAPE], host_memory={"device": memory})
    with pytest.raises(ConfigurationError, match=r"names pools \['hostt'\], but the pools are \['device'\]"):
        KVStorage(CONFIG, [SHAPE], host_memory={"hostt": torch.zeros(1)})


def test_calls_that_do_not_fit_the_tables_are_refused(device: torch.device) -> None:
    tables = BlockTables(CONFIG, max_batched_tokens=16, device=device)
    for given, told in (
        ((4, [[1]], True), "row must be at most 3"),
        ((0, [[1], [2]], True), "1 groups need as many lists"),
        ((0, [[20]], True), "from 0 to 19, got 20 to 20"),
        ((0, [[-1]], True), "from 0 to 19, got -1"),
        ((0, [list(range(11))], True), "would have 11 blocks, but its table has room for 10"),
    ):
        with pytest.raises(TensorError, match=told):
            tables.append_block_ids(*given)
    rows = torch.tensor([0, 1], dtype=torch.int32, device=device)
    with pytest.raises(TensorError, match="from 2 to 4 places, got 5"):
        tables.gather_block_tables(rows, 5)
    with pytest.raises(TensorError, match=r"idx_mapping must be of torch\.int32"):
        tables.gather_block_tables(rows.long())
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    with pytest.raises(TensorError, match="2 positions need from 2 to 16 slots, got 17"):
        tables.compute_slot_mappings(rows, offsets, torch.zeros(2, dtype=torch.int64, device=device), 17)
    with pytest.raises(TensorError, match="there are slots for 16 tokens, not for 17"):
        tables.get_dummy_slot_mappings(17)


def test_a_row_twice_in_one_batch_is_refused() -> None:
    tables = BlockTables(CONFIG)
    with pytest.raises(TensorError, match=r"a batch has each row once, got \[1, 1\]"):
        tables.gather_block_tables(torch.tensor([1, 1], dtype=torch.int32))


def test_plans_and_calls_do_not_share_tables(setting: Setting) -> None:
    setting.tables.step(setting.plan)
    with pytest.raises(StepError, match="driven by plans"):
        setting.tables.append_block_ids(0, [[1]], overwrite=True)
    called = BlockTables(CONFIG, device=setting.tables.device)
    called.append_block_ids(0, [[1]], overwrite=True)
    with pytest.raises(StepError, match="driven by calls"):
        called.step(setting.plan)


def test_packets_are_launched_once_each(setting: Setting) -> None:
    with pytest.raises(StepError, match="nothing is staged"):
        setting.tables.launch()
    with pytest.raises(StepError, match="no staged packet"):
        setting.tables.fence()
    setting.tables.stage(setting.plan)
    with pytest.raises(StepError, match="a packet is already staged"):
        setting.tables.stage(setting.space.plan_step())


# Where there is no such device


def test_triton_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(DeviceUnavailableError, match="on a CPU needs"):
        BlockTables(CONFIG, kernels="triton")


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "triton.knobs"):
        monkeypatch.setitem(sys.modules, name, None)  # what an import finds where nothing is installed
    with pytest.raises(DeviceUnavailableError, match="kernels for cuda:0 need Triton, which is not installed"):
        kernels_for(A_GPU)


def test_a_machine_without_torch_is_told_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import pagedkv; import pagedkv.device"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "MissingExtraError: pagedkv.device needs torch: pip install '.[torch]'" in ran.stderr


def test_devices_that_are_not_there_are_refused() -> None:
    for name, told in (("cuda:99", "torch sees"), ("mps", "not supported"), ("nowhere", "no device 'nowhere'")):
        with pytest.raises(DeviceUnavailableError, match=told):
            as_device(name)
    with pytest.raises(ConfigurationError, match="'auto', 'torch' or 'triton', got 'numpy'"):
        kernels_for(torch.device("cpu"), "numpy")  # type: ignore[arg-type]


# Shapes


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: KeyValueShape(1, 1, 8, layout="BLNH"), "names each of the axes"),
        (lambda: KeyValueShape(1, 1, 8, layout="BLNHCK"), "K before C"),
        (lambda: KeyValueShape(1, 1, 8, layout="LKNHCB"), "names each|B before C"),
        (lambda: KeyValueShape(1, 1, 8, dtype=torch.int8), "not as torch.int8"),
        (lambda: KeyValueShape(1, 0, 8), "num_heads must be at least 1"),
        (lambda: KeyValueShape(1, 1, 8, scaling=cast("Any", "token")), "'tensor' or 'head'"),
        (lambda: LatentShape(1, 8, layout="BLNHC"), "names each of the axes"),
        (lambda: StateShape(1, ()), "tensors with different names"),
        (lambda: LatentShape(1, 8, layout="LBNC", companions=(Companion("scales", 1, 2),)), "one that begins with B"),
        (lambda: LatentShape(1, 8, companions=2 * (Companion("scales", 1, 2),)), "have different names"),
        (lambda: LatentShape(1, 8, companions=cast("Any", ["scales"])), "must be a tuple of Companion values"),
        (lambda: LatentShape(1, 8, companions=(Companion("scales", 0, 2),)), "num_layers must be at least 1"),
        (
            lambda: LatentShape(1, 9, torch.float8_e4m3fn, companions=(Companion("scales", 1, 1, torch.float64),)),
            "must be multiples of an element's bytes",
        ),
        (
            lambda: StateShape(1, (StateTensor("a", (3,), torch.float16), StateTensor("b", (1,)))),
            "must be a multiple of its widest type",
        ),
    ],
)
def test_shapes_that_cannot_work_are_refused(make: Callable[[], KeyValueShape], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        KVStorage(CONFIG, [make()])


def test_shapes_that_do_not_fit_the_groups_are_refused() -> None:
    state = StateShape(1, (StateTensor("scan", (4,)),))
    for config, shapes, told in (
        (CONFIG, [], "1 groups need as many shapes, got 0"),
        (CONFIG, [state], "its shape is a StateShape"),
        (SpaceConfig((RecurrentState(4),), 9), [SHAPE], "its shape is a KeyValueShape"),
        (replace(CONFIG, groups=(FullAttention(4), FullAttention(2))), [SHAPE, SHAPE], "a block of group 1 has"),
        (
            replace(CONFIG, groups=(FullAttention(4), FullAttention(4))),
            [SHAPE, replace(SHAPE, layout="LBKNHC")],
            "has another layout of blocks",
        ),
    ):
        with pytest.raises(ConfigurationError, match=told):
            KVStorage(config, shapes)
