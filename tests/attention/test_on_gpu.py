"""The GPU's back end against the reference: on a GPU by Triton's kernels, elsewhere by their plain references."""

from dataclasses import replace

import pytest
import torch

from pagedkv.attention import (
    AttentionLayer,
    CPUBackend,
    GroupMetadata,
    ReferenceBackend,
    StepMetadata,
    TritonBackend,
    backend_for,
)
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import FullAttention, RecurrentState
from pagedkv.device import KeyValueShape, KVStorage, LatentShape, StateShape, StateTensor
from pagedkv.device.kernels.inputs import AttentionTiling
from pagedkv.errors import ConfigurationError
from tests.attention.paged import Case, paged_case

pytestmark = pytest.mark.interpreted

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
RAGGED = [(0, 1), (6, 7), (0, 5), (7, 8), (3, 11), (40, 41), (12, 16), (15, 16), (16, 17), (0, 16), (100, 101)]
STEPS = [
    [(0, 1), (60, 61), (7, 8), (30, 34)],
    [(90, 91), (0, 0), (3, 3), (20, 26)],
    [(0, 4), (9, 10), (0, 1), (0, 1)],
]
SMALL = AttentionTiling(
    key_tile=16,
    span_tiles=1,
    most_spans=4,
    query_rows=16,
    query_keys=16,
    query_warps=4,
    query_registers=0,
    shared_span=16,
)
LAYERS = {
    "plain": AttentionLayer(0, 1, 4, 0.3),
    "window": AttentionLayer(0, 1, 4, 0.3, window=6),
    "window and sink tokens": AttentionLayer(0, 1, 4, 0.3, window=6, num_sink_tokens=3),
    "chunk": AttentionLayer(0, 1, 4, 0.3, chunk=6),
    "soft cap": AttentionLayer(0, 1, 4, 0.3, soft_cap=0.5),
    "sinks": AttentionLayer(0, 1, 4, 0.3, has_sinks=True),
    "all of it": AttentionLayer(0, 1, 4, 0.3, window=6, soft_cap=0.5, has_sinks=True, num_sink_tokens=2),
}


def there(case: Case, dtype: torch.dtype = torch.float32) -> Case:
    """The same case where the back end runs."""
    (shape,) = case.storage.shapes
    assert isinstance(shape, KeyValueShape)
    shape = replace(shape, dtype=dtype)
    storage = KVStorage(case.storage.config, [shape], DEVICE)
    if dtype is torch.float32:
        storage.pool_of(0).device_bytes.copy_(case.storage.pool_of(0).device_bytes)
    return Case(storage, step_there(case.step), case.query.to(DEVICE))


def group_there(group: GroupMetadata) -> GroupMetadata:
    return GroupMetadata(
        group.block_tables.to(DEVICE),
        group.starts.to(DEVICE),
        group.seq_lens.to(DEVICE),
        group.query_start_loc.to(DEVICE),
        group.slot_mapping.to(DEVICE),
    )


def step_there(step: StepMetadata) -> StepMetadata:
    (group,) = step.groups
    return StepMetadata((group_there(group),), step.num_places, step.num_tokens)


def static_group(group: GroupMetadata) -> GroupMetadata:
    """A group of four places whose arrays are changed in place, as those of a graph."""
    tables = torch.zeros(4, 40, dtype=torch.int32, device=DEVICE)
    starts, seq_lens, offsets = group.starts.clone(), group.seq_lens.clone(), group.query_start_loc.clone()
    return GroupMetadata(tables, starts, seq_lens, offsets, group.slot_mapping.clone())


def backend_of(
    case: Case, layers: list[AttentionLayer], *, tiling: AttentionTiling | None = SMALL, **options: object
) -> TritonBackend:
    return TritonBackend(
        case.storage,
        layers,
        max_places=len(RAGGED),
        max_tokens=64,
        max_length=128,
        query_dtype=torch.float32,
        tiling=tiling,
        **options,  # type: ignore[arg-type]
    )


def sinks_of(layer: AttentionLayer) -> torch.Tensor | None:
    return torch.linspace(-1, 1, layer.num_heads) if layer.has_sinks else None


@pytest.mark.parametrize("num_draft", [0, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_reference(name: str, num_draft: int) -> None:
    case, layer = paged_case(RAGGED), LAYERS[name]
    sinks = sinks_of(layer)
    expected = ReferenceBackend(case.storage, [layer]).attend(0, case.query, case.step, sinks=sinks)
    mine = there(case)
    found = backend_of(mine, [layer], num_draft=num_draft).attend(
        0, mine.query, mine.step, sinks=None if sinks is None else sinks.to(DEVICE)
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["window", "window and sink tokens", "chunk", "soft cap", "sinks"])
def test_each_capability_shows(name: str) -> None:
    """Negative control: without it the answer is another one."""
    case = there(paged_case(RAGGED))
    both = [LAYERS[name], LAYERS["plain"]]
    sinks = sinks_of(both[0])
    backend = backend_of(case, both)
    with_it = backend.attend(0, case.query, case.step, sinks=None if sinks is None else sinks.to(DEVICE))
    assert not torch.allclose(with_it, backend.attend(1, case.query, case.step), rtol=1e-3, atol=1e-3)


def test_a_list_follows_the_step() -> None:
    """Layers that read alike share a list; another step, or the same one once more, makes it anew."""
    first, second = (paged_case(ranges) for ranges in (RAGGED, [(0, 7), (20, 21)]))
    mine = there(first)
    layers = [AttentionLayer(0, 0, 4, 0.3), AttentionLayer(0, 1, 4, 0.3), AttentionLayer(0, 1, 4, 0.3, window=5)]
    backend = backend_of(mine, layers)
    for case in (first, second, first):
        pool = mine.storage.pool_of(0).device_bytes
        pool[: case.storage.pool_of(0).device_nbytes] = case.storage.pool_of(0).device_bytes.to(DEVICE)
        step, query = step_there(case.step), case.query.to(DEVICE)
        for number in (1, 0, 2, 1):
            expected = ReferenceBackend(case.storage, layers).attend(number, case.query, case.step)
            found = backend.attend(number, query, step)
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_share_blocks_answer_alike() -> None:
    case = there(paged_case([(100, 101), (90, 91), (95, 96)]))
    case.step.groups[0].block_tables[1:, :20] = case.step.groups[0].block_tables[0, :20]
    answers = [
        backend_of(case, [LAYERS["plain"]], batch_invariant=is_invariant).attend(0, case.query, case.step)
        for is_invariant in (True, False)
    ]
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)


def test_rows_that_share_blocks_answer_as_if_they_were_alone() -> None:
    """Bit by bit, unless ``batch_invariant=False`` is asked for."""
    case = there(paged_case([(100, 101), (90, 91), (95, 96)]))
    (group,) = case.step.groups
    group.block_tables[1:, :20] = group.block_tables[0, :20]
    together = backend_of(case, [LAYERS["plain"]]).attend(0, case.query, case.step)
    for place in range(3):
        only = torch.tensor([place], device=DEVICE)
        alone = backend_of(case, [LAYERS["plain"]]).attend(0, case.query[only], case.step.select(only, only))
        assert torch.equal(alone[0], together[place])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_what_is_written_is_read(dtype: torch.dtype) -> None:
    """Eight bits are stored by their scales."""
    ranges = [(0, 9), (0, 3)]
    case = paged_case(ranges)
    key, value = torch.randn(2, 12, 2, 8).clamp(-2, 2)
    reference = ReferenceBackend(case.storage, [LAYERS["plain"]])
    reference.write(0, key, value, case.step)
    expected = reference.attend(0, case.query, case.step)
    mine = there(case, dtype)
    mine.storage.pool_of(0).device_bytes.fill_(255)
    if dtype is not torch.float32:
        mine.storage.scales(0).fill_(0.01)
    backend = backend_of(mine, [LAYERS["plain"]])
    backend.write(0, key.to(DEVICE), value.to(DEVICE), mine.step)
    found = backend.attend(0, mine.query, mine.step)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


def test_latents_are_keys_and_their_first_dimensions_values() -> None:
    plain = paged_case(RAGGED, num_key_heads=1, dims=(24, 16))
    storage = KVStorage(plain.storage.config, [LatentShape(2, 24, dtype=torch.float32)], DEVICE)
    case = Case(storage, step_there(plain.step), plain.query.to(DEVICE))
    storage.latents(0, 1).copy_(plain.storage.keys(0, 1)[:, :, 0])
    plain.storage.values(0, 1).copy_(plain.storage.keys(0, 1)[..., :16])
    layer = AttentionLayer(0, 1, 4, 0.3)
    expected = ReferenceBackend(plain.storage, [layer]).attend(0, plain.query, plain.step)
    backend = backend_of(case, [layer], latent_dim=16)
    latent = torch.randn(case.step.num_tokens, 24, device=DEVICE)
    torch.testing.assert_close(backend.attend_latents(0, case.query, case.step).cpu(), expected, rtol=1e-5, atol=1e-5)
    backend.write_latents(0, latent, case.step)
    slots = case.step.groups[0].slot_mapping
    assert torch.equal(storage.latents(0, 1)[slots // 4, slots % 4], latent)


@pytest.mark.parametrize("name", ["plain", "window", "chunk", "soft cap"])
def test_unfolded_keys_are_attended_to_alike(name: str) -> None:
    layer, case = replace(LAYERS[name], is_latent=True), paged_case(RAGGED)
    num_keys = sum(stop - layer.first_seen(start) for start, stop in RAGGED)
    key, value = torch.randn(num_keys, 4, 8), torch.randn(num_keys, 4, 5)
    expected = ReferenceBackend(case.storage, [layer]).attend_unfolded(0, case.query, key, value, case.step)
    mine = there(case)
    found = backend_of(mine, [layer]).attend_unfolded(0, mine.query, key.to(DEVICE), value.to(DEVICE), mine.step)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_the_device_chooses_the_back_end() -> None:
    case = there(paged_case(RAGGED))
    options = {"max_places": 11, "max_tokens": 64, "max_length": 128, "query_dtype": torch.float32}
    chosen = backend_for(case.storage, [LAYERS["plain"]], **options)  # type: ignore[arg-type]
    assert isinstance(chosen, CPUBackend if DEVICE.type == "cpu" else TritonBackend)


def test_what_cannot_be_served_is_refused() -> None:
    config = SpaceConfig((FullAttention(4),), 10)
    layer = AttentionLayer(0, 0, 1, 1.0)

    def build(config: SpaceConfig, shape: object, layer: AttentionLayer = layer) -> None:
        storage = KVStorage(config, [shape], DEVICE)  # type: ignore[list-item]
        TritonBackend(storage, [layer], max_places=2, max_tokens=4, max_length=8)

    with pytest.raises(ConfigurationError, match="elements between those of one of its keys: put C last"):
        build(config, KeyValueShape(1, 1, 8, layout="BLKCHN"))
    with pytest.raises(ConfigurationError, match="640 dimensions, and the kernels support up to 576"):
        build(config, KeyValueShape(1, 1, 640, 64))
    with pytest.raises(ConfigurationError, match="stores states"):
        build(SpaceConfig((RecurrentState(4),), 10), StateShape(1, (StateTensor("state", (4,), torch.float32),)))
    with pytest.raises(ConfigurationError, match="sink tokens before its window"):
        CPUBackend(paged_case(RAGGED).storage, [LAYERS["window and sink tokens"]])


def test_unfolded_lists_follow_the_step() -> None:
    """As lists of blocks: another step makes them anew, and none is that of latents."""
    layers = [AttentionLayer(0, index, 4, 0.3, is_latent=True) for index in (0, 1)]
    backend = backend_of(there(paged_case(RAGGED)), layers)
    for ranges in (RAGGED, [(0, 7), (20, 21)], RAGGED):
        case = paged_case(ranges)
        num_keys = sum(stop for _, stop in ranges)
        for number in (0, 1, 0):
            key, value = torch.randn(num_keys, 4, 8), torch.randn(num_keys, 4, 5)
            reference = ReferenceBackend(case.storage, layers)
            expected = reference.attend_unfolded(number, case.query, key, value, case.step)
            query, key, value = (each.to(DEVICE) for each in (case.query, key, value))
            found = backend.attend_unfolded(number, query, key, value, step_there(case.step))
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="graphs are captured on a GPU")
@pytest.mark.parametrize("name", ["plain", "window"])
def test_one_graph_serves_any_step(name: str) -> None:
    """Lengths and tables change in place, decodes become prompts: the graph's answer is an eager one's, bit by bit."""
    layer = LAYERS[name]
    cases = [there(paged_case(ranges, seed=seed)) for seed, ranges in enumerate(STEPS)]
    largest = max(case.storage.pool_of(0).device_nbytes for case in cases)
    storage = next(case for case in cases if case.storage.pool_of(0).device_nbytes == largest).storage
    pool = storage.pool_of(0).device_bytes
    group = cases[0].step.groups[0]
    static = static_group(group)
    query = torch.zeros(16, 4, 8, device=DEVICE)
    step = StepMetadata((static,), 4, 16)
    backend = backend_of(Case(storage, step, query), [layer, replace(layer, index=0)])
    contents = [case.storage.pool_of(0).device_bytes.clone() for case in cases]

    def fill(case: Case, content: torch.Tensor) -> None:
        mine = case.step.groups[0]
        pool[: len(content)] = content
        static.block_tables[:, : mine.block_tables.shape[1]] = mine.block_tables
        for array in ("starts", "seq_lens", "query_start_loc"):
            getattr(static, array).copy_(getattr(mine, array))
        query[: len(case.query)] = case.query

    def answer() -> list[torch.Tensor]:
        return [backend.attend(number, query, step) for number in (0, 1)]

    fill(cases[0], contents[0])
    answer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = answer()
    for case, content in zip(cases, contents, strict=True):
        fill(case, content)
        graph.replay()
        count = len(case.query)
        replayed = [each[:count].clone() for each in captured]
        for found, expected in zip(replayed, answer(), strict=True):
            assert torch.equal(found, expected[:count])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="graphs are captured on a GPU")
@pytest.mark.parametrize("is_absorbed", [True, False], ids=["absorbed", "unfolded"])
@pytest.mark.parametrize("num_heads", [4, 40])
def test_one_graph_serves_any_step_of_latents(num_heads: int, is_absorbed: bool) -> None:  # noqa: FBT001
    """As that of keys: no length of latents is read on the host, with few heads (tiles) and with many (items)."""
    steps = [
        [(0, 1), (60, 61), (7, 8), (30, 34)],
        [(90, 91), (0, 0), (3, 3), (20, 26)],
        [(0, 4), (9, 10), (0, 1), (0, 1)],
    ]
    cases = [paged_case(ranges, num_heads=num_heads, dims=(24, 16), seed=seed) for seed, ranges in enumerate(steps)]
    num_blocks = max(case.storage.config.blocks_by_pool()["device"] for case in cases)
    storage = KVStorage(SpaceConfig((FullAttention(4),), num_blocks), [LatentShape(2, 24, dtype=torch.float32)], DEVICE)
    storage.pool_of(0).device_bytes.view(torch.float32).normal_()
    group = step_there(cases[0].step).groups[0]
    static = static_group(group)
    step, query = StepMetadata((static,), 4, 16), torch.zeros(16, num_heads, 24, device=DEVICE)
    key, value = torch.randn(250, num_heads, 24, device=DEVICE), torch.randn(250, num_heads, 16, device=DEVICE)
    layers = [AttentionLayer(0, index, num_heads, 0.3, is_latent=True) for index in (0, 1)]
    backend = backend_of(Case(storage, step, query), layers, latent_dim=16)

    def fill(case: Case) -> None:
        mine = case.step.groups[0]
        static.block_tables[:, : mine.block_tables.shape[1]] = mine.block_tables.to(DEVICE)
        for array in ("starts", "seq_lens", "query_start_loc"):
            getattr(static, array).copy_(getattr(mine, array))
        query[: len(case.query)] = case.query.to(DEVICE)

    def answer() -> list[torch.Tensor]:
        if is_absorbed:
            return [backend.attend_latents(number, query, step) for number in (0, 1)]
        return [backend.attend_unfolded(number, query, key, value, step) for number in (0, 1)]

    fill(cases[0])
    answer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = answer()
    for case in cases:
        fill(case)
        graph.replay()
        replayed = [each[: len(case.query)].clone() for each in captured]
        assert not any(each.isnan().any() for each in replayed)
        for found, expected in zip(replayed, answer(), strict=True):
            assert torch.equal(found, expected[: len(case.query)])
