"""Whatever the device's classes are given: an answer, or an error of ours before anything is written (promise 5)."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from pagedkv import BlockSpace, FullAttention, RecurrentState, SpaceConfig
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
    free_nbytes,
    num_blocks_that_fit,
)
from pagedkv.device.shapes import PageNumbers
from pagedkv.errors import TensorError
from tests.device.kernels.suite import same_bytes
from tests.odd_arguments import NO_ARRAYS, Call, calls_of, outcome, parameters_of, public_methods

CPU: Final = torch.device("cpu")
CONFIG: Final = SpaceConfig(
    (FullAttention(4), FullAttention(4, pool="latent"), RecurrentState(4)),
    num_blocks={"device": 20, "latent": 20, "state": 20},
    num_host_blocks={"device": 5, "latent": 0, "state": 5},
    max_sequences=4,
    max_tokens=40,
)
SHAPES: Final = (
    KeyValueShape(2, 2, 8, dtype=torch.float8_e4m3fn),
    LatentShape(1, 8, dtype=torch.float32, companions=(Companion("indexer", 1, 4, torch.float32),)),
    StateShape(1, (StateTensor("scan", (3,)),)),
)
KEYS: Final = torch.ones(3, 2, 8)
SLOTS: Final = torch.tensor([4, 5, -1])
ROWS: Final = torch.tensor([0, 1], dtype=torch.int32)
BLOCK: Final = torch.tensor([1], dtype=torch.int32)
TENSORS: Final = {
    "a float tensor": torch.zeros(2),
    "a bool tensor": torch.zeros(2, dtype=torch.bool),
    "an int64 tensor": torch.zeros(2, dtype=torch.int64),
    "an int16 tensor": torch.zeros(2, dtype=torch.int16),
    "no dimensions": torch.tensor(1, dtype=torch.int32),
    "an empty tensor": torch.zeros(0, dtype=torch.int32),
    "three dimensions": torch.zeros(2, 2, 2),
    "beyond": torch.tensor([99, 100], dtype=torch.int32),
    "negative": torch.tensor([-5, -6], dtype=torch.int32),
}

Arguments = dict[str, object]


class Setting:
    """A space with a body; a plan that is to be carried out; tables that are driven by calls."""

    def __init__(self) -> None:
        self.space = BlockSpace(CONFIG)
        self.storage = KVStorage(CONFIG, SHAPES)
        self.tables = BlockTables(CONFIG, max_batched_tokens=16, packet_entries=64)
        self.executor = PlanExecutor(self.storage, self.tables)
        self.transfers = Transfers(self.storage)
        self.called = BlockTables(CONFIG, max_batched_tokens=16, packet_entries=64)
        self.called.append_block_ids(0, [[1], [1], [1]], overwrite=True)
        self.called.apply_staged_writes()
        self.space.allocate([1, 2, 3, 4, 5])
        self.inputs = self.executor.launch(self.space.plan_step(), lambda inputs: inputs)
        self.space.allocate([6, 7])
        self.plan = self.space.plan_step()

    def memory(self) -> list[torch.Tensor]:
        """Copy all that an operation may write."""
        pools = self.storage.pools.values()
        kept = [bytes_ for pool in pools for bytes_ in (pool.device_bytes, pool.host_bytes)]
        return [array.clone() for array in (*kept, self.tables.arrays.tables, self.called.arrays.tables)]


def idle(setting: Setting) -> Arguments:
    """Wait until the storage is unused."""
    setting.executor.wait()
    return {}


def asleep(setting: Setting) -> Arguments:
    """Put the storage to sleep."""
    setting.executor.wait()
    setting.storage.sleep()
    return {}


def staged(setting: Setting) -> Arguments:
    """Stage the plan."""
    setting.tables.stage(setting.plan)
    return {}


def launched(setting: Setting) -> Arguments:
    """Launch the plan, and fence it in no stream."""
    setting.tables.stage(setting.plan)
    setting.tables.launch()
    return {"stream": None}


PAGES: Final = PageNumbers(4, 1, 1, 1, 1)
LAYER: Final[Arguments] = {"group": 0, "layer": 0}

OF_STORAGE: Final[dict[str, Callable[[Setting], Arguments]]] = {
    "began": lambda it: {"user": it.transfers.swap_out("device", [1], [1])},
    "close": lambda _: {},
    "companion": lambda _: {"group": 1, "name": "indexer", "layer": 0},
    "keys": lambda _: LAYER,
    "keys_and_values": lambda _: LAYER,
    "latents": lambda _: {"group": 1, "layer": 0},
    "pages": lambda _: {**LAYER, "page_size": 4},
    "pool_of": lambda _: {"group": 0},
    "require_awake": lambda _: {},
    "scales": lambda _: {"group": 0},
    "sleep": idle,
    "states": lambda _: {"group": 2, "layer": 0},
    "states_of_layers": lambda _: {"group": 2},
    "values": lambda _: LAYER,
    "wake": asleep,
}
OF_CALLED_TABLES: Final[dict[str, Callable[[Setting], Arguments]]] = {
    "append_block_ids": lambda _: {"req_index": 0, "new_block_ids": [[2], [2], [2]], "overwrite": True},
    "apply_staged_writes": lambda _: {},
    "batch_table": lambda _: {"group": 0},
    "clear_row": lambda _: {"row": 0},
    "compute_slot_mappings": lambda _: {
        "idx_mapping": ROWS,
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "positions": torch.zeros(2, dtype=torch.int64),
        "num_tokens_padded": 4,
        "num_refused": torch.zeros(2, dtype=torch.int32),
    },
    "forget_steps": lambda _: {"first_step_id": 1},
    "gather_block_tables": lambda _: {"idx_mapping": ROWS, "num_reqs_padded": 3},
    "get_dummy_block_tables": lambda _: {"num_reqs": 2},
    "get_dummy_slot_mappings": lambda _: {"num_tokens": 2},
    "move_row": lambda _: {"source": 0, "destination": 1},
    "num_blocks": lambda _: {"group": 0, "row": 0},
    "page_lists": lambda _: {"group": 0, "num_rows": 1, "max_pages": 4, "numbers": PAGES},
    "page_tables": lambda _: {"group": 0, "numbers": PAGES, "num_rows": 1},
    "record_refused": lambda _: {"step_id": 1, "rows": ROWS, "counts": torch.zeros(2, dtype=torch.int32)},
    "inputs_of_all": lambda _: {"num_rows": 2, "num_tokens": 3},
    "state_blocks": lambda _: {"group": 2, "num_rows": 1},
    "state_writes": lambda _: {"group": 2, "num_rows": 1},
    "swap_rows": lambda _: {"first": 0, "second": 1},
    "table": lambda _: {"group": 0},
}
OF_TABLES: Final[dict[str, Callable[[Setting], Arguments]]] = {
    "fence": launched,
    "launch": staged,
    "require_next": lambda it: {"plan": it.plan},
    "stage": lambda it: {"plan": it.plan},
    "step": lambda it: {"plan": it.plan},
}
OF_EXECUTOR: Final[dict[str, Callable[[Setting], Arguments]]] = {
    "abort": lambda it: {"aborted": it.space.abort(it.plan.step_id)},
    "done": lambda _: {},
    "launch": lambda it: {"plan": it.plan, "forward": lambda inputs: inputs},
    "wait": lambda _: {},
}
CHECKED: Final[Arguments] = {"slot_mapping": SLOTS, "check_slots": True}
OF_TRANSFERS: Final[dict[str, Callable[[Setting], Arguments]]] = {
    "copy": lambda _: {"pool": "device", "src_ids": [1], "dst_ids": [2]},
    "gather_states": lambda _: {"group": 2, "layer": 0, "block_ids": BLOCK},
    "gather_states_of_layers": lambda _: {"group": 2, "block_ids": BLOCK},
    "reshape_and_cache": lambda _: {**LAYER, "key": KEYS, "value": KEYS, **CHECKED},
    "scatter_states": lambda _: {"group": 2, "layer": 0, "block_ids": BLOCK, "states": {"scan": torch.ones(1, 3)}},
    "swap_in": lambda _: {"pool": "device", "src_ids": [1], "dst_ids": [2]},
    "swap_out": lambda _: {"pool": "device", "src_ids": [1], "dst_ids": [2]},
    "write_companion": lambda _: {
        "group": 1,
        "name": "indexer",
        "layer": 0,
        "tokens": torch.ones(3, 4),
        **CHECKED,
    },
    "write_latents": lambda _: {"group": 1, "layer": 0, "latent": torch.ones(3, 8), **CHECKED},
    "zero": lambda _: {"pool": "device", "block_ids": [1]},
}
PLACES: Final[Arguments] = {
    "places": torch.zeros(1, dtype=torch.int64),
    "positions": torch.zeros(1, dtype=torch.int64),
}
OF_INPUTS: Final[dict[str, Callable[[Setting], Arguments]]] = {
    "padded_block_table": lambda _: {"group": 0},
    "places": lambda _: {"group": 0},
    "positions": lambda _: {"group": 0},
    "state_blocks": lambda _: {"group": 2},
    "state_writes": lambda _: {"group": 2},
    "states_behind": lambda _: {"group": 2, **PLACES},
}

TABLE: Final[dict[str, tuple[type, dict[str, Callable[[Setting], Arguments]]]]] = {
    "storage": (KVStorage, OF_STORAGE),
    "called": (BlockTables, OF_CALLED_TABLES),
    "tables": (BlockTables, OF_TABLES),
    "executor": (PlanExecutor, OF_EXECUTOR),
    "transfers": (Transfers, OF_TRANSFERS),
    "inputs": (StepInputs, OF_INPUTS),
}

BUILT: Final[dict[str, tuple[Callable[..., Any], Arguments]]] = {
    "KVStorage": (KVStorage, {"config": CONFIG, "shapes": SHAPES, "device": "cpu", "host_memory": {}, "absent": {}}),
    "BlockTables": (
        BlockTables,
        {"config": CONFIG, "max_batched_tokens": 16, "device": "cpu", "kernels": "torch", "packet_entries": 64},
    ),
    "Transfers": (Transfers, {"storage": KVStorage(CONFIG, SHAPES), "kernels": "torch"}),
    "PlanExecutor": (
        PlanExecutor,
        {
            "storage": KVStorage(CONFIG, SHAPES),
            "tables": BlockTables(CONFIG, max_batched_tokens=16),
            "transfers": None,
            "zero_new_blocks": True,
        },
    ),
    "KeyValueShape": (
        KeyValueShape,
        {
            "num_layers": 1,
            "num_heads": 1,
            "key_dim": 8,
            "value_dim": None,
            "dtype": torch.float32,
            "scaling": "tensor",
            "layout": "BLNHC",
            "companions": (),
        },
    ),
    "LatentShape": (
        LatentShape,
        {
            "num_layers": 1,
            "dim": 8,
            "dtype": torch.float32,
            "layout": "BLNC",
            "companions": (Companion("indexer", 1, 4),),
            "ratio": 2,
        },
    ),
    "Companion": (Companion, {"name": "indexer", "num_layers": 1, "dim": 4, "dtype": torch.float32, "ratio": 2}),
    "StateShape": (StateShape, {"num_layers": 1, "tensors": (StateTensor("scan", (3,)),)}),
    "StateTensor": (StateTensor, {"name": "scan", "shape": (3,), "dtype": torch.float32}),
    "free_nbytes": (free_nbytes, {"device": "cpu", "fraction": 0.5}),
    "num_blocks_that_fit": (
        num_blocks_that_fit,
        {"groups": CONFIG.groups, "shapes": SHAPES, "nbytes": 2**20, "mean_tokens": 30.0, "step_tokens": 8},
    ),
}

LARGE: Final = frozenset({"wrapped", "wrapped int64"})
FREE: Final[dict[str, dict[str, frozenset[str]]]] = {
    "forget_steps": {"first_step_id": LARGE},
    "record_refused": {"step_id": LARGE},
    "num_blocks_that_fit": {"nbytes": LARGE},
}
"""Numbers that are not kept as int32."""
RESIZING: Final = {"release", "take"}
"""Of storages with pools that change their size: tests/device/test_resizing.py."""


def test_every_public_method_and_every_parameter_has_good_arguments() -> None:
    for kind in {kind for kind, _ in TABLE.values()}:
        known = {name: good for other, by_name in TABLE.values() if other is kind for name, good in by_name.items()}
        methods = public_methods(kind)
        assert methods.keys() - (RESIZING if kind is KVStorage else set()) == known.keys()
        for name, good in known.items():
            assert good(Setting()).keys() == parameters_of(methods[name]).keys(), name
    for build, given in BUILT.values():
        assert given.keys() == parameters_of(build).keys()


def odd_calls(function: Callable[..., object], name: str) -> list[Call]:
    """Give every call with one odd argument, tensors among them."""
    is_size = {"max_pages", "max_batched_tokens", "packet_entries"}
    calls = [
        call
        for call in calls_of(function, FREE.get(name, {}))
        if call.parameter not in is_size or call.what not in {"large", "larger"}  # as much memory as they say
    ]
    return [
        *calls,
        *(
            Call(each, what, value, must_refuse=False)
            for each in parameters_of(function)
            for what, value in TENSORS.items()
        ),
    ]


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, (_, by_name) in TABLE.items() for name in by_name])
def test_promise_5_odd_arguments_get_an_error_of_ours(what: str, name: str) -> None:
    kind, by_name = TABLE[what]
    setting = Setting()
    getattr(getattr(setting, what), name)(**by_name[name](setting))
    if not parameters_of(getattr(kind, name)):
        return
    complaints = []
    setting = Setting()
    good, before = by_name[name](setting), setting.memory()
    for call in odd_calls(getattr(kind, name), name):
        if call.parameter == "forward" and callable(call.value):
            continue  # whatever it raises comes through
        answered, told = outcome(call, getattr(getattr(setting, what), name), good)
        complaints += [told] if told else []
        if answered:
            setting = Setting()
            good, before = by_name[name](setting), setting.memory()
    if not all(same_bytes(old, new) for old, new in zip(before, setting.memory(), strict=True)):
        complaints.append("something was written by a call that was refused")
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("name", BUILT)
def test_odd_arguments_build_nothing_or_raise_an_error_of_ours(name: str) -> None:
    build, good = BUILT[name]
    complaints = [told for call in odd_calls(build, name) for _, told in [outcome(call, build, good)] if told]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("what", NO_ARRAYS)
def test_block_ids_of_a_row_are_not_narrowed(what: str) -> None:
    """``[1.5]`` became block 1, and ``[True]`` as well."""
    tables = BlockTables(CONFIG, max_batched_tokens=16)
    ids: Any = NO_ARRAYS[what]
    with pytest.raises(TensorError):
        tables.append_block_ids(0, [ids, [1], [1]], overwrite=True)
    assert tables.num_blocks(0, 0) == 0
