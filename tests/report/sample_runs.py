"""Synthetic runs for the report's tests: the shapes and proportions of a replay, but made up, not measured.

``sample_run`` is deterministic in its arguments. Tests of edge cases take one and change what they are about.
"""

from typing import Final

import numpy as np

from pagedkv.report.documents import (
    AgeHistogram,
    Curve,
    Level,
    Percentiles,
    Pool,
    PoolTimeline,
    Replay,
    ReportRun,
    Timeline,
)

__all__ = ["empty_run", "sample_curve", "sample_run"]

EDGES_S: Final = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, None)
LENGTHS: Final = (8_000, 1_500, 40_000, 620, 12_345, 90)


def sample_run(  # noqa: PLR0913 - one parameter a way in which runs differ
    name: str = "synthetic_conversation.jsonl.gz",
    *,
    seed: int = 0,
    num_blocks: int = 262_144,
    block_size: int = 16,
    num_intervals: int = 512,
    pools: tuple[str, ...] = ("full",),
    with_model: bool = True,
    with_curve: bool = True,
    policy: str = "lru",
) -> ReportRun:
    """Make up a run."""
    random = np.random.default_rng(seed)
    replay = Replay(
        trace=name,
        command=f"pagedkv replay {name} --num-blocks {num_blocks} --block-size {block_size} --json result.json",
        config={
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_host_blocks": 0,
            "max_sequences": 256,
            "watermark": 0.01,
            "policy": policy,
            "preemption": "recompute",
            "num_samples": None,
            "model": "llama-3.1-8b" if with_model else None,
            "cost_model": {"name": "roofline", "flops_s": 4.0e14, "nbytes_s": 3.35e12},
        },
        requests={
            "num_requests": 12_031,
            "num_rejected": 3,
            "num_finished": 12_028,
            "num_prompt_tokens": 144_793_823,
            "num_output_tokens": 4_122_048,
        },
        hits={
            "num_prompt_blocks": 9_043_701,
            "num_hit_blocks": 1_661_328 + 10_007 * seed,
            "block_hit_ratio": (1_661_328 + 10_007 * seed) / 9_043_701,
            "num_hit_tokens": 26_581_248,
            "token_hit_ratio": 0.1835799 + 0.007 * seed,
        },
        steps={
            "num_steps": 71_204,
            "num_decode_steps": 70_811,
            "virtual_s": 3_722.25,
            "busy_s": 3_541.5,
            "mean_sequences": 57.375,
            "peak_sequences": 211,
            "num_computed_tokens": 122_334_623,
        },
        waste={
            "mean": _fragmentation(block_size),
            "by_block_size": {str(size): _fragmentation(size) for size in (1, 8, 16, 32, 64, 128, 256)},
            "contiguous": {"exact": 0.01734, "power_of_two": 0.34121, "maximum": 0.89765},
            "max_length": 126_195,
        },
        preemptions={
            "num_recompute": 41 + seed,
            "num_swap": 0,
            "num_recomputed_tokens": 507_212,
            "num_swapped_out_blocks": 0,
            "num_swapped_in_blocks": 0,
        },
        sharing={"mean_saving": None, "num_decode_steps": 0},
        latency={
            "queueing_s": _percentiles(random, 0.6),
            "first_token_s": _percentiles(random, 2.2),
            "request_s": _percentiles(random, 21.0),
        },
        pools={pool: _pool(random, num_blocks - 1, 2_097_152 if with_model else None) for pool in pools},
        misses={
            "num_tokens": 118_212_575,
            "by_cause": {
                "capacity": 40_105_211,
                "changed": 9_004_032,
                "keys": 0,
                "short": 96_041,
                "new": 61_003_187,
                "being_computed": 4_096,
                "unknown": 8_000_008,
                "other": 0,
            },
        },
        timeline=_timeline(random, num_blocks - 1, num_intervals, pools),
    )
    return ReportRun(name, replay, sample_curve() if with_curve else None)


def sample_curve() -> Curve:
    """Make up a capacity curve."""
    num_block_refs, ideal_hits = 288_500, 105_710
    capacities = (247, 515, 1072, 2234, 4655, 9699, 20208, 42106, 87730, 182790)
    hits = {
        "lru": (12092, 12168, 13044, 16159, 29379, 59357, 83430, 101595, 104747, 105710),
        "lookahead": (16100, 18050, 25200, 37300, 52170, 78810, 96500, 104001, 105300, 105710),
        "optimal": (28563, 40041, 56775, 76839, 96924, 105710, 105710, 105710, 105710, 105710),
    }
    return Curve(
        block_size=512,
        num_requests=12_031,
        num_block_refs=num_block_refs,
        num_unique_blocks=182_790,
        ideal_hits=ideal_hits,
        ideal_block_ratio=ideal_hits / num_block_refs,
        ideal_token_ratio=0.3736237491291324,
        policies={name: dict(zip(map(str, capacities), of_policy, strict=True)) for name, of_policy in hits.items()},
        capacity_for={"0.9": 31_435, "0.99": 85_219, "1.0": 158_281},
        gaps={
            "content_ceiling": 1 - ideal_hits / num_block_refs,
            "capacity_gap": {
                str(capacity): (ideal_hits - best) / num_block_refs
                for capacity, best in zip(capacities, hits["optimal"], strict=True)
            },
            "policy_gap": {
                name: {
                    str(capacity): (best - mine) / num_block_refs
                    for capacity, best, mine in zip(capacities, hits["optimal"], hits[name], strict=True)
                }
                for name in ("lru", "lookahead")
            },
        },
    )


def empty_run(name: str = "empty") -> ReportRun:
    """A run in which every request was rejected: no step, no latency, no interval."""
    nothing = Percentiles(mean=None, p50=None, p90=None, p99=None, max=None)
    run = sample_run(name, with_curve=False)
    replay = run.replay
    replay["requests"] = {
        "num_requests": 7,
        "num_rejected": 7,
        "num_finished": 0,
        "num_prompt_tokens": 0,
        "num_output_tokens": 0,
    }
    replay["hits"] = {
        "num_prompt_blocks": 0,
        "num_hit_blocks": 0,
        "block_hit_ratio": None,
        "num_hit_tokens": 0,
        "token_hit_ratio": None,
    }
    replay["steps"] |= {"num_steps": 0, "num_decode_steps": 0, "virtual_s": 0.0, "mean_sequences": None}
    replay["waste"] = {
        "mean": None,
        "by_block_size": {"1": None, "16": None},
        "contiguous": {"exact": None, "power_of_two": None, "maximum": None},
        "max_length": None,
    }
    replay["latency"] = {"queueing_s": nothing, "first_token_s": nothing, "request_s": nothing}
    for pool in replay["pools"].values():
        level = Level(mean=None, peak=None)
        pool |= {"num_live": level, "num_cached": level, "num_free": level}
        pool |= {"num_evictions": 0, "num_never_reused": 0}
        pool["hits_by_age"] = pool["evictions_by_age"] = AgeHistogram(
            upper_edges_s=list(EDGES_S), num_blocks=[0] * len(EDGES_S)
        )
    replay["timeline"] = _timeline(np.random.default_rng(0), 100, 0, tuple(replay["pools"]))
    return run


def _fragmentation(block_size: int) -> float:
    return sum(-length % block_size for length in LENGTHS) / sum(
        -(-length // block_size) * block_size for length in LENGTHS
    )


def _percentiles(random: np.random.Generator, scale_s: float) -> Percentiles:
    seconds = random.lognormal(np.log(scale_s), 1.0, 2_000)
    p50, p90, p99 = (float(value) for value in np.percentile(seconds, (50, 90, 99)))
    return Percentiles(mean=float(seconds.mean()), p50=p50, p90=p90, p99=p99, max=float(seconds.max()))


def _pool(random: np.random.Generator, num_blocks: int, block_nbytes: int | None) -> Pool:
    ages = np.arange(len(EDGES_S))
    hits = 200_000 * np.exp(-((ages - 6.0) ** 2) / 12) + random.integers(0, 5_000, len(EDGES_S))
    evictions = 900_000 * np.exp(-((ages - 9.0) ** 2) / 4)
    evicted = [int(number) for number in evictions]
    return Pool(
        num_blocks=num_blocks,
        block_nbytes=block_nbytes,
        num_live=Level(mean=num_blocks * 0.371, peak=int(num_blocks * 0.9124)),
        num_cached=Level(mean=num_blocks * 0.612, peak=int(num_blocks * 0.9876)),
        num_free=Level(mean=num_blocks * 0.017, peak=num_blocks),
        num_evictions=sum(evicted),
        num_never_reused=int(sum(evicted) * 0.93),
        hits_by_age=AgeHistogram(upper_edges_s=list(EDGES_S), num_blocks=[int(number) for number in hits]),
        evictions_by_age=AgeHistogram(upper_edges_s=list(EDGES_S), num_blocks=evicted),
    )


def _timeline(random: np.random.Generator, num_blocks: int, num_intervals: int, pools: tuple[str, ...]) -> Timeline:
    duration_s = random.uniform(5.0, 9.5, num_intervals)
    time_s = np.cumsum(duration_s)
    load = np.clip(0.45 + 0.25 * np.sin(time_s / 400) + 0.04 * random.standard_normal(num_intervals), 0.02, 0.95)
    filled = np.clip(time_s / 600, 0, 1)
    live = load * num_blocks
    free = (1 - filled) * (num_blocks - live)
    levels = PoolTimeline(
        num_live=live.tolist(), num_cached=(num_blocks - live - free).tolist(), num_free=free.tolist()
    )
    hit_ratio: list[float | None] = np.clip(0.19 * filled + 0.03 * random.standard_normal(num_intervals), 0, 1).tolist()
    hit_ratio[40:44] = [None] * len(hit_ratio[40:44])
    return Timeline(
        time_s=time_s.tolist(),
        duration_s=duration_s.tolist(),
        num_running=(load * 120).tolist(),
        num_waiting=(np.maximum(load - 0.6, 0) * 160).tolist(),
        num_swapped=[0.0] * num_intervals,
        token_hit_ratio=hit_ratio,
        pools=dict.fromkeys(pools, levels),
    )
