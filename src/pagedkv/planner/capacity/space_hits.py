"""Hits of an eviction policy at one capacity, through the production block space, for a model of several groups.

A prompt hits as far as every group allows: a window, if the blocks before the hit's end are cached; a state, if one is
kept there (:mod:`pagedkv.space.matching`). Stack distances cannot predict that, so each capacity is replayed
request by request: a prompt is matched, computed in chunks as in engines, so that its windows slide, and freed.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from pagedkv.contract.answers import Allocation
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.planner.capacity.block_tree import write_path
from pagedkv.planner.capacity.partition import Partition
from pagedkv.planner.capacity.references import BlockReferences
from pagedkv.space import BlockSpace, PrefixHit

__all__ = ["MOST_TOKENS_A_STEP", "SpaceHits", "space_hits"]

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
