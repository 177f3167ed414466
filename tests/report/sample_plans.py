"""Documents of plans, made up: what ``pagedkv plan --json`` writes, small or with everything that takes room."""

import math
from itertools import product
from typing import Any

from pagedkv.report.documents import Plan, PlanPointDocument

__all__ = ["sample_plan", "sample_point", "small_plan", "unknown_plan"]

TIMES = {"mean": 0.5, "p50": 0.4, "p90": 0.9, "p99": 1.5}
NEVER = dict.fromkeys(TIMES)


def sample_point(
    memory: float, policy: str, load: float, traffic: float, *, is_chosen: bool = False
) -> PlanPointDocument:
    """Make up a point that differs from others in its memory and its policy."""
    return _point({"memory": f"{memory:g} GiB", "policy": policy}, memory, load, traffic, is_chosen=is_chosen)


def small_plan(num_policies: int = 2) -> Plan:
    """Make up a plan of two memories, some policies and two loads."""
    estimate = {"value": 2.1, "low": 2.0, "high": 2.2, "halves": (2.05, 2.15)}
    return {
        "trace": "trace<1>.jsonl",
        "command": "pagedkv plan trace",
        "read_as": "CSV",
        "model": "llama",
        "arrivals": "open loop",
        "bounds": {"ttft_s": 2.0, "tpot_s": None},
        "seconds": {
            "cost_model_name": "cost",
            "in_short": "data sheet",
            "is_assumed": True,
            "kind": "data sheet",
            "num_steps": None,
            "median": None,
            "p90": None,
        },
        "loads": "given",
        "prices": {},
        "warnings": ["the seconds are assumed"],
        "need": {"live": None, "cache": None, "sentence": "KV memory needed: 1.25 GiB (100 blocks)"},
        "headline": "Take 80 GiB, p0: 2.1 answers a second",
        "reasons": ["80 GiB instead of 40 GiB: 2.10x the traffic (2.00 to 2.20)"],
        "chosen": {"memory": "80 GiB", "policy": "p0"},
        "interval": None,
        "effects": [
            {
                "axis": "memory",
                "value": "80 GiB",
                "reference": "40 GiB",
                "num_pairs": 2,
                "num_serving": 2,
                "traffic": estimate,
                "hit_ratio": None,
            }
        ],
        "settings": [
            {
                "choices": {"memory": f"{memory:g} GiB", "policy": f"p{number}"},
                "held": 1.0,
                "ended": 2.0,
                "is_decided": True,
                "sustained_per_s": memory / 40,
                "cost": None,
                "beside": [],
            }
            for memory in (40.0, 80.0)
            for number in range(num_policies)
        ],
        "divided": {},
        "points": [
            sample_point(memory, f"p{number}", load, memory / 40, is_chosen=memory == 80 and number == 0)
            for memory in (40.0, 80.0)
            for number in range(num_policies)
            for load in (1.0, 2.0)
        ],
    }


def sample_plan() -> Plan:
    """Make up a plan of 96 points: every axis has two values or more, so that names, tables and legends are long."""
    axes = {
        "gpu": ("8xh100", "4xh100", "16xh100"),
        "block size": ("block 16", "block 64"),
        "policy": ("lru", "hazard"),
        "split": ("split by need", "full attention x0.8"),
        "tokens a step": ("8,192 tokens a step", "32,768 tokens a step"),
    }
    memory = dict(zip(axes["gpu"], (512.4, 225.1, 1087.3), strict=True))
    chosen = dict(
        zip(axes, ("16xh100", "block 64", "hazard", "full attention x0.8", "8,192 tokens a step"), strict=True)
    )
    plan = small_plan()
    plan["trace"] = "/long/" + "folder/" * 30 + "mooncake_conversation.jsonl.gz"
    plan["model"] = "a-model-with-quite-a-long-name-32b"
    plan["headline"] = (
        f"Take {', '.join(chosen.values())}: 12.3 answers a second within the bounds, 2.1x what 8xh100 serves"
    )
    plan["reasons"] = [
        f"{value} instead of {first}: 2.10x the traffic (2.00 to 2.20), +3.2 points of the hit ratio (+2.8 to +3.6)"
        for first, *others in axes.values()
        for value in others
    ]
    plan["warnings"] = ["a warning of " + "many words " * 30]
    plan["chosen"] = chosen
    plan["effects"] = [
        {
            "axis": axis,
            "value": value,
            "reference": first,
            "num_pairs": 1234,
            "num_serving": 1233,
            "traffic": {"value": 12.10, "low": 11.95, "high": 12.25, "halves": (12.05, 12.15)},
            "hit_ratio": {"value": 0.0321, "low": -0.1284, "high": 0.1358, "halves": (0.0312, -0.1333)},
        }
        for axis, (first, *others) in axes.items()
        for value in others
    ]
    plan["points"] = [
        _point(
            choices := dict(zip(axes, values, strict=True)),
            memory[choices["gpu"]] - (0.2 if choices["block size"] == "block 64" else 0.0),
            load,
            traffic=memory[choices["gpu"]] / 100 * (1.2 if choices["policy"] == "hazard" else 1.0) * math.sqrt(load),
            is_chosen=choices == chosen,
        )
        for values in product(*axes.values())
        for load in (1.0, 2.0)
    ]
    return plan


def unknown_plan() -> Plan:
    """Make up a plan of one setting whose hits are not known and in which no request was answered in time."""
    plan = small_plan(1)
    plan["bounds"] = {"ttft_s": None, "tpot_s": None}
    plan["effects"] = []
    plan["headline"] = "None of the settings gives answers a second: the bounds, the load or the memory must change"
    plan["points"] = [sample_point(40.0, "lru", 1.0, 0.0, is_chosen=True)]
    plan["points"][0]["figures"] |= {"hit_ratio": None, "num_good": 0}
    plan["points"][0]["figures"] |= dict.fromkeys(("ttft_s", "tpot_s", "itl_s"), NEVER)
    return plan


def _point(choices: dict[str, str], gib: float, load: float, traffic: float, *, is_chosen: bool) -> PlanPointDocument:
    figures: dict[str, Any] = {
        "num_requests": 100,
        "num_good": 80,
        "num_preemptions": 3,
        "hit_ratio": 0.25,
        "throughput_per_s": traffic + 0.5,
        "goodput_per_s": traffic,
        "steadiness": {"verdict": "fails", "num_good": 80, "measured_s": 80.0},
        "output_tokens_per_s": 1234.5,
        "ttft_s": TIMES,
        "tpot_s": TIMES,
        "itl_s": TIMES,
    }
    return {
        "choices": choices,
        "load": load,
        "is_chosen": is_chosen,
        "num_blocks": {"full": 100},
        "kv_gib": gib,
        "cost_model_name": "cost",
        "verdict": "holds" if load == 1 else "fails",
        "binds": [] if load == 1 else ["queue", "ttft"],
        "reason": "holds" if load == 1 else "does not hold; the queue grows, from 1.0 who wait to 5.0",
        "change": "" if load == 1 else "for 93% of the time requests wait because blocks run out: more memory",
        "figures": figures,
    }
