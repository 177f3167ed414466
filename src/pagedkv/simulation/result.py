"""The result of a replay on a virtual clock, for JSON and tables.

It consists of plain numbers. The requests and the configuration alone determine it, so it is equal on every run. It has
no times of the machine that ran it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.simulation.meters import COUNTS, LEVELS, POOL_LEVELS, Meters
from pagedkv.simulation.tiers import SimulatedTiers, tier_figures


@dataclass(frozen=True, slots=True)
class ServingResult:
    """All figures, in sections; docs/replay.md explains each.

    Args:
        config: configuration of the replay.
        requests, hits, misses, steps, waste, preemptions, sharing, latency: counts and means.
        pools: by pool, its blocks over time, and hits and evictions by age.
        timeline: levels and counts over time, in at most 512 intervals.
        tiers: hits by medium, and the counts of each tier; None without tiers.
    """

    config: Mapping[str, Any]
    requests: Mapping[str, Any]
    hits: Mapping[str, Any]
    misses: Mapping[str, Any]
    steps: Mapping[str, Any]
    waste: Mapping[str, Any]
    preemptions: Mapping[str, Any]
    sharing: Mapping[str, Any]
    latency: Mapping[str, Any]
    pools: Mapping[str, Mapping[str, Any]]
    timeline: Mapping[str, Any]
    tiers: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all figures for JSON, by section."""
        return {name: section for name in self.__slots__ if (section := getattr(self, name)) is not None}


def sum_up(
    meters: Meters,
    config: Mapping[str, Any],
    virtual_s: float,
    block_nbytes: Mapping[str, int],
    tiers: SimulatedTiers | None = None,
) -> ServingResult:
    """Make the result from the meters.

    Args:
        meters: the meters.
        config: the configuration, for JSON.
        virtual_s: seconds from the start of the trace to now.
        block_nbytes: bytes of a block of each pool, where they are known.
        tiers: the tiers; None: there are none.
    """
    return ServingResult(
        config=config,
        requests={
            "num_requests": meters.num_requests,
            "num_with_content": meters.num_with_content,
            "num_rejected": meters.num_rejected,
            "num_finished": meters.num_finished,
            "num_prompt_tokens": meters.num_prompt_tokens,
            "num_output_tokens": meters.num_output_tokens,
        },
        hits={
            "num_prompt_blocks": meters.num_prompt_blocks,
            "num_hit_blocks": meters.num_hit_blocks,
            "block_hit_ratio": _hit_ratio(meters, meters.num_hit_blocks, meters.num_prompt_blocks),
            "num_hit_tokens": meters.num_hit_tokens,
            "token_hit_ratio": _hit_ratio(meters, meters.num_hit_tokens, meters.num_prompt_tokens),
        },
        misses=meters.misses.as_dict(),
        steps={
            "num_steps": meters.num_steps,
            "num_decode_steps": meters.num_decode_steps,
            "virtual_s": virtual_s,
            "busy_s": meters.busy_s,
            "mean_sequences": meters.sequences.as_dict(meters.num_steps)["mean"],
            "peak_sequences": meters.sequences.peak,
            "num_computed_tokens": meters.num_computed_tokens,
        },
        waste=meters.waste.as_dict(),
        preemptions={
            "num_recompute": meters.num_recompute,
            "num_swap": meters.num_swap,
            "num_recomputed_tokens": meters.num_recomputed_tokens,
            "num_swapped_out_blocks": meters.num_swapped_out_blocks,
            "num_swapped_in_blocks": meters.num_swapped_in_blocks,
        },
        sharing=meters.sharing.as_dict(),
        latency=meters.latencies.as_dict(),
        pools={pool: _pool(meters, pool, virtual_s, block_nbytes.get(pool)) for pool in meters.occupancy},
        timeline=_timeline(meters),
        tiers=None if tiers is None else tier_figures(tiers, meters.num_hit_tokens, meters.num_prompt_tokens),
    )


def _pool(meters: Meters, pool: str, virtual_s: float, block_nbytes: int | None) -> dict[str, Any]:
    history = meters.history.pools[pool]
    return {
        "num_blocks": meters.num_usable[pool],
        "block_nbytes": block_nbytes,
        **meters.occupancy[pool].as_dict(virtual_s),
        "num_evictions": history.num_evictions,
        "num_never_reused": history.num_never_reused,
        "hits_by_age": history.hits_by_age.as_dict(),
        "evictions_by_age": history.evictions_by_age.as_dict(),
    }


def _timeline(meters: Meters) -> dict[str, Any]:
    columns = meters.timeline.columns()
    durations_s = columns["duration_s"]
    hit_tokens, prompt_tokens = columns["num_hit_tokens"].tolist(), columns["num_prompt_tokens"].tolist()
    return {
        "time_s": durations_s.cumsum().tolist(),
        "duration_s": durations_s.tolist(),
        **{level: columns[level].tolist() for level in LEVELS},
        "token_hit_ratio": [
            hit / prompt if prompt and meters.num_with_content else None
            for hit, prompt in zip(hit_tokens, prompt_tokens, strict=True)
        ],
        **{count: columns[count].astype(int).tolist() for count in COUNTS[:2]},
        "pools": {
            pool: {level: columns[f"{level} {pool}"].tolist() for level in POOL_LEVELS} for pool in meters.occupancy
        },
    }


def _hit_ratio(meters: Meters, part: int, whole: int) -> float | None:
    """Divide, with 0 / 0 = 0. None if the trace has no content, so that hits are unknown."""
    if meters.num_requests and not meters.num_with_content:
        return None
    return part / whole if whole else 0.0
