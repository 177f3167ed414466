"""The virtual server against the naive one: every count of every report, over random traffic."""

from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.simulation.cost import CostModel
from tests.simulation.naive_server import NaiveConfig, run
from tests.simulation.traffic import assert_equal, assert_same, costs, crowds, scenes, serve

Scene: TypeAlias = tuple[list[TokenizedRequest], NaiveConfig]
preemptions = st.sampled_from(["recompute", "swap"])


def check(scene: Scene, cost: CostModel) -> None:
    requests, config = scene
    report = serve(requests, config, cost)
    naive = run(requests, config, cost)
    assert_same(report, naive)
    check_misses(report)
    check_timeline(report, naive)


def check_misses(report: dict[str, Any]) -> None:
    """Every prompt token of an admitted request either hit, or is told with its cause."""
    misses = report["misses"]
    assert misses["num_tokens"] == sum(misses["by_cause"].values())
    assert misses["num_tokens"] == report["requests"]["num_prompt_tokens"] - report["hits"]["num_hit_tokens"]
    assert min(misses["by_cause"].values()) >= 0
    assert misses["by_cause"]["keys"] == misses["by_cause"]["other"] == 0, "no trace has keys, and no step fails"


def check_timeline(report: dict[str, Any], naive: dict[str, Any]) -> None:
    """The intervals cover the replay, and their sums and weighted means are the report's."""
    timeline, intervals = report["timeline"], naive["intervals"]
    durations = timeline["duration_s"]
    assert len(durations) <= 512
    assert_equal(sum(durations), sum(interval.duration_s for interval in intervals), "duration")
    assert sum(timeline["num_preemptions"]) == naive["preemptions"]["num_recompute"] + naive["preemptions"]["num_swap"]
    assert sum(timeline["num_computed_tokens"]) == naive["steps"]["num_computed_tokens"]
    (pool,) = timeline["pools"].values()
    for series, key in (
        *((timeline, key) for key in ("num_running", "num_waiting", "num_swapped", "num_sequences")),
        *((pool, key) for key in ("num_live", "num_cached", "num_free")),
    ):
        weighted = sum(value * duration for value, duration in zip(series[key], durations, strict=True))
        expected = sum(getattr(interval, key) * interval.duration_s for interval in intervals)
        assert_equal(float(weighted), float(expected), f"timeline {key}")


@given(scenes("recompute", most_samples=1), costs)
def test_recomputing_is_counted_as_the_naive_server_counts(scene: Scene, cost: CostModel) -> None:
    check(scene, cost)


@given(scenes("recompute"), costs)
def test_samples_are_counted_as_the_naive_server_counts(scene: Scene, cost: CostModel) -> None:
    check(scene, cost)


@pytest.mark.interpreted
@given(scenes("swap"), costs)
def test_swapping_is_counted_as_the_naive_server_counts(scene: Scene, cost: CostModel) -> None:
    check(scene, cost)


@given(st.data(), preemptions, costs)
def test_crowds_are_counted_as_the_naive_server_counts(data: st.DataObject, preemption: str, cost: CostModel) -> None:
    check(data.draw(crowds(preemption)), cost)


@given(st.data(), st.integers(2, 4), preemptions, costs)
def test_beams_are_counted_as_the_naive_server_counts(
    data: st.DataObject, beam_width: int, preemption: str, cost: CostModel
) -> None:
    check(data.draw(scenes(preemption, beam_width=beam_width, most_samples=1)), cost)


@pytest.mark.long
@settings(max_examples=2000)
@given(st.data(), preemptions, st.none() | st.integers(2, 4), costs)
def test_everything_is_counted_as_the_naive_server_counts(
    data: st.DataObject, preemption: str, beam_width: int | None, cost: CostModel
) -> None:
    check(data.draw(scenes(preemption, beam_width=beam_width) | crowds(preemption)), cost)
