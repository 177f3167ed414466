"""Points: the same seconds and hits as a replay has; bounds, parts, and the two ways in which requests arrive."""

import math

import msgspec
import numpy as np
import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import Request
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.closed_loop import ClosedLoop
from pagedkv.simulation.cluster import ClusterSetting, Network
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import StepHistogram
from pagedkv.simulation.planning import Bounds, PlanPoint, PointFigures, run_point

COSTS = CostModel(fixed_s=0.01, token_compute_s=0.001)
CONFIG = ServingConfig(num_blocks=60, block_size=4, max_sequences=4, max_batched_tokens=16)


def traffic(num_requests: int = 24, seed: int = 3) -> list[Request]:
    random = np.random.default_rng(seed)
    arrivals = np.sort(random.uniform(0, 2, num_requests)).round(3)
    return [
        Request(
            float(arrival_s),
            int(random.integers(4, 40)),
            int(random.integers(0, 50)),
            np.arange(1, 1 + random.integers(1, 4), dtype=np.int64),
            block_size=8,
            session=f"s{random.integers(4)}",
        )
        for arrival_s in arrivals
    ]


def checked(requests: list[Request]) -> list[Request]:
    """Give prompts as long as their ids."""
    return [
        Request(r.arrival_s, max(r.input_length, 8 * len(r.block_ids) + 1), r.output_length, r.block_ids, 8, r.session)
        for r in requests
        if r.block_ids is not None
    ]


@pytest.mark.parametrize("load", [1.0, 4.0])
def test_a_point_is_a_replay_without_its_meters(load: float) -> None:
    requests = checked(traffic())
    config = ServingConfig(num_blocks=26, block_size=4, max_sequences=4, max_batched_tokens=16, load=load)
    figures = run_point(PlanPoint(config, COSTS), requests)
    server = VirtualServer(config, COSTS)
    replay = server.run(requests)
    assert figures.num_hit_tokens == replay.hits["num_hit_tokens"] > 0
    assert figures.num_prompt_tokens == replay.requests["num_prompt_tokens"]
    assert figures.num_output_tokens == replay.requests["num_output_tokens"]
    assert figures.num_preemptions == replay.preemptions["num_recompute"] > 0
    assert (figures.num_steps, figures.busy_s) == (replay.steps["num_steps"], replay.steps["busy_s"])
    assert figures.ttft_s == {name: v for name, v in replay.latency["first_token_s"].items() if name != "max"}
    assert sum(part.num_hit_tokens for part in figures.parts) == figures.num_hit_tokens
    assert sum(part.num_finished for part in figures.parts) == figures.num_finished == len(requests)
    assert sum(part.span_s for part in figures.parts) == pytest.approx(figures.span_s)


def test_times_by_hand() -> None:
    request = Request(1.0, 10, 4)  # 0.02 s for the prompt, then three steps of 0.011 s
    figures = run_point(PlanPoint(CONFIG, COSTS, Bounds(ttft_s=0.0201, tpot_s=0.0111)), [request])
    assert figures.ttft_s["p50"] == pytest.approx(0.02)
    assert figures.tpot_s["p50"] == pytest.approx(0.011)
    assert figures.itl_s["p50"] == pytest.approx(0.011, rel=0.01)
    assert figures.num_good == 1
    assert figures.goodput_per_s == pytest.approx(1 / 0.053)
    assert (figures.hit_ratio, figures.has_content) == (None, False)
    assert run_point(PlanPoint(CONFIG, COSTS, Bounds(ttft_s=0.0199)), [request]).num_good == 0
    assert run_point(PlanPoint(CONFIG, COSTS, Bounds(tpot_s=0.0109)), [request]).num_good == 0


def test_rejected_requests_are_not_good() -> None:
    figures = run_point(PlanPoint(CONFIG, COSTS, Bounds(ttft_s=10)), [Request(0.0, 10_000, 1), Request(0.0, 8, 1)])
    assert (figures.num_requests, figures.num_rejected, figures.num_good) == (2, 1, 1)


def test_a_trace_that_no_request_of_is_served_has_no_figures() -> None:
    figures = run_point(PlanPoint(CONFIG, COSTS), [Request(0.0, 10_000, 1)])
    assert (figures.num_finished, figures.throughput_per_s, figures.ttft_s["p50"]) == (0, 0.0, None)


def test_figures_come_back_from_json() -> None:
    figures = run_point(PlanPoint(CONFIG, COSTS), checked(traffic(5)))
    assert msgspec.convert(figures.as_dict(), PointFigures) == figures


def chat(session: str, *turns: tuple[float, int]) -> list[Request]:
    return [Request(arrival_s, 8, output, session=session) for arrival_s, output in turns]


def test_in_a_closed_loop_a_turn_comes_a_think_time_after_the_answer() -> None:
    slow = CostModel(fixed_s=1.0)
    turns = chat("a", (0.0, 3), (5.0, 1))  # answered at 10 tokens a second, so thought for 4.7 s
    point = PlanPoint(CONFIG, slow, loop=ClosedLoop(10.0))
    assert run_point(point, turns).span_s == pytest.approx(3 + 4.7 + 1)
    assert run_point(PlanPoint(CONFIG, slow), turns).span_s == pytest.approx(5 + 1)


def test_who_does_not_think_asks_at_once_and_sessions_do_not_wait_for_one_another() -> None:
    turns = sorted(
        [*chat("a", (0.0, 3), (0.1, 1)), *chat("b", (0.5, 1)), Request(0.6, 8, 1)], key=lambda r: r.arrival_s
    )
    figures = run_point(PlanPoint(CONFIG, CostModel(fixed_s=1.0), loop=ClosedLoop(10.0)), turns)
    assert figures.num_finished == 4
    assert figures.span_s == pytest.approx(4.0), "the second turn of a is computed in the fourth step"


def test_a_load_brings_sessions_together_and_leaves_think_times() -> None:
    turns = [*chat("a", (0.0, 1), (7.0, 1)), *chat("b", (8.0, 1))]
    fast = ServingConfig(num_blocks=60, block_size=4, max_sequences=4, max_batched_tokens=16, load=4.0)
    figures = run_point(PlanPoint(fast, CostModel(fixed_s=1.0), loop=ClosedLoop(10.0)), turns)
    assert figures.span_s == pytest.approx(1 + 6.9 + 1)


def test_a_rejected_turn_does_not_end_its_session() -> None:
    turns = [Request(0.0, 10_000, 1, session="a"), Request(1.0, 8, 1, session="a")]
    assert run_point(PlanPoint(CONFIG, COSTS, loop=ClosedLoop()), turns).num_finished == 1


def test_bounds_that_make_no_sense_are_refused() -> None:
    for seconds in (0.0, -1.0, math.nan, 1e9):
        with pytest.raises(ConfigurationError, match="`ttft_s` must be over 0"):
            Bounds(ttft_s=seconds)
    with pytest.raises(ConfigurationError, match=r"`tpot_s=0.005` cannot be met: .* at least 0.011 seconds"):
        Bounds(tpot_s=0.005).require_possible("mine", COSTS)
    with pytest.raises(ConfigurationError, match="`answer_tokens_per_s` must be positive"):
        ClosedLoop(0.0)


def test_the_histogram_is_within_a_percent() -> None:
    histogram = StepHistogram()
    assert histogram.percentile_s(50) is None
    for number in range(1, 1001):
        histogram.add(number / 1000, 3)
    for percent in (10, 50, 90, 99):
        assert histogram.percentile_s(percent) == pytest.approx(percent / 100, rel=0.01)


def test_a_cluster_of_one_is_a_server_and_its_figures_come_back_from_a_file() -> None:
    requests = checked(traffic())
    alone = run_point(PlanPoint(CONFIG, COSTS, Bounds(ttft_s=0.5)), requests)
    point = PlanPoint(CONFIG, COSTS, Bounds(ttft_s=0.5), cluster=ClusterSetting(1))
    figures = run_point(point, requests)
    assert alone.as_dict().items() <= figures.as_dict().items()
    assert figures.cluster is not None
    assert figures.cluster.imbalance == 1
    assert figures.cluster.num_by_reason == {"it is the only one": len(requests)}
    assert msgspec.convert(figures.as_dict(), PointFigures) == figures
    assert "cluster" not in alone.as_dict()
    assert point.as_dict()["cluster"] != PlanPoint(CONFIG, COSTS, cluster=ClusterSetting(2)).as_dict()["cluster"]


def test_a_cluster_counts_each_request_once_and_shows_each_arrival() -> None:
    requests, shown = checked(traffic()), []
    point = PlanPoint(CONFIG, COSTS, cluster=ClusterSetting(3, "least-loaded", network=Network(delay_s=0.2, loss=0.3)))
    figures = run_point(point, requests, lambda: shown.append(1))
    assert figures.num_requests == figures.num_finished == len(shown) == len(requests)
    assert sum(part.num_finished for part in figures.parts) == len(requests)


def test_wrong_clusters_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a closed loop has one server"):
        PlanPoint(CONFIG, COSTS, loop=ClosedLoop(), cluster=ClusterSetting(2))
    with pytest.raises(ConfigurationError, match="replicas"):
        ClusterSetting(0)
    with pytest.raises(ConfigurationError, match="routing must be one of"):
        ClusterSetting(2, "random")  # type: ignore[arg-type]
