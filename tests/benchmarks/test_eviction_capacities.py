"""The comparison with LRU at many capacities: what is played where, and what the table says."""

import numpy as np
import pytest

from benchmarks import eviction_capacities
from benchmarks.eviction_capacities import TOLD, against_lru, as_told, capacities_of, points_against_lru, turning
from pagedkv.planner.capacity.pool_hits import lru_hits_by_capacity

pytestmark = pytest.mark.plain_only


def test_capacities_reach_from_where_lru_has_little_to_beyond_where_it_has_nearly_all() -> None:
    references = turning(num_requests=400)
    lru = lru_hits_by_capacity(references)
    capacities = capacities_of(references, 12)
    assert capacities == sorted(set(capacities))
    assert lru[capacities[0] - 1] < 0.15 * lru[-1] <= lru[capacities[0]]
    assert lru[min(capacities[-1], len(lru) - 1)] >= 0.99 * lru[-1]


def test_who_goes_on_turns_in_the_middle() -> None:
    references = turning(num_requests=2000)
    went_on = np.zeros(len(references.last_blocks), bool)
    seen = {int(last): request for request, last in enumerate(references.last_blocks)}
    for request, (last, num_blocks) in enumerate(
        zip(references.last_blocks.tolist(), references.num_prompt_blocks.tolist(), strict=True)
    ):
        block = last
        for _ in range(num_blocks - 1):
            block = int(references.parents[block])
            if block in seen and seen[block] < request:
                went_on[seen[block]] = True
    is_long = references.output_lengths > 100
    for half, expected in ((slice(0, 900), True), (slice(1000, 1800), False)):
        long, short = went_on[half][is_long[half]].mean(), went_on[half][~is_long[half]].mean()
        assert (long > 3 * short) == expected
        assert (short > 3 * long) != expected


def test_lru_has_as_many_points_as_lru() -> None:
    assert points_against_lru(turning(num_requests=60), "lru", 20) == 0


def test_the_table_tells_the_worst_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {10: 1.0, 20: -0.25, 30: 0.75}
    monkeypatch.setattr(eviction_capacities, "capacities_of", lambda *_: list(points))
    monkeypatch.setattr(
        eviction_capacities, "points_against_lru", lambda _references, _policy, capacity: points[capacity]
    )
    monkeypatch.setattr(eviction_capacities, "as_told", lambda references, _told: references)
    made = {"made": lambda: turning(num_requests=1)}
    done: list[str] = []
    assert against_lru(made, policies=["fifo"], show=done.append).splitlines() == [
        "| points against LRU | | capacities | worst | at | mean | best |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| made | fifo | 3 | -0.25 | 20 | +0.50 | +1.00 |",
    ]
    assert done == ["made"] * 3
    told = against_lru(made, policies=["fifo"], told=["nothing", "time and outputs"]).splitlines()[2:]
    assert [line.split(" | ")[1] for line in told] == ["fifo, told nothing", "fifo"]


def test_a_policy_is_told_the_time_and_outputs_as_is_said_and_serves_the_same_prompts() -> None:
    references = turning(num_requests=60)
    for told in TOLD:
        played = as_told(references, told)
        assert played.last_blocks is references.last_blocks
        assert (played.arrivals_s is references.arrivals_s) == ("time" in told)
        assert (played.output_lengths is references.output_lengths) == ("outputs" in told)
        assert bool(played.arrivals_s.any()) == ("time" in told)
        assert bool((played.output_lengths >= 0).any()) == ("outputs" in told)
