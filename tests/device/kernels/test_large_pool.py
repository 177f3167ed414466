"""Every kernel at the end of a pool of 100 GiB, or as much as a GPU has: further than 32-bit numbers reach.

The pool is NaN but for what a test puts there, and rows of no tokens stand among the others. The interpreter has a pool
of a few MiB, in which the same tests run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from pagedkv.device.kernels import reference
from pagedkv.device.kernels.inputs import (
    AttentionTiling,
    Draws,
    Filters,
    Reading,
    StateSide,
    TokenSide,
    WorkList,
    tiling_for,
)
from pagedkv.device.kernels.selection import kernels_for
from pagedkv.device.shapes import KeyValueShape, LatentShape, Pieces
from tests.device.kernels.paged_rows import SMALL, Case, Memory, answers, make_case, work_of
from tests.device.kernels.suite import IS_INTERPRETED, KERNEL_DEVICE, needs_kernels, same_bytes

pytestmark = needs_kernels

HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16  # the interpreter's product of bfloat16 is wrong
RANGES: tuple[tuple[int, int], ...] = ((0, 0), (40, 41), (0, 9), (7, 7))
if not IS_INTERPRETED:  # of several spans, however wide these are
    RANGES = ((0, 0), (4500, 4501), (0, 90), (7, 7), (63, 64))
NAN_BYTE = 255


@pytest.fixture(scope="module")
def pool() -> Iterator[torch.Tensor]:
    """The pool: uint8, NaN in every type."""
    nbytes = 2**22
    if KERNEL_DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        nbytes = min(100 * 2**30, int(free * 0.9) // 2**20 * 2**20)
        assert nbytes > 2**34, "of four bytes, more elements than a 32-bit number counts"
    yield torch.full((nbytes,), NAN_BYTE, dtype=torch.uint8, device=KERNEL_DEVICE)
    if KERNEL_DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def end_of(pool: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The last bytes of the pool, NaN again."""
    end = pool[len(pool) // nbytes * nbytes - nbytes :][:nbytes]
    return end.fill_(NAN_BYTE)


def far(case: Case, pool: torch.Tensor) -> Case:
    """The same rows, their blocks moved to the end of the pool."""
    near, block_nbytes = case.storage.pool_of(0).device_bytes, case.storage.pool_of(0).block_nbytes
    num_blocks, num_held = len(pool) // block_nbytes, len(near) // block_nbytes
    first = num_blocks - num_held
    pool[first * block_nbytes : num_blocks * block_nbytes] = near
    whole = pool[: num_blocks * block_nbytes].view(case.memory.dtype)

    def moved(side: torch.Tensor) -> torch.Tensor:
        return whole.as_strided((num_blocks, *side.shape[1:]), side.stride(), side.storage_offset())

    layer = case.layer._replace(keys=moved(case.layer.keys), values=moved(case.layer.values))
    return replace(case, layer=layer, rows=case.rows._replace(block_tables=case.rows.block_tables + first))


def attend(case: Case, reading: Reading, tiling: AttentionTiling, *, shares: bool = False) -> torch.Tensor:
    return answered(case, work_of(case, reading, tiling, few=2, shares=shares), case.query.clone())


def answered(case: Case, work: WorkList, out: torch.Tensor) -> torch.Tensor:
    """List the work and answer it, over poison."""
    kernels = kernels_for(KERNEL_DEVICE, "triton")
    out = out[..., : case.layer.values.shape[3]].fill_(torch.nan)
    kernels.list_work(work, case.rows, case.memory.block_size)
    kernels.attend_rows(work, case.layer, case.rows, case.query, out)
    return out


def strewn(pool: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Lay some rows out over all of the pool, their elements behind one another."""
    whole = pool.view(content.dtype)
    size = content[0].numel()
    step = (len(whole) - size) // (len(content) - 1) // 16 * 16
    strides = content[:1].contiguous().stride()[1:]
    rows = whole.as_strided(content.shape, (step, *strides))
    rows.copy_(content)
    return rows


LATENT = (
    Memory(6, 1, (40, 32), 8, HALF, is_latent=True)
    if IS_INTERPRETED
    else Memory(16, 1, (576, 512), 16, HALF, is_latent=True)
)
MANY_HEADS = replace(LATENT, num_heads=20 if IS_INTERPRETED else 128)
PLAIN = Memory(4, 2, (16, 16), 8, HALF) if IS_INTERPRETED else Memory(8, 2, (128, 128), 16, HALF)
WIDE = replace(PLAIN, dtype=torch.float32)
EIGHT_BITS = replace(PLAIN, dtype=torch.float8_e4m3fn, query_dtype=torch.float16)
HEADS = PLAIN.num_heads // PLAIN.num_key_heads


@pytest.mark.parametrize(
    ("memory", "reading"),
    [
        (PLAIN, Reading(HEADS)),
        (PLAIN, Reading(HEADS, window=21, num_sink_tokens=5)),
        (PLAIN, Reading(HEADS, chunk=19)),
        (WIDE, Reading(HEADS)),
        (EIGHT_BITS, Reading(HEADS)),
        (replace(EIGHT_BITS, dtype=torch.float8_e5m2, scaling="head"), Reading(HEADS, window=21)),
        (LATENT, Reading(LATENT.num_heads)),
        (MANY_HEADS, Reading(MANY_HEADS.num_heads)),
        (replace(LATENT, dtype=torch.float8_e4m3fn, query_dtype=torch.float16), Reading(LATENT.num_heads)),
    ],
    ids=[
        "plain",
        "window",
        "chunk",
        "32 bits",
        "eight bits",
        "eight bits by head",
        "latents",
        "latents of many heads",
        "latents of eight bits",
    ],
)
def test_attention(pool: torch.Tensor, memory: Memory, reading: Reading) -> None:
    """Bit by bit what it is at the beginning of a small pool, and right."""
    case = make_case(RANGES, memory, device=KERNEL_DEVICE)
    tiling = SMALL if IS_INTERPRETED else tiling_for(case.layer, reading)
    found = attend(far(case, pool), reading, tiling)
    assert same_bytes(found, attend(case, reading, tiling))
    expected = answers(case, reading)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("layout", ["LKNBHC", "LHKBNC", "NLHKBC"])
def test_layouts_whose_tokens_and_heads_are_as_far_apart(pool: torch.Tensor, layout: str) -> None:
    """As the pool is long: written there, and read there."""
    memory, reading = PLAIN, Reading(HEADS)
    case = make_case(RANGES, memory, device=KERNEL_DEVICE)
    shape = KeyValueShape(2, memory.num_key_heads, *memory.dims, dtype=memory.dtype, layout=layout)
    moved = moved_to(pool, case, shape, [case.layer.keys, case.layer.values])
    tiling = SMALL if IS_INTERPRETED else tiling_for(case.layer, reading)
    assert same_bytes(attend(moved, reading, tiling), attend(case, reading, tiling))
    pool.fill_(NAN_BYTE)


@pytest.mark.parametrize("layout", ["LNBC", "NLBC"])
@pytest.mark.parametrize("num_heads", [LATENT.num_heads, MANY_HEADS.num_heads])
def test_such_layouts_of_latents(pool: torch.Tensor, layout: str, num_heads: int) -> None:
    case, reading = make_case(RANGES, replace(LATENT, num_heads=num_heads), device=KERNEL_DEVICE), Reading(num_heads)
    moved = moved_to(pool, case, LatentShape(2, LATENT.dims[0], dtype=HALF, layout=layout), [case.layer.keys])
    assert moved.layer.is_latent
    tiling = SMALL if IS_INTERPRETED else tiling_for(case.layer, reading)
    assert same_bytes(attend(moved, reading, tiling), attend(case, reading, tiling))
    pool.fill_(NAN_BYTE)


def moved_to(pool: torch.Tensor, case: Case, shape: KeyValueShape | LatentShape, near: Sequence[torch.Tensor]) -> Case:
    """The same rows in a pool laid out otherwise, at the end of it: their tokens are written there by the kernel.

    Args:
        shape: how the pool is laid out; near: keys, and values, where they lie now.
    """
    size, num_held = case.memory.block_size, len(near[0])
    num_blocks = len(pool) // shape.block_nbytes(size)
    first = num_blocks - num_held
    whole, far_sides = pool[: num_blocks * shape.block_nbytes(size)].view(case.memory.dtype), []
    for side, part in zip(near, shape.placement(num_blocks, size).parts, strict=True):
        strides = tuple(part.strides.get(letter, 1) for letter in "BNHC")
        extents = (num_blocks, *side.shape[1:])
        far_sides.append(whole.as_strided(extents, strides, part.offset + part.strides["L"]))
    slots = torch.arange(num_held * size, device=KERNEL_DEVICE) + first * size
    pairs = zip(near, far_sides, strict=True)
    sides = [TokenSide(side.reshape(-1, *side.shape[2:]), blocks) for side, blocks in pairs]
    kernels_for(KERNEL_DEVICE, "triton").write_tokens(sides, slots)
    for side, blocks in zip(near, far_sides, strict=True):
        assert same_bytes(blocks[first:], side)
    values = far_sides[1] if len(far_sides) > 1 else far_sides[0][..., : case.layer.values.shape[3]]
    layer = case.layer._replace(keys=far_sides[0], values=values)
    return replace(case, layer=layer, rows=case.rows._replace(block_tables=case.rows.block_tables + first))


@pytest.mark.parametrize("what", ["tables", "queries", "answers", "partial answers"])
@pytest.mark.parametrize("memory", [PLAIN, LATENT, MANY_HEADS], ids=["keys", "latents", "latents of many heads"])
def test_lists_and_answers_that_are_strewn_over_the_pool(pool: torch.Tensor, what: str, memory: Memory) -> None:
    """What kernels read beside the keys, and what they write, lies as far apart as it can."""
    reading = Reading(memory.num_heads // memory.num_key_heads)
    case = make_case(RANGES, memory, device=KERNEL_DEVICE)
    tiling = SMALL if IS_INTERPRETED else replace(tiling_for(case.layer, reading), span_tiles=1, most_spans=4)
    work, out = work_of(case, reading, tiling, few=2), case.query.clone()
    expected = answered(case, work, out).clone()
    if what == "tables":
        case = replace(case, rows=case.rows._replace(block_tables=strewn(pool, case.rows.block_tables)))
    elif what == "queries":
        case = replace(case, query=strewn(pool, case.query))
    elif what == "answers":
        out = strewn(pool, out)
    else:
        work.partials, work.sums = widened(pool, work)
    assert same_bytes(answered(case, work, out), expected)
    if memory is not PLAIN:  # the last program that reads keys for a row merges its answers
        assert work.counts[2] > 0, "nothing was merged"
    pool.fill_(NAN_BYTE)


def widened(pool: torch.Tensor, work: WorkList) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial answers, and their sums, of so many rows that they take all of the pool."""
    _, num_heads, value_dim = work.partials.shape
    whole = pool.view(torch.float32)
    slots = work.chunk_base // work.few_rows
    own = work.max_places * work.chunk_partials
    num_rows = (len(whole) // (num_heads * (value_dim + 1)) - own) // slots
    work.few_rows, work.chunk_base = num_rows, slots * num_rows
    num_parts = (slots * num_rows + own) * num_heads
    partials = whole[: num_parts * value_dim].view(-1, num_heads, value_dim)
    return partials, whole[num_parts * value_dim :][:num_parts].view(-1, num_heads)


def test_scores_and_noise_that_are_strewn_over_the_pool(pool: torch.Tensor) -> None:
    """Thresholds, tokens and words are those of rows that stand behind one another."""
    num_rows, num_tokens = 5, 600 if IS_INTERPRETED else 9000
    kernels = kernels_for(KERNEL_DEVICE, "triton")
    near = torch.randn(num_rows, num_tokens).to(KERNEL_DEVICE)
    numbers, ones = torch.arange(num_rows, device=KERNEL_DEVICE), torch.ones(num_rows, device=KERNEL_DEVICE)
    filters = Filters(ones, numbers * 9, (ones * 0.9).double(), ones * 0.01)
    both = []
    for scores in (near, strewn(pool, near)):
        least, tokens, greatest = ones * torch.nan, numbers * 0 - 9, ones * torch.nan
        kernels.find_least(filters, scores, least)
        kernels.draw_tokens(Draws(ones, least, numbers, numbers, numbers), scores, tokens, greatest)
        both.append((least, tokens, greatest))
    assert all(map(same_bytes, *both))
    assert not both[0][0].isnan().any()
    words = torch.zeros(num_rows, num_tokens, dtype=torch.int64, device=KERNEL_DEVICE)
    draws = Draws(ones, least, numbers, numbers, numbers)
    kernels.noise_words(draws, 3, words)
    far_words = strewn(pool, words * 0)
    kernels.noise_words(draws, 3, far_words)
    assert torch.equal(far_words, words)
    pool.fill_(NAN_BYTE)


def test_shared_prefixes(pool: torch.Tensor) -> None:
    ranges, reading = ((90, 91), (64, 65), (7, 7), (100, 101), (65, 66)), Reading(HEADS)
    case = make_case(ranges, PLAIN, device=KERNEL_DEVICE, shared=64)
    found = attend(far(case, pool), reading, SMALL, shares=True)
    assert same_bytes(found, attend(case, reading, SMALL, shares=True))
    torch.testing.assert_close(found.cpu().double(), answers(case, reading), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("layout", ["BLKNHC", "LBKNHC"])
def test_blocks_are_copied_and_zeroed(pool: torch.Tensor, layout: str) -> None:
    shape = KeyValueShape(2, 2, 64, dtype=torch.bfloat16, layout=layout)
    num_blocks = len(pool) // shape.block_nbytes(16)
    pieces = shape.pieces(num_blocks, 16)
    kernels = kernels_for(KERNEL_DEVICE, "triton")
    source, target, other = num_blocks - 1, num_blocks - 3, num_blocks // 2
    content = [torch.randint(256, (size,), dtype=torch.uint8, device=KERNEL_DEVICE) for size in pieces.sizes]
    for view, octets in zip(views_of(pool, pieces, source), content, strict=True):
        view.copy_(octets)
    ids = [torch.tensor([each], dtype=torch.int32, device=KERNEL_DEVICE) for each in (source, target, other)]
    kernels.copy_blocks(pool, pieces, ids[0], pool, pieces, ids[1])
    kernels.copy_blocks(pool, pieces, ids[1], pool, pieces, ids[2])
    for block in (target, other):
        assert all(map(torch.equal, views_of(pool, pieces, block), content))
    kernels.zero_blocks(pool, pieces, ids[0])
    assert not any(view.any() for view in views_of(pool, pieces, source))
    assert all(map(torch.equal, views_of(pool, pieces, target), content)), "nothing but the block is zeroed"
    for block in (source, target, other):
        for view in views_of(pool, pieces, block):
            view.fill_(NAN_BYTE)


def views_of(pool: torch.Tensor, pieces: Pieces, block: int) -> list[torch.Tensor]:
    """The pieces of a block."""
    return [
        pool[offset + block * stride :][:size]
        for offset, size, stride in zip(pieces.offsets, pieces.sizes, pieces.strides, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_tokens_are_written(pool: torch.Tensor, dtype: torch.dtype) -> None:
    """Padding goes nowhere, not even to the end."""
    num_heads, dim, size = 2, 64, 16
    block_nbytes = size * num_heads * dim * dtype.itemsize
    num_blocks = len(pool) // block_nbytes
    end = end_of(pool, 4 * block_nbytes)
    blocks = pool[: num_blocks * block_nbytes].view(dtype).view(num_blocks, size, num_heads, dim)
    tokens = torch.randint(-8, 9, (3, num_heads, dim)).bfloat16().to(KERNEL_DEVICE)
    last = num_blocks * size - 1
    slots = torch.tensor([last, -1, last - size], device=KERNEL_DEVICE)
    scales = torch.ones(num_heads, device=KERNEL_DEVICE) if dtype.itemsize == 1 else None
    kernels_for(KERNEL_DEVICE, "triton").write_tokens([TokenSide(tokens, blocks, scales)], slots)
    small = torch.full((4, size, num_heads, dim * dtype.itemsize), NAN_BYTE, dtype=torch.uint8).view(dtype)
    plain = TokenSide(tokens.cpu(), small, None if scales is None else scales.cpu())
    reference.write_tokens([plain], torch.tensor([4 * size - 1, -1, 4 * size - 1 - size]))
    assert same_bytes(end.view(dtype), small.flatten())


def test_states_are_read_and_written(pool: torch.Tensor) -> None:
    size = 2**12 if IS_INTERPRETED else 2**20
    whole = pool[: len(pool) // (2 * size) * 2 * size].view(torch.bfloat16).view(-1, 1, size)
    ids = torch.tensor([len(whole) - 1, 0, len(whole) // 2], dtype=torch.int32, device=KERNEL_DEVICE)
    rows = torch.randn(1, 3, size, device=KERNEL_DEVICE).bfloat16()
    kernels = kernels_for(KERNEL_DEVICE, "triton")
    kernels.write_states([StateSide(whole, rows)], ids)
    assert same_bytes(whole[ids[[0, 2]].long(), 0], rows[0, [0, 2]])
    read = torch.empty_like(rows)
    kernels.read_states([StateSide(whole, read)], ids)
    assert same_bytes(read[0, [0, 2]], rows[0, [0, 2]])
    assert not read[0, 1].any(), "a sequence that begins has zeros"
    whole[ids.long(), 0] = torch.nan
