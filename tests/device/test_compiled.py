"""Every kernel compiles for GPUs that are not there: Hopper, and Ampere but for e4m3, which it does not have."""

import os
from itertools import product
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402 - Triton has no public name for it

from pagedkv.device.kernels.inputs import PagedLayer, Reading, tiling_for  # noqa: E402
from pagedkv.device.kernels.triton import (  # noqa: E402
    blocks,
    calls,
    decoding,
    drawing,
    filtering,
    latents,
    lists,
    merging,
    packets,
    prompting,
    states,
    tables,
    tokens,
)
from tests.choosing import long_but  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

HOPPER, AMPERE = 90, 80
SHARED_NBYTES = 227 * 1024
"""What a program may have of a multiprocessor's shared memory, on Hopper."""
WIDE = ("clock", "geometry", "run_stamps", "place_stamps", "changed", "held_stamps", "sample_steps", "slots", "pieces")
SIZES: dict[str, int] = {
    "num_tables": 4, "num_buffers": 4, "buffer_words": 65_536, "max_rows": 1024, "max_tokens": 8192, "depth": 8,
    "draft_line": 108, "ROW_TILE": 1024, "COPY_PROGRAMS": 24, "COPY_TILE": 1024, "ENTRY_PROGRAMS": 8,
    "PLACE_PROGRAMS": 256, "TOKEN_PROGRAMS": 16, "ENTRY_TILE": 512, "PLACES": 4, "PLACE_TILE": 512, "TOKEN_TILE": 512,
    "WRITES_ONLY": 0, "TILE": 512, "UNIT": 16, "CHUNK": 32_768, "num_heads": 8, "block_size": 16, "scale_step": 0,
    "NUM_SIDES": 2,
    "IS_SCALED": 0, "HEAD_TILE": 8, "DIM_TILE": 128,
}  # fmt: skip
NUMBERS = {"compute_line", "unknown_line", "num_rows", "num_tokens", "num_positions", "num_slots", "dim", "other_dim"}
STRIDES = ("token_", "block_b", "block_n", "block_h", "block_c", "other_n", "other_h", "other_c", "other_block_")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton 3.6 may convert as the GPU does that is there")
TABLE_KERNELS = (
    packets._pull_kernel,
    tables._step_kernel,
    calls._gather_kernel,
    calls._slots_kernel,
)


@pytest.fixture(autouse=True)
def _fusion_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 warns where no option states whether products and sums may be fused; our kernels have none to fuse."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def compiled(kernel: Any, capability: int, types: dict[str, str], **constants: Any) -> str:  # noqa: ANN401 - Triton's
    """Compile a kernel; return its assembly."""
    constants = {name: SIZES.get(name) for name in kernel.arg_names if name in SIZES} | constants
    constants |= {name: capability >= HOPPER for name in kernel.arg_names if name == "OVERLAPS"}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    ptx: str = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    return ptx


def table_types(kernel: Any) -> dict[str, str]:  # noqa: ANN401 - Triton's
    return {
        name: "i32" if name in NUMBERS else "*i64" if name in {*WIDE, "positions"} else "*i32"
        for name in kernel.arg_names
    }


@pytest.mark.parametrize("capability", long_but((HOPPER,), (HOPPER, AMPERE)))
@pytest.mark.parametrize("kernel", TABLE_KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_table_kernels_compile(kernel: Any, capability: int) -> None:  # noqa: ANN401 - Triton's
    assert f"sm_{capability}" in compiled(kernel, capability, table_types(kernel))


@pytest.mark.parametrize("capability", long_but((AMPERE,), (HOPPER, AMPERE)))
@pytest.mark.parametrize("kernel", [blocks._copy_kernel, blocks._zero_kernel], ids=lambda kernel: kernel.fn.__name__)
def test_block_kernels_compile(kernel: Any, capability: int) -> None:  # noqa: ANN401 - Triton's
    types = {name: "*i64" if name == "pieces" else "*i32" for name in kernel.arg_names}
    assert f"sm_{capability}" in compiled(kernel, capability, types)


@pytest.mark.parametrize(
    ("words", "capability", "to_blocks"),
    long_but(
        [("u8", HOPPER, False), ("i16", AMPERE, True), ("i32", HOPPER, True), ("i64", AMPERE, False)],
        product(("u8", "i16", "i32", "i64"), (HOPPER, AMPERE), (False, True)),
    ),
)
def test_states_are_copied_in_words_of_every_size(words: str, capability: int, to_blocks: bool) -> None:  # noqa: FBT001
    types = {"blocks": f"*{words}", "rows": f"*{words}", "block_ids": "*i32", "size": "i32"}
    types |= dict.fromkeys(("block_b", "block_l", "row_l", "row_n"), "i64")
    assert f"sm_{capability}" in compiled(states._copy_kernel, capability, types, TO_BLOCKS=to_blocks, CHUNK=4096)


@pytest.mark.parametrize(
    ("capability", "stored"),
    [
        (HOPPER, "bf16"),
        (HOPPER, "fp8e4nv"),
        (HOPPER, "fp8e5"),
        (AMPERE, "bf16"),
        pytest.param(AMPERE, "fp8e5", marks=NO_GPU),
    ],
)
def test_tokens_are_written_in_every_type_that_the_gpu_has(capability: int, stored: str) -> None:
    is_small = stored.startswith("fp8")
    kernel = tokens._write_kernel
    types = dict.fromkeys(kernel.arg_names, "i64")
    types |= {"tokens": "*bf16", "others": "*bf16", "blocks": f"*{stored}", "other_blocks": f"*{stored}"}
    types |= {"slots": "*i64"}
    types |= dict.fromkeys(("scales", "other_scales"), "*fp32" if is_small else f"*{stored}")
    largest = torch.finfo(torch.float8_e4m3fn).max if stored == "fp8e4nv" else torch.finfo(torch.float8_e5m2).max
    ptx = compiled(kernel, capability, types, IS_SCALED=is_small, LARGEST=largest if is_small else 0.0)
    assert f"sm_{capability}" in ptx


ATTENTION: dict[str, Any] = {
    "num_key_heads": 8, "HEADS_OF_KEY": 4, "HEAD_PARTS": 1, "HEAD_TILE": 4, "TILE_TOKENS": 4, "ROWS": 16,
    "KEY_TILE": 64, "WINDOW": 0, "CHUNK": 0, "SINK_TOKENS": 0, "BLOCK_SIZE": 16, "IS_FAR": False, "KEY_DIM": 128,
    "DIM": 128, "REST": 0, "VALUE_DIM": 128, "VALUE_TILE": 128, "IS_LATENT": False, "HAS_CAP": False,
    "HAS_SINKS": False, "IS_SCALED": False, "scale_step": 0,
    "PRECISION": "tf32", "ARE_PAIRS": False, "MERGED": 2048, "ARE_ALIKE": True, "num_heads": 32,
    "SLOT_TILE": 8, "PLACES": 1024, "FEW": 1, "SPAN_TILES": 4, "MOST_SPANS": 32, "ITEM_TOKENS": 32, "ITEM_KEYS": 64,
    "SHARED_SPAN": 512, "BY_ITEMS": False, "RANK_TILE": 16, "TILE": 128, "LEAST": 1024, "UNIT": 128,
}  # fmt: skip
LATENT = {
    "num_key_heads": 1, "HEADS_OF_KEY": 16, "HEAD_TILE": 16, "TILE_TOKENS": 1, "KEY_TILE": 32, "KEY_DIM": 576,
    "DIM": 512, "REST": 64, "VALUE_DIM": 512, "VALUE_TILE": 512, "IS_LATENT": True,
}  # fmt: skip
EVERYTHING = {
    "WINDOW": 1000,
    "SINK_TOKENS": 4,
    "HAS_CAP": True,
    "HAS_SINKS": True,
    "KEY_DIM": 96,
    "DIM": 64,
    "REST": 32,
}
EIGHT_BITS = {"IS_SCALED": True, "stored": "fp8e4nv"}


def attention_types(kernel: Any, stored: str, *, are_pairs: bool) -> dict[str, str]:  # noqa: ANN401 - Triton's
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("scale", "soft_cap"), "fp32")
    types |= dict.fromkeys(("partials", "sums", "key_scales", "value_scales"), "*fp32")
    types |= dict.fromkeys(("query", "out", "sinks"), "*bf16")
    types |= {"keys": f"*{stored}", "values": "*i16" if are_pairs else f"*{stored}"}
    pointers = (
        "tables",
        "tiles",
        "items",
        "counts",
        "merges",
        "starts",
        "finished",
        "shares_begin",
        "cut",
        "seq_lens",
        "offsets",
        "shared",
        "common",
    )
    return types | dict.fromkeys(pointers, "*i32")


@pytest.mark.parametrize(
    ("kernel", "changed"),
    [
        (decoding._tiles_kernel, {}),
        (decoding._tiles_kernel, EVERYTHING),
        (decoding._tiles_kernel, EIGHT_BITS | {"ARE_PAIRS": True}),
        (prompting._items_kernel, {"ROWS": 128}),
        (prompting._items_kernel, EVERYTHING | {"ROWS": 64}),
        (prompting._items_kernel, LATENT),
        (prompting._items_kernel, EIGHT_BITS | {"ROWS": 64}),
        (merging._merge_kernel, {"HAS_SINKS": True}),
        (lists._list_kernel, {}),
        (lists._common_kernel, {}),
        (lists._shared_kernel, {}),
    ],
    ids=lambda each: each.fn.__name__ if hasattr(each, "fn") else " ".join(each) or "plain",
)
def test_attention_kernels_compile(kernel: Any, changed: dict[str, Any]) -> None:  # noqa: ANN401 - Triton's
    constants = {**ATTENTION, **changed}
    stored = constants.pop("stored", "bf16")
    types = attention_types(kernel, stored, are_pairs=constants["ARE_PAIRS"])
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    assert "sm_90" in compiled(kernel, HOPPER, types, **constants)


@pytest.mark.parametrize("dims", [(576, 576), (576, 512), (256, 256)], ids=str)
@pytest.mark.parametrize("kernel", [decoding._tiles_kernel, prompting._items_kernel], ids=lambda each: each.fn.__name__)
def test_what_is_chosen_for_wide_heads_fits_into_shared_memory(kernel: Any, dims: tuple[int, int]) -> None:  # noqa: ANN401
    keys, values = (torch.empty(1, 16, 2, dim, dtype=torch.bfloat16) for dim in dims)
    layer, reading = PagedLayer(keys, values, 0.1), Reading(4)
    cut, (key_dim, value_dim) = tiling_for(layer, reading), dims
    dim = 1 << key_dim.bit_length() - 1
    is_of_tiles = kernel is decoding._tiles_kernel
    constants = ATTENTION | {
        "KEY_TILE": cut.key_tile if is_of_tiles else cut.query_keys, "ROWS": 16 if is_of_tiles else cut.query_rows,
        "KEY_DIM": key_dim, "DIM": dim, "REST": key_dim - dim, "VALUE_DIM": value_dim,
        "VALUE_TILE": triton.next_power_of_2(value_dim), "ARE_ALIKE": key_dim == value_dim, "OVERLAPS": True,
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = attention_types(kernel, "bf16", are_pairs=False)
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    even = [name for name in kernel.arg_names if types[name] not in {"fp32", "constexpr"} and name not in constants]
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    options = {
        "num_warps": cut.warps if is_of_tiles else cut.query_warps,
        "num_stages": cut.stages if is_of_tiles else cut.query_stages,
    }
    made = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)
    assert 0 < made.metadata.shared <= SHARED_NBYTES


@pytest.mark.parametrize(
    ("dtype", "is_far", "value_dim"),
    long_but(
        [("bf16", False, 512), ("fp16", False, 256), ("bf16", True, 512)],
        [(*each, dim) for each in (("bf16", False), ("fp16", False), ("bf16", True)) for dim in (256, 512)],
    ),
)
def test_latents_of_many_heads_compile_for_hopper(dtype: str, value_dim: int, is_far: bool) -> None:  # noqa: FBT001
    """Products are those of groups of warps, copies do not pass through registers, and all fits into shared memory."""
    kernel = latents.latent_kernel
    constants = {
        "NUM_HEADS": 128,
        "HEAD_PARTS": 2,
        "HEAD_TILE": 64,
        "BLOCK_SIZE": 16,
        "IS_FAR": is_far,
        "DIM": value_dim,
    }
    types = attention_types(kernel, dtype, are_pairs=False)
    types |= dict.fromkeys(("query", "latents", "out"), f"*{dtype}")
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    strides = ("query_n", "query_h", "key_b", "key_n", "out_n", "out_h", "table_n")
    aligned = [name for name in kernel.arg_names if types[name].startswith("*") or name in strides]
    source = GluonASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options={"num_warps": latents.WARPS})
    assert "wgmma.mma_async" in made.asm["ptx"]
    assert "cp.async.cg.shared.global" in made.asm["ptx"]
    assert made.metadata.shared <= SHARED_NBYTES


@pytest.mark.parametrize(
    ("capability", "is_one"), long_but([(HOPPER, False), (AMPERE, True)], product((HOPPER, AMPERE), (False, True)))
)
@pytest.mark.parametrize(
    "kernel", [drawing._words_kernel, drawing._bound_kernel, drawing._pick_kernel, filtering._least_kernel]
)
def test_draws_compile(kernel: Any, capability: int, is_one: bool) -> None:  # noqa: ANN401, FBT001 - Triton's
    """Triton takes an argument that is 1 for a constant, which has no methods."""
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("seeds", "samples", "positions", "out"), "*i64")
    types |= dict.fromkeys(("temperatures", "least", "greatest", "bounds", "tops"), "*fp32")
    types |= {"scores": "*bf16", "top_k": "*i64", "top_p": "*fp64", "min_p": "*fp32"}
    if kernel is filtering._least_kernel:
        types |= {"out": "*fp32", "kept": "*fp32"}
    sizes = {"TILE": 1024, "TILES": 128, "ROOM": 2048}
    sizes = {name: value for name, value in sizes.items() if name in kernel.arg_names}
    if is_one:
        sizes |= {name: 1 for name in kernel.arg_names if types[name] == "i32" and name not in sizes}
    assert f"sm_{capability}" in compiled(kernel, capability, types, **sizes)
