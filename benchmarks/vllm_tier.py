"""The calls of our secondary tier on the thread of vLLM's scheduler, below vLLM's real tiering manager, without a GPU.

    make test-peers PEERS=FOLDER       once: it makes the environment
    export PYTHONPATH=FOLDER/vllm-0.33.0 VLLM_TARGET_DEVICE=cpu
    .venv/peers/bin/python -m benchmarks.vllm_tier [--events] [--stock]

Requests of 256 chunks are stored, touched, and loaded again, and every byte is judged. For each call: microseconds from
its begin to its end, in which other threads may have had the processor, and of processor time of the thread alone.
"""

import argparse
import json
import runpy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.machine import describe

CALLS: Final = (
    *("lookup", "submit_store", "submit_load", "get_finished_jobs", "touch", "on_new_request"),
    *("on_request_finished", "on_schedule_end", "take_events"),
)
MICROSECONDS: Final = 1e6
DRIVEN: Final = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "peers" / "vllm_tiers.py"))
"""By its path, since vLLM's source has a package "tests" too."""


def timed(call: Callable[..., Any], seconds: list[tuple[float, float]]) -> Callable[..., Any]:
    """Time each call."""

    def timing(*arguments: object) -> object:
        own_s, begun_s = time.thread_time(), time.perf_counter()
        answer = call(*arguments)
        seconds.append((time.perf_counter() - begun_s, time.thread_time() - own_s))
        return answer

    return timing


def time_calls(
    tier: dict[str, object], num_requests: int, num_chunks: int, *, has_events: bool
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of each call, by its name."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in CALLS}
    keys_of = DRIVEN["keys_of"]
    with DRIVEN["Tiers"](tier, num_chunks=4 * num_chunks, has_events=has_events) as tiers:
        taken = tiers.tier.take_events
        tiers.tier.take_events = lambda: list(taken())
        for name in CALLS:
            setattr(tiers.tier, name, timed(getattr(tiers.tier, name), seconds[name]))
        for number in range(num_requests):
            keys = keys_of(range(num_chunks * number, num_chunks * (number + 1)))
            tiers.store(keys)
            tiers.tier.touch(keys, tiers.request())
            tiers.manager.primary_tier.reset_cache()
            judged = tiers.load(keys)
            assert judged == [True] * num_chunks, f"{judged.count(None)} misses"
            tiers.manager.primary_tier.reset_cache()
            tiers.events()
    return seconds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--chunks", type=int, default=256, help="of a request")
    parser.add_argument("--events", action="store_true", help="the tier tells vLLM what it stored and what is gone")
    parser.add_argument("--stock", action="store_true", help='vLLM\'s own tier "fs" in place of ours')
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    told = {"enable_kv_events": True} if given.events else {}
    with tempfile.TemporaryDirectory() as folder:
        tier = {**DRIVEN["stock" if given.stock else "ours"](folder), **told}
        seconds = time_calls(tier, given.requests, given.chunks, has_events=given.events)
    print(f"{'':20} {'calls':>8} {'median, us':>11} {'99 %':>9} {'own, median':>12} {'own, 99 %':>10}")
    for name, each in seconds.items():
        if each:
            (wall, own), (wall99, own99) = np.percentile(np.array(each) * MICROSECONDS, [50, 99], axis=0).tolist()
            print(f"{name:20} {len(each):8,} {wall:11.1f} {wall99:9.1f} {own:12.1f} {own99:10.1f}")
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": describe(), "seconds": seconds}))


if __name__ == "__main__":
    main()
