"""Figures by tenant and by window, held against each request's own figures, gathered one by one."""

from collections import defaultdict
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pagedkv.planner.traces.clocks import parse_window
from pagedkv.planner.traces.request import Request
from pagedkv.simulation import VirtualServer
from pagedkv.simulation.meters import RequestLog
from pagedkv.simulation.planning import Bounds, PlanPoint, PointFigures, run_point
from pagedkv.simulation.planning.figures import Division, PartFigures, busiest_and_quietest, parts_of
from tests.simulation.planning.test_point import CONFIG, COSTS, checked, traffic


def tenants_traffic() -> list[Request]:
    return [replace(each, tenant="ab"[n % 3 == 0] if n % 5 else None) for n, each in enumerate(checked(traffic(40)))]


@pytest.mark.parametrize("load", [1.0, 3.0])
def test_parts_are_sums_over_their_own_requests(load: float) -> None:
    requests, bounds = tenants_traffic(), Bounds(ttft_s=0.5, tpot_s=0.05)
    config = replace(CONFIG, load=load)
    figures = run_point(PlanPoint(config, COSTS, bounds), requests, division=Division(parse_window("0.5s")))
    server = VirtualServer(config, COSTS, is_divided=True)
    server.run(requests)
    log = server._log
    assert isinstance(log, RequestLog)
    of_tenant: defaultdict[str, list[int]] = defaultdict(list)
    of_window: defaultdict[int, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        of_tenant[request.tenant or "(none)"].append(number)
        of_window[int((request.arrival_s - requests[0].arrival_s) // 0.5)].append(number)
    by_name = {part.name: part for part in figures.divided if part.kind == "tenant"}
    assert set(by_name) == set(of_tenant)
    for name, numbers in of_tenant.items():
        require_sums(by_name[name], [requests[number] for number in numbers], numbers, log, bounds)
    windows = [part for part in figures.divided if part.kind == "window"]
    assert len(windows) == max(of_window) + 1
    for place, part in enumerate(windows):
        require_sums(part, [requests[number] for number in of_window[place]], of_window[place], log, bounds)
    assert sum(part.num_hit_tokens for part in windows) == figures.num_hit_tokens > 0
    assert sum(part.num_good for part in windows) == figures.num_good < figures.num_requests
    assert msgspec.convert(figures.as_dict(), PointFigures) == figures


def require_sums(
    part: PartFigures, requests: list[Request], numbers: list[int], log: RequestLog, bounds: Bounds
) -> None:
    first_s = [log.first_token_s[number] - log.arrival_s[number] for number in numbers]
    each_s = [
        (log.end_s[number] - log.first_token_s[number]) / (request.output_length - 1)
        if request.output_length > 1
        else 0
        for number, request in zip(numbers, requests, strict=True)
    ]
    assert bounds.ttft_s is not None
    assert bounds.tpot_s is not None
    good = [a <= bounds.ttft_s and b <= bounds.tpot_s for a, b in zip(first_s, each_s, strict=True)]
    assert part.num_requests == part.num_finished == len(requests)
    assert part.num_good == sum(good)
    assert part.num_prompt_tokens == sum(request.input_length for request in requests)
    assert part.num_output_tokens == sum(request.output_length for request in requests)
    assert part.num_offered_tokens == part.num_prompt_tokens + part.num_output_tokens
    assert part.num_hit_tokens == sum(int(log.counts("num_hit_tokens")[number]) for number in numbers)
    assert part.ttft_s["p99"] == (pytest.approx(np.percentile(first_s, 99)) if first_s else None)


def test_the_busiest_window_asks_for_the_most_tokens_a_second_among_whole_ones() -> None:
    arrivals = [*range(5, 10), *(10 + n / 10 for n in range(100)), 20.0, 30.0, 39.0, *(40.0,) * 50]
    requests = [Request(float(at), 8, 2) for at in arrivals]
    server = VirtualServer(CONFIG, COSTS, is_divided=True)
    server.run(requests)
    parts = server.parts(Division(parse_window("10s"), lambda: 1_764_000_000.0))
    extremes = busiest_and_quietest(parts)
    assert extremes is not None
    busiest, quietest = extremes
    assert [part.num_requests for part in parts] == [5, 100, 1, 2, 50]
    assert [part.is_whole for part in parts] == [False, True, True, True, False]
    assert (busiest, quietest) == (parts[1], parts[2])
    assert busiest.offered_tokens_per_s == 100 * 10 / 10
    assert parts_of(RequestLog(CONFIG.scheduling_config()), Bounds(), Division(parse_window("1h"))) == ()


def test_tenants_that_are_kept_apart_do_not_hit_each_other() -> None:
    prompt = np.arange(16, dtype=np.int32)
    for salts, hits in (((None, None, None), 24), (("a", "b", "a"), 12)):
        server = VirtualServer(CONFIG, COSTS, is_divided=True)
        requests = [
            Request(float(n), 16, 1, prompt_token_ids=prompt, tenant=tenant, salt=salt)
            for n, (tenant, salt) in enumerate(zip("aba", salts, strict=True))
        ]
        result = server.run(requests)
        assert result.hits["num_hit_tokens"] == hits
        a, b = server.parts(Division())
        assert (a.num_hit_tokens, b.num_hit_tokens) == (12, hits - 12)
