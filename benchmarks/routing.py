"""A cluster on the virtual clock: routing by cost against an oracle, by load alone, and in turn.

    python -m benchmarks.routing TRACE [--replicas 4 8] [--load X] [--blocks N] [--cost NAME] [--requests N]
    python -m benchmarks.routing TRACE --load X --slack 0 4096 16384     the bound of balance
    python -m benchmarks.routing                                         decisions alone

Without ``--load`` requests arrive so fast that replicas compute 70 % of the time when they are routed by cost. The
messages of the oracle, the same router, come at once; those of the others come 100 ms late, and 1 % of the batches of
events never. "one pool" is a single replica with the memory of all, whose hits alone compare.
"""

import argparse
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, product
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.machine import describe
from pagedkv.contract.answers import STORED, TierEvents
from pagedkv.planner.traces.clocks import spread_stamps
from pagedkv.planner.traces.reader import TraceReader
from pagedkv.planner.traces.request import Request
from pagedkv.routing import ROUTINGS, ReplicaIndex, Router, Routing, RoutingRules
from pagedkv.simulation.cluster import LATE, ClusterFigures, Network, VirtualCluster
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel, read_cost_model
from pagedkv.space import StoredBlocks

AT_ONCE: Final = Network()
ORACLE: Final = "oracle"
ONE_POOL: Final = "one pool"
WAYS: Final = (ORACLE, *ROUTINGS, ONE_POOL)
TARGET: Final = 0.7
FIRST_GUESS: Final = 1.0
NUM_GUESSES: Final = 5
NUM_TIMED: Final = 192
NUM_CACHED: Final = 16
NUM_INDEXED: Final = 1_000_000
NUM_REPLICAS: Final = 8
BLOCK_SIZE: Final = 16
RUN_TOKENS: Final = 128
PROMPTS: Final = (4096, 131_072)
MICROSECONDS: Final = 1e6


@dataclass(frozen=True)
class Setup:
    """What is simulated.

    Args:
        num_blocks: of a replica, of 64 tokens; costs: of its steps; requests: the trace; rules: of the router.
    """

    num_blocks: int
    costs: CostModel
    requests: Sequence[Request]
    rules: RoutingRules = RoutingRules()  # noqa: RUF009 - a value: frozen

    @property
    def config(self) -> ServingConfig:
        """The configuration of a replica."""
        return ServingConfig(num_blocks=self.num_blocks, block_size=64)

    def serve(self, num_replicas: int, load: float, routing: Routing, network: Network) -> ClusterFigures:
        """Serve the trace."""
        config = replace(self.config, load=load)
        cluster = VirtualCluster(config, self.costs, num_replicas, routing=routing, rules=self.rules, network=network)
        figures = cluster.run(self.requests)
        cluster.check()
        return figures

    def hit_ratio_of_one_pool(self, num_replicas: int, load: float) -> float:
        """Serve the trace by one replica with the memory of all, at a pace that leaves it as much time."""
        config = replace(
            self.config,
            load=load / num_replicas,
            num_blocks=self.num_blocks * num_replicas,
            max_sequences=self.config.max_sequences * num_replicas,
        )
        return VirtualCluster(config, self.costs, 1).run(self.requests).hit_ratio

    def load_of(self, num_replicas: int) -> float:
        """Find the load at which replicas compute 70 % of the time."""
        load = FIRST_GUESS
        for _ in range(NUM_GUESSES):
            busy = self.serve(num_replicas, load, "prefix", AT_ONCE).busy
            if abs(busy - TARGET) < 0.02:
                break
            load *= TARGET / min(busy, 1.0) if busy < 1 else 1 / 2
        return load


def compare(setup: Setup, num_replicas: int, load: float, ways: Collection[str]) -> dict[str, ClusterFigures]:
    """Serve the trace in several ways, the oracle's first."""
    figures = {}
    routings: dict[str, Routing] = {ORACLE: "prefix", **{str(routing): routing for routing in ROUTINGS}}
    for way, routing in routings.items():
        if way not in ways:
            continue
        figures[way] = setup.serve(num_replicas, load, routing, AT_ONCE if way == ORACLE else LATE)
        show(way, figures[way], figures.get(ORACLE))
    return figures


def show(name: str, figures: ClusterFigures, oracle: ClusterFigures | None) -> None:
    """Print a row."""
    of_oracle = figures.hit_ratio / max(oracle.hit_ratio, 1e-9) if oracle else float("nan")
    first_ms, last_ms = (1e3 * figures.first_token_percentile_s(percent) for percent in (50, 99))
    print(
        f"{name:14} {100 * figures.hit_ratio:7.2f} {of_oracle:10.3f} {figures.imbalance:10.3f} "
        f"{figures.imbalance_of_minutes:8.2f} {first_ms:10.0f} {last_ms:10.0f} {figures.busy:6.2f} "
        f"{figures.num_lost_batches:6} {figures.num_snapshots:6}   {figures.num_by_reason}",
        flush=True,
    )


def stored(digests: npt.NDArray[np.uint8]) -> StoredBlocks:
    """Blocks of these digests, uint8 ``[n, 32]``, as a snapshot has them."""
    ids = np.arange(1, len(digests) + 1, dtype=np.int32)
    return StoredBlocks("device", np.zeros_like(ids), ids, digests, np.zeros_like(digests), np.zeros(len(ids), bool))


def words_as_bytes(digests: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """Digests as words, uint32 ``[n, 8]``, in the form of events and snapshots: uint8 ``[n, 32]``."""
    return digests.astype(">u4").view(np.uint8).reshape(len(digests), 32)


def decision_times(*, has_tiers: bool = False) -> dict[str, float]:
    """Time decisions, hashing included, with a million indexed blocks of eight replicas: median microseconds.

    No replica has any of the new prompts. Each of the cached ones is on one replica, all but its last tokens.

    Args:
        has_tiers: a million entries of tiers are indexed beside the blocks, half of them in host memory, and half on a
            server that all replicas share. Then there are prompts that are in tiers alone: the first half in the host
            memory of one replica, the rest on the server.
    """
    index = ReplicaIndex(ServingConfig(num_blocks=64).group_specs, num_expected=NUM_INDEXED)
    router = Router(index)
    rng = np.random.default_rng(1)
    cached, tiered = ({length: [_tokens(rng, length) for _ in range(NUM_CACHED)] for length in PROMPTS} for _ in "12")
    for number in range(NUM_REPLICAS):
        own = [index.hash(each[number]).digests[BLOCK_SIZE] for each in cached.values()]
        own += [index.hash(each[number + NUM_REPLICAS]).digests[BLOCK_SIZE] for each in cached.values()]
        known = words_as_bytes(np.concatenate(own))
        others = rng.integers(0, 256, (NUM_INDEXED // NUM_REPLICAS - len(known), 32), dtype=np.uint8)
        router.add_replica(f"r{number}")
        index.restore(f"r{number}", "1", 0, [stored(np.concatenate([known, others]))])
    if has_tiers:
        _add_tiers(index, [tokens for each in tiered.values() for tokens in each], rng)
    times, clock = {}, count()
    ways = {"cached": cached, "in tiers": tiered} if has_tiers else {"cached": cached}
    for length in PROMPTS:
        new = [_tokens(rng, length) for _ in range(NUM_TIMED)]
        times[f"new {length}"] = _time(router, new, clock)
        for way, prompts in ways.items():
            times[f"{way} {length}"] = _time(router, _continued(prompts[length], rng), clock)
        unknown = [_tokens(rng, length) for _ in range(NUM_TIMED)]
        times[f"hashing {length}"] = _median([_seconds(index.hash, tokens) for tokens in unknown])
    return times


def _continued(prompts: Sequence[npt.NDArray[np.int32]], rng: np.random.Generator) -> list[npt.NDArray[np.int32]]:
    """Return the prompts again and again, with other tokens in the last block."""
    continued = []
    for number in range(NUM_TIMED):
        tokens = prompts[number % NUM_CACHED].copy()
        tokens[-BLOCK_SIZE:] = _tokens(rng, BLOCK_SIZE)
        tokens.setflags(write=False)
        continued.append(tokens)
    return continued


def _add_tiers(index: ReplicaIndex, prompts: Sequence[npt.NDArray[np.int32]], rng: np.random.Generator) -> None:
    """Announce a million entries of tiers, those of the prompts among them."""
    per_run = RUN_TOKENS // BLOCK_SIZE
    runs = [words_as_bytes(index.hash(each).digests[BLOCK_SIZE][per_run - 1 :: per_run]) for each in prompts]
    num_others = NUM_INDEXED // 2 // NUM_REPLICAS
    on_server = np.concatenate([each[len(each) // 2 :] for each in runs])
    for number in range(NUM_REPLICAS):
        own = [each[: len(each) // 2] for each in runs[number::NUM_REPLICAS]]
        for medium, known in (("CPU", np.concatenate(own)), ("REDIS", on_server)):
            keys = np.concatenate([known, rng.integers(0, 256, (num_others - len(known), 32), dtype=np.uint8)])
            index.apply(f"r{number}", "1", index.view(f"r{number}").next_batch, [_announced(medium, keys)])


def _announced(medium: str, keys: npt.NDArray[np.uint8]) -> TierEvents:
    return TierEvents(medium, RUN_TOKENS, np.full(len(keys), STORED, np.int32), keys)


def _tokens(rng: np.random.Generator, length: int) -> npt.NDArray[np.int32]:
    tokens = rng.integers(0, 100_000, length, dtype=np.int32)
    tokens.setflags(write=False)  # as a front's are
    return tokens


def _time(router: Router, prompts: Sequence[npt.NDArray[np.int32]], clock: Iterator[int]) -> float:
    """Time the decisions of prompts that come a second apart; return their median in microseconds."""
    seconds = []
    for tokens in prompts:
        request = next(clock)
        seconds.append(_seconds(router.choose, request, tokens, float(request)))
        router.ended(request)
    return _median(seconds)


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    begun = perf_counter()
    call(*arguments)
    return perf_counter() - begun


def _median(seconds: Sequence[float]) -> float:
    return MICROSECONDS * float(np.median(seconds))


def main() -> None:
    """Serve, print tables, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="*")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--load", type=float)
    parser.add_argument("--blocks", type=int, default=7000, help="of 64 tokens, of each replica (default: %(default)s)")
    parser.add_argument("--cost", default="llama-3.1-8b/h100")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--spread", type=float, help="seconds over which requests of one time stamp are spread")
    parser.add_argument("--slack", type=float, nargs="+", default=[RoutingRules().share_slack_tokens])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    times = {**decision_times(), **{f"tiers, {name}": us for name, us in decision_times(has_tiers=True).items()}}
    for name, us in times.items():
        print(f"{name:>24} {us:8,.0f} us", flush=True)
    rows = []
    for trace in given.trace:
        read: Iterable[Request] = TraceReader(trace)
        requests = list(islice(spread_stamps(read, given.spread) if given.spread else read, given.requests))
        for num_replicas, slack in product(given.replicas, given.slack):
            rules = RoutingRules(share_slack_tokens=slack)
            setup = Setup(given.blocks, read_cost_model(given.cost), requests, rules)
            load = given.load or setup.load_of(num_replicas)
            name = Path(trace).name
            print(f"\n{name}, {len(requests):,} requests, {num_replicas} replicas, load {load:.2f}, slack {slack:,.0f}")
            print(
                f"{'':14} {'hits, %':>7} {'of oracle':>10} {'imbalance':>10} {'minutes':>8} {'TTFT p50':>10} "
                f"{'p99, ms':>10} {'busy':>6} {'lost':>6} {'snaps':>6}"
            )
            begun = perf_counter()
            figures = compare(setup, num_replicas, load, given.ways)
            pooled = setup.hit_ratio_of_one_pool(num_replicas, load) if ONE_POOL in given.ways else None
            if pooled is not None:
                print(f"{ONE_POOL:14} {100 * pooled:7.2f}")
            print(f"{perf_counter() - begun:.0f} s", flush=True)
            rows.append({
                "trace": name, "replicas": num_replicas, "load": load, "slack": slack, "one_pool_hit_ratio": pooled,
                "ways": {way: {"hit_ratio": each.hit_ratio, "imbalance": each.imbalance,
                                "imbalance_of_minutes": each.imbalance_of_minutes, "busy": each.busy,
                                "p50_s": each.first_token_percentile_s(50), "p99_s": each.first_token_percentile_s(99)}
                         for way, each in figures.items()},
            })  # fmt: skip
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": describe(), "decision_us": times, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
