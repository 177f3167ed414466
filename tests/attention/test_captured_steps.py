"""A step in one graph: tokens written, lists made, every layer attended, tokens drawn; replayed for any other step.

Buffers are as large as a step may be, and NaN behind what a step fills of them. Two back ends take the same random
steps, in which rows decode, bring drafts, compute chunks or nothing: one from the buffers, by a graph that was captured
with the first of them, one as it comes, in tensors of the step's own sizes. What they answer is the same, bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from pagedkv.attention import AttentionLayer, GroupMetadata, StepMetadata, TritonBackend
from pagedkv.device import KVStorage
from pagedkv.device.kernels.inputs import Draws, Filters
from pagedkv.device.kernels.selection import kernels_for
from tests.attention.test_schedules import ARRAYS, REAL, TINY, WRITERS, Schedule, Sizes, draws_of, layers_of, storage_of
from tests.device.kernels.suite import same_bytes

pytestmark = pytest.mark.interpreted

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
NUM_TOKENS = 500
"""Of a vocabulary."""
MODEL = replace(REAL, num_heads=20, latent_dims=(320, 256), num_rows=8, chunk_tokens=100)
"""Latents of more than 16 heads are what the kernel for latents of many heads serves."""


@dataclass(frozen=True)
class Step:
    """What a step is computed from: where its rows lie, and what each layer is given.

    Args:
        where: the rows; given: by layer, ``[tokens, ...]`` each, keys that a model unfolded ``[keys, ...]``.
    """

    where: StepMetadata
    given: Sequence[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Engine:
    """What carries steps out, over a storage of its own.

    Args:
        layers, storage, backend: of attention; weights: ``[heads * value_dim, vocabulary]``; sinks: of one layer.
    """

    layers: Sequence[AttentionLayer]
    storage: KVStorage
    backend: TritonBackend
    weights: torch.Tensor
    sinks: torch.Tensor

    def attend(self, step: Step) -> list[torch.Tensor]:
        """Write and attend, layer by layer."""
        answers = []
        for number, (layer, given) in enumerate(zip(self.layers, step.given, strict=True)):
            if layer.is_latent:
                self.backend.write_latents(number, given["latent"], step.where)
                answers.append(self.backend.attend_latents(number, given["absorbed"], step.where))
                unfolded = given["query"], given["key"], given["value"]
                answers.append(self.backend.attend_unfolded(number, *unfolded, step.where))
                continue
            if number in WRITERS:
                self.backend.write(number, given["key"], given["value"], step.where)
            sinks = self.sinks if layer.has_sinks else None
            answers.append(self.backend.attend(number, given["query"], step.where, sinks=sinks))
        return answers

    def draw(self, step: Step, answers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Draw a token behind each row's last one: int64 ``[places]``; rows without any draw from somebody's."""
        group, kernels = step.where.groups[0], kernels_for(DEVICE)
        scores = answers[0].flatten(1)[(group.query_start_loc[1:] - 1).clamp(min=0).long()].float() @ self.weights
        positions, ones = group.seq_lens.long(), torch.ones_like(group.seq_lens, dtype=torch.float32)
        least, tokens = torch.empty_like(ones), torch.empty_like(positions)
        kernels.find_least(Filters(ones, positions * 0 + 40, (ones * 0.9).double(), ones * 0.01), scores, least)
        draws = Draws(ones * 0.8, least, positions * 0 + 7, positions * 0, positions)
        kernels.draw_tokens(draws, scores, tokens, torch.empty_like(ones))
        return tokens


def engine_of(schedule: Schedule, dtype: torch.dtype) -> Engine:
    sizes, layers, storage = schedule.sizes, layers_of(schedule.sizes), storage_of(schedule, DEVICE, dtype)
    backend = TritonBackend(
        storage,
        layers,
        max_places=sizes.num_rows,
        max_tokens=sizes.num_rows * sizes.chunk_tokens,
        max_length=sizes.longest,
        latent_dim=sizes.latent_dims[1],
        query_dtype=dtype,
        num_draft=sizes.num_draft,
        tiling=sizes.tiling,
    )
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(sizes.num_heads * sizes.dims[1], NUM_TOKENS, generator=generator)
    sinks = torch.linspace(-1, 1, sizes.num_heads, device=DEVICE)
    return Engine(layers, storage, backend, weights.to(DEVICE), sinks)


def steps_of(schedule: Schedule, dtype: torch.dtype) -> list[Step]:
    """Choose random steps; each has tokens."""
    steps, generator = [], torch.Generator().manual_seed(schedule.seed)
    for _ in range(schedule.sizes.num_steps):
        ranges = schedule.step()
        where = schedule.metadata(ranges)
        if where.num_tokens:
            pairs = enumerate(layers_of(schedule.sizes))
            drawn = [draws_of(number, layer, schedule.sizes, ranges, generator) for number, layer in pairs]
            given = [{name: each.to(DEVICE, dtype) for name, each in draws.items()} for draws in drawn]
            steps.append(Step(there(where), given))
    return steps


def there(where: StepMetadata) -> StepMetadata:
    groups = [GroupMetadata(*(getattr(group, name).to(DEVICE) for name in ARRAYS)) for group in where.groups]
    return StepMetadata(groups, where.num_places, where.num_tokens)


def buffers_of(sizes: Sizes, like: Step) -> Step:
    """Make buffers for any step."""
    most = sizes.num_rows * sizes.chunk_tokens

    def empty(name: str, tensor: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        is_unfolded = layer.is_latent and name in {"key", "value"}
        return tensor.new_empty(sizes.num_rows * sizes.longest if is_unfolded else most, *tensor.shape[1:])

    groups = []
    for group in like.where.groups:
        arrays = {name: torch.empty_like(getattr(group, name)) for name in ARRAYS}
        arrays["slot_mapping"] = group.slot_mapping.new_empty(most)
        groups.append(GroupMetadata(*arrays.values()))
    layers = layers_of(sizes)
    given = [
        {name: empty(name, tensor, layer) for name, tensor in tensors.items()}
        for layer, tensors in zip(layers, like.given, strict=True)
    ]
    return Step(StepMetadata(groups, sizes.num_rows, most), given)


def fill(buffers: Step, step: Step) -> None:
    """Put a step into buffers, over poison; what stands behind it goes nowhere."""
    for target, source in zip(buffers.where.groups, step.where.groups, strict=True):
        target.slot_mapping.fill_(-1)
        for name in ARRAYS:
            content = getattr(source, name)
            getattr(target, name)[: len(content)].copy_(content)
    for tensors, given in zip(buffers.given, step.given, strict=True):
        for name, tensor in tensors.items():
            tensor.fill_(torch.nan)[: len(given[name])].copy_(given[name])


def require_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Bit by bit on a GPU, whose rows are answered alike in any step; plain torch's products choose by size."""
    for mine, theirs in zip(found, expected, strict=True):
        assert not theirs.isnan().any()
        if DEVICE.type == "cuda":
            assert same_bytes(mine[: len(theirs)], theirs)
        else:
            torch.testing.assert_close(mine[: len(theirs)], theirs, rtol=1e-5, atol=1e-5)


CASES = [pytest.param(TINY, torch.float32, seed, id=f"tiny-{seed}") for seed in range(3)]
if DEVICE.type == "cuda":
    CASES += [pytest.param(TINY, torch.float32, seed, id=f"tiny-{seed}") for seed in range(3, 6)]
    CASES += [pytest.param(MODEL, torch.bfloat16, seed, id=f"models-{seed}") for seed in range(2)]


@pytest.mark.parametrize(("sizes", "dtype", "seed"), CASES)
def test_a_step_in_buffers_is_the_step(sizes: Sizes, dtype: torch.dtype, seed: int) -> None:
    schedule = Schedule(sizes, seed)
    engines, steps = [engine_of(schedule, dtype) for _ in range(2)], steps_of(schedule, dtype)
    buffers = buffers_of(sizes, steps[0])
    for step in steps:
        fill(buffers, step)
        require_same(engines[0].attend(buffers), engines[1].attend(step))
    require_same_memory(engines)


def require_same_memory(engines: Sequence[Engine]) -> None:
    pools = (engine.storage.pools.values() for engine in engines)
    assert all(same_bytes(one.device_bytes, other.device_bytes) for one, other in zip(*pools, strict=True))


if DEVICE.type == "cuda":

    @pytest.mark.parametrize(("sizes", "dtype", "seed"), CASES)
    def test_one_graph_of_a_whole_step_serves_any_other(sizes: Sizes, dtype: torch.dtype, seed: int) -> None:
        schedule = Schedule(sizes, seed)
        engines, steps = [engine_of(schedule, dtype) for _ in range(2)], steps_of(schedule, dtype)
        captured, eager = engines
        buffers = buffers_of(sizes, steps[0])
        fill(buffers, steps[0])
        captured.draw(buffers, captured.attend(buffers))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answers = captured.attend(buffers)
            tokens = captured.draw(buffers, answers)
        kinds = set()
        for step in steps:
            fill(buffers, step)
            for each in answers:
                each.fill_(torch.nan)
            tokens.fill_(-9)
            graph.replay()
            expected = eager.attend(step)
            require_same(answers, expected)
            assert torch.equal(tokens, eager.draw(buffers, answers))
            lengths = (step.where.groups[0].seq_lens - step.where.groups[0].starts).tolist()
            kinds |= {min(length, 2) for length in lengths}
        require_same_memory(engines)
        assert kinds == {0, 1, 2}, "some rows computed nothing, some one token, some more"
