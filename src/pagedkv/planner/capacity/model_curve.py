"""Hits of a trace's prompts in the memory of a model: hits against GiB, group by group, through the production space.

A prompt hits as far as every group allows: a window, if the blocks before the hit's end are cached; a state, if one is
kept there (:mod:`pagedkv.space.matching`). So in a model with windows or states a prompt hits less than its cached
blocks, and its hit depends on the window blocks that the space keeps (docs/decisions/0015). Stack distances and the
optimum cannot predict that. So each capacity is replayed request by request: a prompt is matched, computed in chunks as
in engines, so that its windows slide, and freed. The result has the hits of policies, bounded by those of an unbounded
cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from pagedkv.contract.answers import Allocation
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import GIB, SpaceConfig
from pagedkv.contract.spec import GroupSpec
from pagedkv.planner.capacity.curve import CacheNeed, MemoryNeed
from pagedkv.planner.capacity.references import BlockReferences, Partition, write_path
from pagedkv.space import BlockSpace, PrefixHit

MOST_TOKENS_A_STEP: Final = 8192
"""Tokens of a chunk: the default of engines for one step."""


class SpaceHits(NamedTuple):
    """Hits at one capacity.

    Args:
        num_hit_tokens: tokens of all prompts that hit.
        num_unserved: prompts that do not fit the empty pools; they have no hits.
        hit_tokens_of_parts: tokens that hit, by partition, then by its parts.
    """

    num_hit_tokens: int
    num_unserved: int
    hit_tokens_of_parts: tuple[tuple[int, ...], ...] = ()


def space_hits(
    references: BlockReferences,
    config: SpaceConfig,
    max_tokens_a_step: int = MOST_TOKENS_A_STEP,
    partitions: Sequence[Partition] = (),
) -> SpaceHits:
    """Count the hits of prompts served one at a time.

    The last token of a prompt is always computed, since a step must sample after it.

    Args:
        references: the trace.
        config: groups, pools and policy. One sequence runs; a prompt longer than ``max_tokens`` is not served.
        max_tokens_a_step: tokens of a chunk.
        partitions: divisions of the requests, to count hits by part as well.

    Cost: 0.1 to 0.2 us a block and group, and some 50 us a chunk.
    """
    space = BlockSpace(config)
    by_request = np.zeros(references.num_requests, np.int64)
    num_unserved = 0
    outputs = references.output_lengths.tolist()
    arrivals_s = references.arrivals_s.tolist()
    for place, (arrival_s, num_generated, prompt) in enumerate(
        zip(arrivals_s, outputs, _prompts(references), strict=True)
    ):
        if arrival_s > 0:  # 0 in traces without times
            space.advance(arrival_s)
        num_hits = _serve(space, config, prompt, num_generated, max_tokens_a_step)
        if num_hits is None:
            num_unserved += 1
        else:
            by_request[place] = num_hits
    of_parts = tuple(tuple(each.sums(by_request).tolist()) for each in partitions)
    return SpaceHits(int(by_request.sum()), num_unserved, of_parts)


def _prompts(references: BlockReferences) -> Iterator[Int32Array]:
    """Yield the prompts as tokens. All tokens of a block are its number in the tree, so equal prefixes are equal."""
    for last_block, num_blocks in zip(
        references.last_blocks.tolist(), references.num_prompt_blocks.tolist(), strict=True
    ):
        path = np.zeros(num_blocks, np.int32)
        write_path(references.parents, last_block, path)
        yield np.repeat(path, references.block_size)


def _serve(
    space: BlockSpace, config: SpaceConfig, prompt: Int32Array, num_generated: int, max_tokens_a_step: int
) -> int | None:
    """Serve one prompt to its end; return the tokens that hit, or None if it never fits."""
    if len(prompt) == 0:
        return 0
    if len(prompt) > config.max_tokens:
        return None
    match = space.match(prompt)
    first, *stops = _stops(match, len(prompt), max_tokens_a_step)
    answer = space.allocate(prompt[:first], match=match)
    if not isinstance(answer, Allocation):
        return None
    is_served = True
    for start, stop in pairwise((first, *stops)):
        _run_step(space)
        if space.append(answer.row, prompt[start:stop]) is not None:
            is_served = False
            break
    _run_step(space)
    space.free(answer.row, num_generated=num_generated)
    return match.num_tokens if is_served else None


def _stops(match: PrefixHit, num_tokens: int, max_tokens_a_step: int) -> list[int]:
    """Return the ends of a prompt's chunks; one chunk ends where states are kept for later prompts."""
    start, stops = match.num_tokens, []
    while start < num_tokens:
        stop = min(num_tokens, start + max_tokens_a_step)
        if start < match.checkpoint < stop:
            stop = match.checkpoint
        stops.append(stop)
        start = stop
    return stops


def _run_step(space: BlockSpace) -> None:
    space.acknowledge(space.plan_step().step_id)


@dataclass(frozen=True, slots=True)
class CachePoint:
    """One size of the cache.

    Args:
        memory_gib: GiB, as requested.
        num_blocks: blocks of each pool, null blocks included.
    """

    memory_gib: float
    num_blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model, and the cache sizes to measure.

    Args:
        name: name of the model.
        groups: its groups, in pools of their own or in one.
        points: the sizes, in any order, with the blocks of each of these pools.
    """

    name: str
    groups: tuple[GroupSpec, ...]
    points: Sequence[CachePoint]


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Hits of one tenant's prompts, or of one window of time, in the common cache.

    Args:
        kind: "tenant" or "window".
        name: name of the tenant or window.
        num_requests, num_prompt_tokens, ideal_hit_tokens: as in :class:`ModelCurve`.
        hit_tokens: hit tokens by policy, in the order of the curve's points.
    """

    kind: str
    name: str
    num_requests: int
    num_prompt_tokens: int
    ideal_hit_tokens: int
    hit_tokens: Mapping[str, Sequence[int]]

    def hit_ratio(self, policy: str, place: int) -> float:
        """Hits of a policy at one point, as a share of the part's tokens."""
        return self.hit_tokens[policy][place] / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the values for JSON."""
        return {
            "name": self.name,
            "num_requests": self.num_requests,
            "num_prompt_tokens": self.num_prompt_tokens,
            "ideal_hit_tokens": self.ideal_hit_tokens,
            "hit_tokens": {name: list(tokens) for name, tokens in self.hit_tokens.items()},
        }


@dataclass(frozen=True, slots=True)
class ModelCurve:
    """Hits of a trace's prompts, by policy and size.

    Args:
        model: name of the model.
        block_size: tokens of a block of the trace.
        num_requests: requests, including those without a block.
        num_prompt_tokens: tokens of all blocks of prompts.
        ideal_hit_tokens: tokens that hit in an unbounded cache.
        points: the sizes, in ascending order.
        hits: hits by policy, in the order of ``points``.
        parts: the same by tenant and by window of time, if the trace was divided.
    """

    model: str
    block_size: int
    num_requests: int
    num_prompt_tokens: int
    ideal_hit_tokens: int
    points: Sequence[CachePoint]
    hits: Mapping[str, Sequence[SpaceHits]]
    parts: tuple[ModelPart, ...] = ()

    @property
    def need(self) -> MemoryNeed:
        """How much KV memory the cache needs: the least measured size at which the first policy has the hits."""
        if not self.ideal_hit_tokens:
            return MemoryNeed()
        hits = next(iter(self.hits.values()))
        enough = (place for place, each in enumerate(hits) if 100 * each.num_hit_tokens >= 99 * self.ideal_hit_tokens)
        place = next(enough, None)
        point = self.points[-1 if place is None else place]
        num_blocks, nbytes = sum(point.num_blocks.values()), int(point.memory_gib * GIB)
        return MemoryNeed(cache=CacheNeed(num_blocks, None, nbytes, "more than" if place is None else "at most"))

    def hit_ratio(self, policy: str, place: int) -> float:
        """Hits of a policy at one point, as a share of all tokens."""
        return self.hits[policy][place].num_hit_tokens / self.num_prompt_tokens

    def as_dict(self) -> dict[str, object]:
        """Return the curve for JSON, equal on every run."""
        return {
            "need": self.need.as_dict(),
            "model": self.model,
            "block_size": self.block_size,
            "num_requests": self.num_requests,
            "num_prompt_tokens": self.num_prompt_tokens,
            "ideal_hit_tokens": self.ideal_hit_tokens,
            "points": [
                {
                    "memory_gib": point.memory_gib,
                    "num_blocks": dict(point.num_blocks),
                    "hit_tokens": {name: hits[place].num_hit_tokens for name, hits in self.hits.items()},
                    "num_unserved": {name: hits[place].num_unserved for name, hits in self.hits.items()},
                }
                for place, point in enumerate(self.points)
            ],
            **{
                f"by_{kind}": [part.as_dict() for part in self.parts if part.kind == kind]
                for kind in dict.fromkeys(part.kind for part in self.parts)
            },
        }


def measure_model_curve(
    references: BlockReferences,
    model: CachedModel,
    policies: Sequence[str],
    show: Callable[[int], None] = lambda _: None,
    partitions: Sequence[Partition] = (),
) -> ModelCurve:
    """Count the hits of prompts, for every policy at every size.

    Args:
        references: the trace.
        model: the model, and the sizes.
        policies: names of eviction policies.
        show: called after each point with the number of finished points (policies by sizes).
        partitions: divisions of the requests, to count hits by part as well.

    Raises:
        ConfigurationError: a pool named by a group has no blocks, or too few.
    """
    ascending = sorted(model.points, key=lambda point: point.memory_gib)
    hits: dict[str, list[SpaceHits]] = {name: [] for name in policies}
    for point in ascending:
        for name in policies:
            config = _space_config(references, model.groups, point, name)
            hits[name].append(space_hits(references, config, partitions=partitions))
            show(sum(map(len, hits.values())))
    return ModelCurve(
        model=model.name,
        block_size=references.block_size,
        num_requests=references.num_requests,
        num_prompt_tokens=references.num_block_refs * references.block_size,
        ideal_hit_tokens=int(references.ideal_hits().sum()) * references.block_size,
        points=ascending,
        hits=hits,
        parts=tuple(_parts(references, partitions, hits)),
    )


def _parts(
    references: BlockReferences, partitions: Sequence[Partition], hits: Mapping[str, Sequence[SpaceHits]]
) -> Iterator[ModelPart]:
    for number, partition in enumerate(partitions):
        counts = partition.counts().tolist()
        tokens, ideal = (
            (partition.sums(blocks) * references.block_size).tolist()
            for blocks in (references.num_prompt_blocks, references.ideal_hits())
        )
        for place, name in enumerate(partition.names):
            hit_tokens = {
                policy: [each.hit_tokens_of_parts[number][place] for each in found] for policy, found in hits.items()
            }
            yield ModelPart(partition.kind, name, counts[place], tokens[place], ideal[place], hit_tokens)


def _space_config(
    references: BlockReferences, groups: tuple[GroupSpec, ...], point: CachePoint, policy: str
) -> SpaceConfig:
    """Configure a space for one prompt at a time, up to the trace's longest."""
    return SpaceConfig(
        groups=groups,
        num_blocks=point.num_blocks,
        max_sequences=1,
        max_tokens=references.longest_prompt * references.block_size,
        watermark=0.0,
        eviction=policy,
    )
