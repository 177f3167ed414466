"""A policy beside LRU where hits take blocks of several groups, given time and outputs, the time alone, or nothing.

Both workloads of windows, from many seeds, for three models: one full group and five windows in one pool or in two, and
one full group with two groups of states. Printed are points (hundredths of all tokens of prompts) against LRU: the mean
of all seeds, and the worst seed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import numpy as np

from benchmarks.windows.ours import config_of
from benchmarks.windows.setting import BLOCK_SIZE, MAX_CHUNK, steps
from benchmarks.windows.workloads import WORKLOADS, Request
from pagedkv import Allocation, BlockSpace, FullAttention, PrefixHit, RecurrentState, SpaceConfig

__all__ = ["CAPACITIES", "TOLD", "Case", "measure_case"]

TOLD: Final = ("time and outputs", "time", "nothing")
MEAN_PAUSE_S: Final = 2.0
STATE_INTERVAL: Final = 128


def _with_states(num_blocks: int) -> SpaceConfig:
    state = RecurrentState(STATE_INTERVAL, pool="device")
    return SpaceConfig((FullAttention(BLOCK_SIZE), state, state), num_blocks)


CONFIGS: Final[MappingProxyType[str, Callable[[int], SpaceConfig]]] = MappingProxyType(
    {
        "windows": lambda num_blocks: config_of(num_blocks, separate=False),
        "windows, two pools": lambda num_blocks: config_of(num_blocks, separate=True),
        "states": _with_states,
    }
)
CAPACITIES: Final = MappingProxyType(
    {"windows": (1_500, 3_000, 6_000), "windows, two pools": (1_500, 3_000, 6_000), "states": (500, 1_000, 1_800)}
)
"""Blocks, by model, null blocks included."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is served.

    Args:
        workload: its name; model: of :data:`CONFIGS`; num_blocks: the capacity; seed: that requests are drawn from.
    """

    workload: str
    model: str
    num_blocks: int
    seed: int


def measure_case(case: Case, eviction: str) -> tuple[float, dict[str, float]]:
    """Serve a workload: the hit ratio of LRU, by tokens of prompts, and that of a policy by what it is given."""
    requests = list(WORKLOADS[case.workload](case.seed))
    return _ratio(requests, case, "lru", "nothing"), {told: _ratio(requests, case, eviction, told) for told in TOLD}


def _ratio(requests: list[Request], case: Case, eviction: str, told: str) -> float:
    config = CONFIGS[case.model](case.num_blocks)
    space = BlockSpace(SpaceConfig(config.groups, config.num_blocks, eviction=eviction))
    pauses_s = np.random.default_rng(case.seed).exponential(MEAN_PAUSE_S, len(requests))
    num_hits = 0
    for request, now_s in zip(requests, np.cumsum(pauses_s).tolist(), strict=True):
        if told != "nothing":
            space.advance(now_s)
        num_hits += _serve(space, request, len(request.answer) if told == "time and outputs" else None)
    return num_hits / sum(len(request.prompt) for request in requests)


def _serve(space: BlockSpace, request: Request, num_generated: int | None) -> int:
    match = space.match(request.prompt)
    tokens = np.concatenate([request.prompt, request.answer])
    first, *stops = _stops(request, match)
    admitted = space.allocate(tokens[:first], match=match)
    assert isinstance(admitted, Allocation), admitted
    space.acknowledge(space.plan_step().step_id)
    for start, stop in pairwise((first, *stops)):
        shortage = space.append(admitted.row, tokens[start:stop])
        assert shortage is None, shortage
        space.acknowledge(space.plan_step().step_id)
    space.free(admitted.row, num_generated=num_generated)
    return admitted.num_hit_tokens


def _stops(request: Request, match: PrefixHit) -> Iterator[int]:
    """List where steps end; one of them ends where the prompt's states are to be kept."""
    start = match.num_tokens
    if match.num_tokens < match.checkpoint < len(request.prompt):
        yield from range(match.num_tokens + MAX_CHUNK, match.checkpoint, MAX_CHUNK)
        yield match.checkpoint
        start = match.checkpoint
    yield from steps(request, start, max_decoded=BLOCK_SIZE)
