"""What no step and no write can be faster than: the same bytes over the same way, and nothing done with them."""

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks.device.plans import prefill_plan
from benchmarks.device.steps import BLOCKS_OF_PROMPT, NUM_PREFILLED, STEPS_A_GRAPH, config_of, decode_plans
from benchmarks.device.timing import Figure, by_graph, figure
from pagedkv.contract.plan import StepPlan
from pagedkv.device.kernels.triton.overlapping import launch_options, may_overlap

__all__ = ["limit_figures"]

NUM_RUNS = 40
TILE = 1024
NUM_BEHIND = 128
NUM_COPIES = 32


def limit_figures() -> Iterator[Figure]:
    """Measure packets that are pulled and looked at, and as many bytes copied as a write of tokens moves."""
    config = config_of(4)
    yield pulled("a decode step pulled, 1 group", next(decode_plans(config_of(1), 1)))
    yield pulled("a decode step pulled, 4 groups", next(decode_plans(config, 1)))
    yield pulled("a prefill step pulled, 4 groups", prefill_plan(config, 1, NUM_PREFILLED, BLOCKS_OF_PROMPT))
    yield copied()


def pulled(name: str, plan: StepPlan) -> Figure:
    """Time two overlapping kernels: one pulls a plan's words out of pinned memory, the other waits and reads a word."""
    ring = [torch.from_numpy(plan.buffer.copy()).pin_memory() for _ in range(STEPS_A_GRAPH)]
    packet = torch.empty(len(plan.buffer), dtype=torch.int32, device="cuda")
    seen = torch.zeros(NUM_BEHIND, dtype=torch.int32, device="cuda")
    times = by_graph([partial(pull, words, packet, seen) for words in ring], NUM_RUNS)
    assert torch.equal(packet.cpu(), ring[0])
    assert bool((seen == packet[0]).all())
    return figure(f"limit: the packet of {name}, and a kernel behind it", times)


def pull(words: torch.Tensor, packet: torch.Tensor, seen: torch.Tensor) -> None:
    """Launch both kernels."""
    overlaps = may_overlap(packet.device)
    _pull_kernel[(triton.cdiv(len(words), TILE),)](words, packet, len(words), TILE=TILE, OVERLAPS=overlaps)
    _look_kernel[(NUM_BEHIND,)](packet, seen, OVERLAPS=overlaps, **launch_options(overlaps=overlaps))


def copied() -> Figure:
    """Time a plain copy of the keys and values of 1,024 tokens, 8 heads x 128, bfloat16."""
    sources = [torch.randn(2 * 1024, 8, 128, device="cuda").bfloat16() for _ in range(NUM_COPIES)]
    targets = [torch.empty_like(source) for source in sources]
    copies = [partial(target.copy_, source) for source, target in zip(sources, targets, strict=True)]
    times = by_graph(copies, NUM_RUNS)
    return figure("limit: as many bytes copied as keys and values of 1,024 tokens have", times)


@triton.jit
def _pull_kernel(words, packet, count, TILE: tl.constexpr, OVERLAPS: tl.constexpr):
    if OVERLAPS:
        gdc_launch_dependents()
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(packet + at, tl.load(words + at, mask=at < count), mask=at < count)


@triton.jit
def _look_kernel(packet, seen, OVERLAPS: tl.constexpr):
    if OVERLAPS:
        gdc_wait()
    tl.store(seen + tl.program_id(0), tl.load(packet))
