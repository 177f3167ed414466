"""Bursts of one prefix, and conversations, over two replicas on the virtual clock: what a copy of the prefix costs.

    python -m benchmarks.bursts [--replicas 2] [--json FILE]

A burst is N prompts within N milliseconds, which begin with the same tokens and end with eight of their own. Hits are
compared with those of one replica that has the memory of all. Each further replica that takes part computes the prefix
once more, so at most ``(N - replicas) / (N - 1)`` of the hits remain; "never" is the router that makes no copies at
any queue, and shows what sharing out is worth: seconds to the first token and to the end of an answer, mean of all.
Ray's rule is :mod:`benchmarks.ray_rule`. Replicas are H100s with Llama 3.1 8B, timed by the data sheet.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.machine import describe
from benchmarks.ray_rule import RayRule
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.routing import Choice, Router, Routing, RoutingRules
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.cluster import Network, VirtualCluster
from pagedkv.simulation.cost import read_cost_model

CONFIG: Final = ServingConfig(num_blocks=4000, block_size=16)
NEAR: Final = Network(delay_s=0.005)
OWN_TOKENS: Final = 8
GAP_S: Final = 0.001
NUM_TOKENS: Final = 10_000
NUM_KINDS: Final = 4
NEVER: Final = RoutingRules(lack_weight=1e6, share_slack_tokens=1e9)


@dataclass(frozen=True, slots=True)
class Burst:
    """A burst: prompts, tokens that they share, tokens of an answer."""

    num_prompts: int
    num_shared: int
    num_answer: int

    def requests(self, seed: int = 1) -> Iterator[TokenizedRequest]:
        """Draw the requests."""
        rng = np.random.default_rng(seed)
        shared = drawn(rng, self.num_shared)
        for number in range(self.num_prompts):
            prompt = np.concatenate([shared, drawn(rng, OWN_TOKENS)])
            yield TokenizedRequest(GAP_S * number, prompt, drawn(rng, self.num_answer))


BURSTS: Final = (
    Burst(40, 800, 16),
    Burst(40, 800, 200),
    Burst(40, 8000, 200),
    Burst(100, 800, 16),
    Burst(400, 1600, 16),
    Burst(400, 1600, 200),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one way of routing came to.

    Args:
        of_one_pool: hits over those of one replica with the memory of all.
        first_ms, end_ms: milliseconds from arrival to the first token and to the end, means.
    """

    load: str
    routing: str
    of_one_pool: float
    first_ms: float
    end_ms: float


def drawn(rng: np.random.Generator, num: int) -> Int32Array:
    """Draw tokens."""
    return rng.integers(0, NUM_TOKENS, num, dtype=np.int32)


def conversations(num: int = 48, turns: int = 6, seed: int = 1) -> list[TokenizedRequest]:
    """Conversations of four kinds, which share their first 1,000 tokens, a turn each three seconds or so."""
    rng = np.random.default_rng(seed)
    kinds = [drawn(rng, 1000) for _ in range(NUM_KINDS)]
    found = []
    for number in range(num):
        prompt, at_s = kinds[number % NUM_KINDS], float(rng.uniform(0, 20))
        for _ in range(turns):
            prompt, answer = np.concatenate([prompt, drawn(rng, 200)]), drawn(rng, 60)
            found.append(TokenizedRequest(at_s, prompt, answer))
            prompt, at_s = np.concatenate([prompt, answer]), at_s + float(rng.uniform(2, 4))
    return sorted(found, key=lambda each: each.arrival_s)


class ByRay:
    """A router whose choices are those of Ray's rule; the rest is the wrapped router's.

    Args:
        router: the router that counts what is under way.
        rule: of Ray.
    """

    def __init__(self, router: Router, rule: RayRule) -> None:
        self._router, self._rule = router, rule

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a cluster asks of its router
        return getattr(self._router, name)

    def choose(self, request: int, token_ids: Int32Array, now_s: float, *, keys: RequestKeys = NO_KEYS) -> Choice:
        """Choose by Ray's rule."""
        queues = {name: len(self._router.loads.load(name, now_s).requests) for name in self._router.index.names}
        name = self._rule.choose(token_ids.tolist(), queues, now_s)
        return self._router.choose(request, token_ids, now_s, keys=keys, among=[name])


WAYS: Final[dict[str, tuple[Routing, RoutingRules | None, float | None]]] = {
    "prefix": ("prefix", None, None),
    "never a copy": ("prefix", NEVER, None),
    "round-robin": ("round-robin", None, None),
    "Ray": ("prefix", None, float("inf")),
    "Ray, threshold 10": ("prefix", None, 10.0),
}


def serve(requests: Iterable[TokenizedRequest], way: str, num_replicas: int, config: ServingConfig) -> VirtualCluster:
    """Serve requests in one of the ways."""
    routing, rules, threshold = WAYS[way]
    costs = read_cost_model("llama-3.1-8b/h100")
    cluster = VirtualCluster(config, costs, num_replicas, routing=routing, rules=rules, network=NEAR)
    if threshold is not None:
        cluster.router = ByRay(cluster.router, RayRule(cluster.router.index.names, threshold))  # type: ignore[assignment]
    cluster.run(requests)
    cluster.check()
    return cluster


def compare(load: str, requests: list[TokenizedRequest], num_replicas: int, config: ServingConfig) -> Iterator[Row]:
    """Serve the same requests in all ways."""
    assert isinstance(config.num_blocks, int)
    whole = replace(config, num_blocks=num_replicas * config.num_blocks)
    pooled = serve(requests, "prefix", 1, whole).figures().num_hit_tokens
    for way in WAYS:
        cluster = serve(requests, way, num_replicas, config)
        figures, log = cluster.figures(), cluster.log
        ends_ms = 1000 * float(np.mean(log.end_s - log.arrival_s))
        yield Row(
            load,
            way,
            figures.num_hit_tokens / pooled,
            1000 * float(figures.first_token_s.mean()),
            ends_ms,
        )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    loads = {
        f"burst of {each.num_prompts}, {each.num_shared:,} shared, {each.num_answer} answered": [*each.requests()]
        for each in BURSTS
    }
    rows: list[Row] = []
    print(f"{'load':44} {'routing':18} {'of one pool':>12} {'first, ms':>10} {'end, ms':>10}")
    few = replace(CONFIG, num_blocks=1500)
    for load, requests, config in [
        *((*each, CONFIG) for each in loads.items()),
        ("conversations", conversations(), few),
    ]:
        for row in compare(load, requests, arguments.replicas, config):
            rows.append(row)
            print(
                f"{load:44} {row.routing:18} {row.of_one_pool:12.4f} {row.first_ms:10.0f} {row.end_ms:10.0f}",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": describe(), "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
