"""Attention over blocks: both kinds of kernels against softmax written out, on ragged and boundary rows among NaN."""

from dataclasses import replace
from typing import Literal, TypeAlias

import pytest
import torch

from pagedkv.device.kernels import reference
from pagedkv.device.kernels.inputs import AttentionTiling, PagedRows, Reading, WorkList, tiling_for
from pagedkv.device.kernels.selection import kernels_for
from pagedkv.device.shapes import FP8_TYPES
from tests.device.kernels.paged_rows import SMALL, Case, Memory, answers, make_case, work_of
from tests.device.kernels.suite import IS_INTERPRETED, KERNEL_DEVICE, needs_kernels, same_bytes

pytest.importorskip("triton")
from pagedkv.device.kernels.triton import latents

pytestmark = needs_kernels

Ranges: TypeAlias = tuple[tuple[int, int], ...]

RAGGED: Ranges = ((0, 1), (30, 31), (7, 7), (3, 20), (48, 50), (40, 50), (16, 17))
DECODING: Ranges = ((0, 1), (85, 86), (5, 5), (15, 16))
if not IS_INTERPRETED:  # which takes a second where a GPU takes a microsecond
    RAGGED = (*RAGGED, (0, 5), (3, 40), (60, 61), (12, 16), (15, 16), (99, 101), (0, 33), (100, 112), (41, 48))
    DECODING = (*DECODING, (16, 17), (63, 64), (0, 0))
READINGS = {
    "plain": Reading(2),
    "window": Reading(2, window=21),
    "window of one": Reading(2, window=1),
    "wide window": Reading(2, window=200),
    "window and sink tokens": Reading(2, window=21, num_sink_tokens=5),
    "many sink tokens": Reading(2, window=7, num_sink_tokens=35),
    "chunk": Reading(2, chunk=24),
    "chunk across tiles": Reading(2, chunk=19),
}
SOME_READINGS = ["plain", "window and sink tokens", "chunk across tiles"] if IS_INTERPRETED else list(READINGS)
SIZES_OF_HEADS = (
    *((32, 32), (64, 64), (80, 80), (96, 128), (128, 128), (192, 128)),
    *((256, 256), (320, 64), (512, 512), (576, 512), (576, 576), (64, 576)),
)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16  # the interpreter's product of bfloat16 is wrong


def answer(case: Case, work: WorkList, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Answer by Triton's kernels, over poison; tokens of no row follow."""
    kernels = kernels_for(KERNEL_DEVICE, "triton")
    out = torch.full((len(case.query) + 2, *case.query.shape[1:2], work.partials.shape[2]), torch.nan)
    out = out.to(case.query)
    for array in (work.partials, work.sums):
        array.fill_(torch.nan)
    kernels.list_work(work, case.rows, case.memory.block_size)
    kernels.attend_rows(work, case.layer, case.rows, case.query, out, sinks)
    assert out[len(case.query) :].isnan().all(), "tokens of no row were written"
    assert not work.finished.any(), "the next layer would begin to count from there"
    return out[: len(case.query)]


def require_close(found: torch.Tensor, expected: torch.Tensor, *, times: float = 1.0) -> None:
    tolerance = TOLERANCE[found.dtype] * times
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def require_right(case: Case, reading: Reading, *, few: int = 1, sinks: torch.Tensor | None = None) -> None:
    """Both kinds of kernels answer as the softmax that is written out."""
    expected, work = answers(case, reading, sinks), work_of(case, reading, few=few)
    require_close(answer(case, work, sinks), expected)
    plain = torch.full((*expected.shape,), torch.nan).to(case.query)
    reference.attend_rows(work, case.layer, case.rows, case.query, plain, sinks)
    require_close(plain, expected)


@pytest.mark.parametrize("ranges", [RAGGED, DECODING], ids=["ragged", "decoding"])
@pytest.mark.parametrize("name", READINGS)
def test_each_reading(name: str, ranges: Ranges) -> None:
    require_right(make_case(ranges, Memory(), device=KERNEL_DEVICE), READINGS[name], few=2)


def test_a_row_has_the_same_bits_whichever_program_merges_it() -> None:
    num_rows, length, times = (3, 70, 2) if IS_INTERPRETED else (97, 1040, 100)
    reading, memory = Reading(4), Memory(32, 8, (128, 128), 16, HALF)
    ranges = tuple((length + n % 40 - 1, length + n % 40) for n in range(num_rows))
    case = make_case(ranges, memory, device=KERNEL_DEVICE)
    work = work_of(case, reading, tiling_for(case.layer, reading, 2))
    kernels = kernels_for(KERNEL_DEVICE, "triton")
    kernels.list_work(work, case.rows, memory.block_size)
    shape = times, num_rows, memory.num_heads, memory.dims[1]
    answers = torch.full(shape, torch.nan, device=KERNEL_DEVICE)  # in float32, which shows every bit
    for out in answers:
        kernels.attend_rows(work, case.layer, case.rows, case.query, out)
    assert torch.equal(answers, answers[:1].expand_as(answers))


@pytest.mark.parametrize("name", ["plain", "window and sink tokens"])
@pytest.mark.parametrize("few", [3] if IS_INTERPRETED else [1, 3, 40])
def test_drafts_and_short_chunks_are_cut_along_their_keys_or_not(name: str, few: int) -> None:
    require_right(make_case(RAGGED, Memory(), device=KERNEL_DEVICE), READINGS[name], few=few)


@pytest.mark.parametrize("ranges", [RAGGED, DECODING], ids=["ragged", "decoding"])
@pytest.mark.parametrize("soft_cap", [0.0, 0.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_soft_caps_and_learnt_sinks(ranges: Ranges, soft_cap: float, has_sinks: bool) -> None:  # noqa: FBT001
    case = make_case(ranges, Memory(), device=KERNEL_DEVICE)
    case = replace(case, layer=case.layer._replace(soft_cap=soft_cap))
    sinks = torch.linspace(-2, 3, 4).to(KERNEL_DEVICE) if has_sinks else None
    require_right(case, Reading(2, window=21), sinks=sinks)
    require_right(case, Reading(2), sinks=sinks)


@pytest.mark.parametrize(
    "memory",
    [
        Memory(1, 1, (3, 5), 1),
        Memory(6, 2, (24, 8), 3),
        Memory(6, 1, (40, 16), 16),
        Memory(4, 4, (80, 80), 40),
        Memory(71, 1, (16, 16), 8),
        Memory(12, 2, (96, 64), 256),
        Memory(4, 1, (192, 128), 8, HALF),
        Memory(2, 1, (256, 256), 8, HALF),
    ],
    ids=str,
)
def test_any_heads_dimensions_and_blocks(memory: Memory) -> None:
    ranges = ((0, 1), (30, 31), (17, 21), (7, 7), (0, 20))
    case = make_case(ranges, memory, device=KERNEL_DEVICE)
    require_right(case, Reading(memory.num_heads // memory.num_key_heads), few=2)


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "LBKNHC", "LKBHNC"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16]), ids=str
)
def test_any_layout(layout: str, dtype: torch.dtype) -> None:
    require_right(make_case(RAGGED, Memory(dtype=dtype, layout=layout), device=KERNEL_DEVICE), Reading(2))


@pytest.mark.parametrize("scaling", ["tensor", "head"])
@pytest.mark.parametrize("dtype", FP8_TYPES, ids=str)
@pytest.mark.parametrize("name", SOME_READINGS)
def test_eight_bits(scaling: Literal["tensor", "head"], dtype: torch.dtype, name: str) -> None:
    memory = Memory(dtype=dtype, scaling=scaling, query_dtype=torch.float16)
    require_right(make_case(RAGGED, memory, device=KERNEL_DEVICE), READINGS[name])


def test_eight_bits_with_a_soft_cap_and_learnt_sinks() -> None:
    memory = Memory(dtype=torch.float8_e4m3fn, scaling="head", query_dtype=torch.float16)
    case = make_case(RAGGED, memory, device=KERNEL_DEVICE)
    case = replace(case, layer=case.layer._replace(soft_cap=0.5))
    require_right(case, Reading(2), sinks=torch.linspace(-2, 3, 4).to(KERNEL_DEVICE))


@pytest.mark.parametrize("num_heads", [4, 40])
def test_latents_of_eight_bits(num_heads: int) -> None:
    """Keys and values are the same bytes, and have the same scale."""
    memory = Memory(num_heads, 1, (40, 32), dtype=torch.float8_e4m3fn, is_latent=True, query_dtype=torch.float16)
    case = make_case(RAGGED, memory, device=KERNEL_DEVICE)
    assert case.layer.key_scales is not None
    require_right(case, Reading(num_heads), few=2)


def test_latents_whose_values_do_not_fill_a_tile() -> None:
    """They are read twice, as keys and as values."""
    case = make_case(RAGGED, Memory(4, 1, (40, 24), is_latent=True), device=KERNEL_DEVICE)
    assert case.layer.is_latent
    assert not case.layer.is_read_once
    require_right(case, Reading(4), few=2)


@pytest.mark.parametrize(("num_heads", "dims"), [(16, (40, 32)), (40, (40, 32)), (5, (72, 64)), (4, (24, 24))])
@pytest.mark.parametrize("few", [1, 2])
def test_latents(num_heads: int, dims: tuple[int, int], few: int) -> None:
    """Values are the latents' first dimensions; with many heads rows that decode are items."""
    memory = Memory(num_heads, 1, dims, 8, is_latent=True)
    case = make_case(RAGGED, memory, device=KERNEL_DEVICE)
    assert case.layer.is_latent
    require_right(case, Reading(num_heads), few=few)


def test_what_a_window_left_is_not_read() -> None:
    """Null blocks stand where the window moved on; this one is NaN."""
    case = make_case(((50, 51), (33, 64)), Memory(), device=KERNEL_DEVICE, first_kept=24)
    require_right(case, Reading(2, window=9))


def test_queries_and_answers_of_any_strides() -> None:
    case = make_case(RAGGED, Memory(), device=KERNEL_DEVICE)
    wide = torch.randn(4, len(case.query), 40, device=KERNEL_DEVICE)
    case = replace(case, query=wide.transpose(0, 1)[:, :, 8:24])
    require_right(case, Reading(2))


@pytest.mark.parametrize("name", SOME_READINGS)
@pytest.mark.parametrize("few", [2] if IS_INTERPRETED else [1, 4])
def test_a_rows_answer_does_not_depend_on_the_others(name: str, few: int) -> None:
    """Bit by bit, for rows that decode and prompts alike."""
    reading = READINGS[name]
    case = make_case(RAGGED, Memory(dtype=HALF), device=KERNEL_DEVICE)
    together = answer(case, work_of(case, reading, few=few))
    for place, (start, stop) in enumerate(RAGGED):
        if start < stop:
            token = int(case.rows.query_start_loc[place])
            alone = case.alone(place)
            found = answer(alone, work_of(alone, reading, few=few))
            assert same_bytes(found, together[token : token + stop - start]), (start, stop)


@pytest.mark.parametrize("few", [1, 3])
def test_steps_without_chunks_need_no_other_kernel(few: int) -> None:
    """What rows of few queries answer is the same, bit by bit, whether the kernels of chunks are launched or not."""
    ranges = ((85, 85 + few), (0, 1), (5, 5), (126, 126 + few), (15, 16))
    case = make_case(ranges, Memory(), device=KERNEL_DEVICE)
    work, kernels = work_of(case, Reading(2), few=few), kernels_for(KERNEL_DEVICE, "triton")
    expected, out = answer(case, work), torch.full_like(case.query, torch.nan)
    kernels.attend_rows(work, case.layer, case.rows, case.query, out, has_prompts=False)
    assert same_bytes(out, expected)
    assert work.counts[2] == 0, "nothing is left to merge"


def test_a_list_serves_other_steps() -> None:
    """Lists and partial answers are overwritten, nothing of a longer step shows in a shorter one."""
    long = make_case(RAGGED, Memory(), device=KERNEL_DEVICE)
    work = work_of(long, Reading(2), few=2)
    answer(long, work)
    short = make_case(DECODING, Memory(), device=KERNEL_DEVICE, seed=1)
    require_close(answer(short, work), answers(short, Reading(2)))


SHARING = ((90, 91), (64, 65), (100, 101), (65, 66), (3, 9), (70, 71), (80, 81), (64, 64), (66, 67))


@pytest.mark.parametrize("num_heads", [16] if IS_INTERPRETED else [4, 16, 2])
@pytest.mark.parametrize("shared", [32, 64] if IS_INTERPRETED else [0, 24, 32, 64])
def test_a_shared_prefix_is_read_once(num_heads: int, shared: int) -> None:
    case = make_case(SHARING, Memory(num_heads, 2), device=KERNEL_DEVICE, shared=shared)
    work, reading = work_of(case, Reading(num_heads // 2), shares=True), Reading(num_heads // 2)
    require_close(answer(case, work), answers(case, reading))
    told = work.shared[: len(SHARING)].tolist()
    common = shared if shared >= 2 * SMALL.shared_span else 0
    expected = [[common, 4], *[[common, 0]] * 3, [0, 0], [common, 2], [common, 0], [0, 0], [0, 0]]
    assert told == (expected if common else [[0, 0]] * 9)


@pytest.mark.parametrize("name", ["window", "window and sink tokens", "chunk"])
@pytest.mark.parametrize("few", [1, 4])
def test_each_reading_shows(name: str, few: int) -> None:
    """Negative control: without it the answer is another one."""
    case = make_case(RAGGED, Memory(), device=KERNEL_DEVICE)
    with_it = answer(case, work_of(case, READINGS[name], few=few)).cpu().double()
    assert not torch.allclose(with_it, answers(case, READINGS["plain"]), rtol=1e-2, atol=1e-2)
    if name == "window and sink tokens":
        assert not torch.allclose(with_it, answers(case, READINGS["window"]), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("ranges", [DECODING, ((3, 40),)], ids=["decoding", "prompt"])
def test_soft_cap_and_sinks_show(ranges: Ranges) -> None:
    """Negative control, as above."""
    case = make_case(ranges, Memory(), device=KERNEL_DEVICE)
    plain = answer(case, work_of(case, Reading(2)))
    capped = replace(case, layer=case.layer._replace(soft_cap=0.5))
    sinks = torch.linspace(1, 3, 4).to(KERNEL_DEVICE)
    for other in (
        answer(capped, work_of(case, Reading(2))),
        answer(case, work_of(case, Reading(2)), sinks),
    ):
        assert not torch.allclose(plain, other, rtol=1e-2, atol=1e-2)


def rows_of(ranges: Ranges, width: int) -> PagedRows:
    starts = torch.tensor([start for start, _ in ranges]).int()
    stops = torch.tensor([stop for _, stop in ranges]).int()
    offsets = torch.cat([torch.zeros(1), (stops - starts).cumsum(0)]).int()
    tables = torch.zeros(len(ranges), width, dtype=torch.int32)
    return PagedRows(*(array.to(KERNEL_DEVICE) for array in (tables, starts, stops, offsets)))


@pytest.mark.parametrize("heads_of_key", [4, 40])
@pytest.mark.parametrize("name", SOME_READINGS)
@pytest.mark.parametrize("shares", [True] if IS_INTERPRETED else [False, True])
def test_lists_are_the_plain_ones(name: str, heads_of_key: int, shares: bool) -> None:  # noqa: FBT001
    reading = replace(READINGS[name], heads_of_key=heads_of_key)
    ranges = (*RAGGED, (499, 500), *SHARING)
    both = [
        WorkList(
            reading,
            max_places=32,
            max_tokens=200,
            max_length=512,
            num_heads=heads_of_key,
            value_dim=16,
            few_queries=5,
            shares=shares,
            tiling=SMALL,
            device=KERNEL_DEVICE,
        )
        for _ in range(2)
    ]
    rows = rows_of(ranges, 64)
    reference.list_work(both[0], rows, 8)
    kernels_for(KERNEL_DEVICE, "triton").list_work(both[1], rows, 8)
    counts = both[0].counts.tolist()
    assert both[1].counts.tolist() == counts
    for array, count in zip(("tiles", "items", "merges"), counts, strict=True):
        plain, fast = (getattr(work, array)[:count].tolist() for work in both)
        assert fast == plain, array
        assert count < len(getattr(both[0], array)), "the list is as long as it can be"
    assert both[1].shared[: len(ranges)].tolist() == both[0].shared[: len(ranges)].tolist()
    assert both[1].shares_begin.tolist() == both[0].shares_begin.tolist()
    assert both[1].cut.tolist() == both[0].cut.tolist()


if not IS_INTERPRETED:  # which has not the memory of a GPU
    IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    LATENT_RANGES: Ranges = ((0, 1), (299, 300), (7, 7), (90, 133), (63, 64), (64, 65), (200, 202), (0, 0), (0, 67))
    LATENT_RANGES = (*LATENT_RANGES, (1500, 1540), (900, 1101))

    def require_each_alone(case: Case, reading: Reading, tiling: AttentionTiling) -> None:
        """Right, and of each row what it is alone, bit by bit."""
        together = answer(case, work_of(case, reading, tiling, few=2))
        # 32 bits round sums of hundreds of products, which 16 bits do not show.
        require_close(together, answers(case, reading), times=3 if together.dtype is torch.float32 else 1)
        for place, (start, stop) in enumerate(case.ranges):
            if start < stop:
                alone = case.alone(place)
                found = answer(alone, work_of(alone, reading, tiling, few=2))
                token = int(case.rows.query_start_loc[place])
                assert same_bytes(found, together[token : token + stop - start]), (start, stop)

    REAL: Ranges = ((0, 1), (2300, 2301), (7, 7), (90, 133), (63, 64), (0, 67), (600, 602))

    @pytest.mark.parametrize(
        ("dims", "dtype"),
        [
            *[(dims, torch.bfloat16) for dims in SIZES_OF_HEADS],
            *[(dims, torch.float8_e4m3fn) for dims in ((32, 32), (192, 128), (256, 256), (576, 576))],
            *[(dims, torch.float16) for dims in ((64, 64), (192, 128))],
            *[(dims, torch.float8_e5m2) for dims in ((128, 128), (576, 576))],
            *[(dims, torch.float32) for dims in ((32, 32), (128, 128), (256, 256), (576, 576))],
        ],
        ids=str,
    )
    def test_heads_of_every_size_as_they_are_cut_for_models(dims: tuple[int, int], dtype: torch.dtype) -> None:
        """From 32 to 576 dimensions, keys and values alike or not: what is chosen for them fits, and is right."""
        half = torch.float16 if dtype is torch.float8_e5m2 else torch.bfloat16
        memory = Memory(8, 2, dims, 16, dtype, scaling="head", query_dtype=half if dtype.itemsize == 1 else None)
        case, reading = make_case(REAL, memory, device=KERNEL_DEVICE), Reading(4)
        require_each_alone(case, reading, tiling_for(case.layer, reading, case.query.element_size()))

    @pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
    @pytest.mark.parametrize(
        ("dtype", "name"),
        [(torch.bfloat16, "plain"), (torch.bfloat16, "wide window"), (torch.float8_e4m3fn, "chunk")],
        ids=str,
    )
    def test_blocks_of_every_size_as_they_are_cut_for_models(block_size: int, dtype: torch.dtype, name: str) -> None:
        memory = Memory(8, 2, (64, 64), block_size, dtype, query_dtype=torch.bfloat16)
        case, reading = make_case(REAL, memory, device=KERNEL_DEVICE), replace(READINGS[name], heads_of_key=4)
        require_each_alone(case, reading, tiling_for(case.layer, reading))

    @pytest.mark.parametrize(
        ("num_heads", "dims", "dtype"),
        [
            (16, (576, 512), torch.bfloat16),
            (16, (576, 512), torch.float8_e4m3fn),
            (128, (576, 512), torch.float8_e4m3fn),
            (16, (576, 512), torch.float32),
            (16, (320, 256), torch.float16),
            (20, (96, 64), torch.bfloat16),
            (16, (576, 500), torch.bfloat16),
            (64, (576, 500), torch.bfloat16),
        ],
        ids=str,
    )
    def test_latents_as_they_are_cut_for_models(num_heads: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
        half = torch.bfloat16 if dtype.itemsize == 1 else None
        memory = Memory(num_heads, 1, dims, 16, dtype, is_latent=True, query_dtype=half)
        case, reading = make_case(REAL, memory, device=KERNEL_DEVICE), Reading(num_heads)
        require_each_alone(case, reading, tiling_for(case.layer, reading, case.query.element_size()))

    def latent_case(num_heads: int, value_dim: int, dtype: torch.dtype, block_size: int = 16) -> tuple[Case, WorkList]:
        """Rows of latents of a model's size, and the list that is chosen for them."""
        memory = Memory(num_heads, 1, (value_dim + 64, value_dim), block_size, dtype, is_latent=True)
        case = make_case(LATENT_RANGES, memory, device=KERNEL_DEVICE)
        return case, work_of(case, Reading(num_heads), tiling_for(case.layer, Reading(num_heads)), few=2)

    @pytest.mark.skipif(not IS_HOPPER, reason="the kernel is written in Hopper's own instructions")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(
        ("num_heads", "value_dim", "block_size"),
        [(128, 512, 16), (64, 512, 1), (40, 512, 64), (20, 256, 24), (71, 256, 256)],
    )
    def test_latents_of_many_heads(num_heads: int, value_dim: int, block_size: int, dtype: torch.dtype) -> None:
        """Rows that decode, drafts and prompts, with spans to be merged; a row's answer is its own, bit by bit."""
        case, work = latent_case(num_heads, value_dim, dtype, block_size)
        work = work_of(case, Reading(num_heads), replace(work.tiling, span_tiles=1, most_spans=3), few=2)
        assert latents.can_serve(work, case.layer, case.query, None)
        require_each_alone(case, Reading(num_heads), work.tiling)

    @pytest.mark.skipif(not IS_HOPPER, reason="as above")
    def test_other_latents_are_answered_by_the_other_kernel() -> None:
        """Which has caps, sinks, eight bits and any dimensions."""
        case, work = latent_case(40, 512, torch.bfloat16)
        assert latents.can_serve(work, case.layer, case.query, None)
        assert not latents.can_serve(work, case.layer._replace(soft_cap=1.0), case.query, None)
        assert not latents.can_serve(work, case.layer, case.query, torch.zeros(40))
        assert not latents.can_serve(work, case.layer, case.query.half(), None)
        assert not latents.can_serve(work, case.layer, case.query.float(), None)
        for num_heads, dims in ((40, (40, 32)), (16, (576, 512))):
            memory = Memory(num_heads, 1, dims, 16, torch.bfloat16, is_latent=True)
            other = make_case(((0, 1),), memory, device=KERNEL_DEVICE)
            work = work_of(other, Reading(num_heads), tiling_for(other.layer, Reading(num_heads)))
            assert not latents.can_serve(work, other.layer, other.query, None)
