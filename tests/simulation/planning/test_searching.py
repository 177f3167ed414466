"""The search for the highest load that holds: against all loads of its grid, and where there is no answer."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from pagedkv.planner.traces.request import Request
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.planning import Bounds, LoadLimit, LoadSearch, PlanPoint, run_point
from pagedkv.simulation.planning.figures import FAILS, HOLDS, TOO_SHORT
from pagedkv.simulation.planning.searching import HIGHEST_LOAD, grid_load, limit_of

GRID = [grid_load(step) for step in range(-60, 80)]


def searched(verdict_of: "dict[float, str]") -> tuple[LoadLimit, int]:
    """Search by known verdicts; give what was found and how many loads were run."""
    search, found = LoadSearch(), []
    while (load := search.next_load()) is not None:
        found.append((load, verdict_of[load]))
        search.record(verdict_of[load])
    return limit_of(found), len(found)


@given(place=st.integers(-40, 70), short=st.integers(1, 100))
def test_the_search_finds_where_loads_end_to_hold(place: int, short: int) -> None:
    limit = grid_load(place)
    too_short = grid_load(min(79, max(place, 0) + short))
    verdicts = {load: HOLDS if load <= limit else TOO_SHORT if load >= too_short else FAILS for load in GRID}
    found, num_runs = searched(verdicts)
    assert found == LoadLimit(limit, grid_load(place + 1), verdicts[grid_load(place + 1)] == FAILS)
    assert num_runs <= 14


def test_a_search_ends_where_nothing_fails_or_holds_or_is_told() -> None:
    assert searched(dict.fromkeys(GRID, HOLDS))[0] == LoadLimit(grid_load(72), None, is_decided=False)
    assert grid_load(72) <= HIGHEST_LOAD
    assert searched(dict.fromkeys(GRID, FAILS))[0] == LoadLimit(None, grid_load(-48), is_decided=True)
    assert searched(dict.fromkeys(GRID, TOO_SHORT)) == (LoadLimit(None, 1.0, is_decided=False), 1)


def test_what_holds_above_a_load_that_fails_is_not_counted() -> None:
    assert limit_of([(1, HOLDS), (2, FAILS), (4, HOLDS)]) == LoadLimit(1, 2, is_decided=True)
    assert limit_of([(4, HOLDS), (2, FAILS)]) == LoadLimit(None, 2, is_decided=True)


@pytest.mark.parametrize("ttft_s", [pytest.param(None, marks=pytest.mark.long), 3.0])
def test_a_search_on_a_trace_finds_what_all_loads_of_the_grid_tell(ttft_s: float | None) -> None:
    random = [0.7, 1.9, 0.2, 1.1, 2.3, 0.4, 1.6, 0.9]
    arrivals, now_s = [], 0.0
    for number in range(160):
        arrivals.append(now_s)
        now_s += random[number % 8] * 2
    requests = [Request(each, 8 + number % 5, 1 + number % 3) for number, each in enumerate(arrivals)]
    config = ServingConfig(num_blocks=60, block_size=4, max_sequences=2, max_batched_tokens=16)
    point = PlanPoint(config, CostModel(fixed_s=1.0), Bounds(ttft_s=ttft_s))

    def verdict(load: float) -> str:
        return run_point(replace(point, config=replace(config, load=load)), requests).steadiness.verdict

    all_verdicts = {load: verdict(load) for load in (grid_load(step) for step in range(-4, 17))}
    found, num_runs = searched(all_verdicts)
    assert found == limit_of(all_verdicts.items())
    assert found.held is not None
    assert found.is_decided
    assert num_runs < len(all_verdicts) / 2
