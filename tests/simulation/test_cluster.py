"""Replicas on one virtual clock, behind the router that serves."""

from dataclasses import replace

import numpy as np
import pytest

from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.routing import Routing, RoutingRules
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.cluster import ClusterFigures, Network, VirtualCluster
from pagedkv.simulation.cost import CostModel

pytestmark = pytest.mark.interpreted

CONFIG = ServingConfig(num_blocks=60, block_size=4, max_sequences=4, max_batched_tokens=64)
COSTS = CostModel(fixed_s=0.01, token_compute_s=0.001)
LATE = Network(delay_s=0.1, loss=0.2, heartbeat_s=0.2)


def sessions(num_sessions: int = 6, num_turns: int = 6, seed: int = 1) -> list[TokenizedRequest]:
    """Conversations that grow, in an order of arrival that mixes them."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 1000, 24 + 12 * num_turns).astype(np.int32) for _ in range(num_sessions)]
    arrivals = np.sort(rng.uniform(0, 12, num_sessions * num_turns))
    turns = dict.fromkeys(range(num_sessions), 0)
    requests = []
    for arrival_s in arrivals.tolist():
        session = int(rng.choice([each for each, turn in turns.items() if turn < num_turns]))
        turns[session] += 1
        prompt = texts[session][: 24 + 12 * turns[session]]
        requests.append(TokenizedRequest(arrival_s, prompt, np.arange(4, dtype=np.int32)))
    return requests


def serve(
    num_replicas: int, routing: Routing = "prefix", network: Network | None = None, config: ServingConfig = CONFIG
) -> ClusterFigures:
    cluster = VirtualCluster(config, COSTS, num_replicas, routing=routing, network=network)
    figures = cluster.run(sessions())
    cluster.check()
    assert len(cluster.router.loads) == 0, "a request is still outstanding"
    return figures


def test_one_replica_is_a_server() -> None:
    figures = serve(1)
    server = VirtualServer(CONFIG, COSTS)
    result = server.run(sessions()).as_dict()
    assert figures.num_requests == 36
    assert figures.hit_ratio == pytest.approx(result["hits"]["token_hit_ratio"])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("network", [Network(), LATE], ids=["at once", "late"])
def test_every_request_is_served_and_exact_indexes_are_exact(network: Network, *, overlap: bool) -> None:
    figures = serve(3, network=network, config=replace(CONFIG, overlap=overlap))
    assert not np.isnan(figures.first_token_s).any()
    assert len(figures.first_token_s) == figures.num_requests == 36
    assert (figures.num_lost_batches > 0) == (figures.num_snapshots > 0) == (network.loss > 0)
    assert sum(figures.num_by_reason.values()) == 36


def test_routing_by_what_is_cached_hits_more_than_in_turn() -> None:
    late, turns = serve(3, network=LATE), serve(3, "round-robin")
    assert serve(3).hit_ratio >= late.hit_ratio > turns.hit_ratio + 0.1


def test_it_is_the_same_every_time() -> None:
    first, second = serve(3, network=LATE), serve(3, network=LATE)
    assert first.num_by_reason == second.num_by_reason
    assert (first.first_token_s == second.first_token_s).all()
    assert (first.computed_tokens == second.computed_tokens).all()


def test_imbalance_is_the_largest_over_the_mean_of_each_minute() -> None:
    figures = replace(serve(2), computed_tokens=np.array([[30.0, 0, 10], [10.0, 0, 10]]))
    assert figures.imbalance == pytest.approx((30 + 10) / (20 + 10))
    assert figures.imbalance_of_minutes == pytest.approx((1.5 + 1) / 2)
    assert replace(figures, computed_tokens=np.zeros((2, 1))).imbalance == 1


def test_a_trace_of_three_thousand_years_needs_no_array_of_its_minutes() -> None:
    cluster = VirtualCluster(CONFIG, COSTS, 2)
    prompt, output = np.arange(10, dtype=np.int32), np.arange(4, dtype=np.int32)
    figures = cluster.run([TokenizedRequest(arrival_s, prompt, output) for arrival_s in (0.0, 1e11)])
    assert figures.computed_tokens.shape == (2, 1)
    assert figures.imbalance == 2


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_replicas"):
        VirtualCluster(CONFIG, COSTS, 0)
    with pytest.raises(ConfigurationError, match="loss a fraction"):
        Network(loss=1.5)
    with pytest.raises(ConfigurationError, match="heartbeat_s must be above 0"):
        Network(heartbeat_s=0)
    cluster = VirtualCluster(CONFIG, COSTS, 1)
    first, *_, last = sessions()
    cluster.offer(last)
    with pytest.raises(TraceError, match="arrives"):
        cluster.offer(first)


def test_a_burst_costs_one_copy_for_each_further_replica_and_ends_earlier_by_it() -> None:
    """Hits over those of one pool are (n - 2) / (n - 1) with two replicas: 0.98 needs 51 prompts, whatever the rule."""
    rng, num, shared = np.random.default_rng(1), 60, np.arange(200, dtype=np.int32)
    burst = [
        TokenizedRequest(
            0.001 * number, np.append(shared, rng.integers(300, 999, 4, np.int32)), np.arange(8, dtype=np.int32)
        )
        for number in range(num)
    ]
    hits, ends_s = {}, {}
    for name, rules in (("shared out", RoutingRules()), ("never a copy", RoutingRules(lack_weight=1e6))):
        cluster = VirtualCluster(CONFIG, COSTS, 2, rules=rules)
        hits[name] = cluster.run(burst).num_hit_tokens
        cluster.check()
        ends_s[name] = np.mean(cluster.log.end_s)
    assert hits == {"shared out": (num - 2) * len(shared), "never a copy": (num - 1) * len(shared)}
    assert ends_s["shared out"] < 0.7 * ends_s["never a copy"]
