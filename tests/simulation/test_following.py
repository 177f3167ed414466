"""Further meters follow a replay, and its requests are recorded: no result changes, and the records add up to them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.scheduling import Batch, Progress, Request
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import MissMeter, RequestLog
from pagedkv.simulation.server import ReplayedRequest, RequestsUnderWay
from tests.simulation.traffic import request_of, traces

ONE_SECOND = CostModel(fixed_s=1.0)
SMALL = ServingConfig(14, block_size=4, max_sequences=4, max_batched_tokens=32)


class Follower(RequestLog):
    """Records requests as a page does."""

    def __init__(self, server: VirtualServer) -> None:
        super().__init__(SMALL.scheduling_config())
        self.under_way = RequestsUnderWay(server.space)
        self.all: list[ReplayedRequest] = []
        self.held_s = 0.0

    def arrived(self, request: Request, arrival_s: float, *, has_content: bool, tenant: str | None = None) -> None:
        """Record a request."""
        super().arrived(request, arrival_s, has_content=has_content, tenant=tenant)
        self.all.append(self.under_way.arrived(request))

    def rejected(self, request: Request) -> None:
        """Record its end."""
        self.under_way.rejected(request)

    def scheduled(self, batch: Batch, now_s: float) -> None:
        """Record admissions."""
        del now_s
        self.num_preemptions += len(batch.preempted)
        self.under_way.scheduled(batch)

    def hold(self, duration_s: float, *_: object) -> None:
        """Sum up the time."""
        self.held_s += duration_s

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Record ends."""
        del end_s
        self.under_way.progressed(progress)


def followed(requests: list[TokenizedRequest], config: ServingConfig) -> tuple[dict[str, Any], Follower]:
    server = VirtualServer(config, ONE_SECOND)
    follower = Follower(server)
    server.follow(follower)
    result = server.run(requests).as_dict()
    server.check()
    return result, follower


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(traces(), st.sampled_from([SMALL, replace(SMALL, overlap=True)]))
def test_a_follower_changes_nothing_and_its_records_add_up(
    requests: list[TokenizedRequest], config: ServingConfig
) -> None:
    result, follower = followed(requests, config)
    assert result == VirtualServer(config, ONE_SECOND).run(requests).as_dict()
    assert not follower.under_way.requests
    served = [each for each in follower.all if each.finish_reason == "length"]
    assert [each.number for each in follower.all] == [*range(len(requests))]
    assert len(served) == result["requests"]["num_finished"]
    assert sum(each.finish_reason == "rejected" for each in follower.all) == result["requests"]["num_rejected"]
    assert sum(each.num_generated_tokens for each in served) == result["requests"]["num_output_tokens"]
    assert sum(each.num_cached_tokens or 0 for each in follower.all) == result["hits"]["num_hit_tokens"]
    assert sum(each.num_preemptions for each in follower.all) == result["preemptions"]["num_recompute"]
    assert follower.num_preemptions == result["preemptions"]["num_recompute"]
    assert follower.held_s == pytest.approx(result["steps"]["virtual_s"])
    meter = MissMeter()
    for each in follower.all:
        if each.explanation is not None:
            assert each.num_cached_tokens is not None
            num_missed = sum(miss.num_tokens for miss in each.explanation.misses)
            assert num_missed == each.scheduled.num_prompt_tokens - each.num_cached_tokens
            meter.note(each.explanation.misses)
    assert meter.as_dict() == result["misses"]


def test_preemptions_are_recorded() -> None:
    requests = [request_of(range(100 * number, 100 * number + 8), range(30), 0.0) for number in range(4)]
    result, follower = followed(requests, SMALL)
    assert sum(each.num_preemptions for each in follower.all) == result["preemptions"]["num_recompute"] > 0
    assert {each.tier_notes for each in follower.all} == {()}
