"""Models of several groups, every eviction policy: what must hold whatever the rules of the groups are."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.contract.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.cost import CostModel
from tests.compiling import TESTED_POLICIES
from tests.simulation.traffic import request_of, traces

MIXES: dict[str, tuple[GroupSpec, ...]] = {
    "full": (FullAttention(2, pool="full"),),
    "full and window": (FullAttention(4, pool="full"), SlidingWindow(6, 4, num_sink_tokens=2, pool="window")),
    "window": (SlidingWindow(5, 2, pool="window"),),
    "full and chunk": (FullAttention(2, pool="full"), ChunkedLocal(8, 4, pool="chunk")),
    "full and state": (FullAttention(2, pool="full"), RecurrentState(4, pool="state")),
    "all in two pools": (FullAttention(2, pool="a"), SlidingWindow(4, 2, pool="a"), RecurrentState(4, pool="b")),
}


END_AT_ANY_BLOCK = {"full", "window", "full and state", "all in two pools"}  # of 2 tokens; states are kept there


def served(mix: str, requests: list[TokenizedRequest], options: dict[str, Any]) -> tuple[VirtualServer, dict[str, Any]]:
    """Serve some requests, the space proving its invariants after each."""
    groups = MIXES[mix]
    server = VirtualServer(ServingConfig(groups=groups, block_size=groups[0].block_size, **options), CostModel(0.25))
    for request in requests:
        server.offer(request)
        server.check()
    server.finish()
    server.check()
    return server, server.result().as_dict()


@pytest.mark.parametrize("mix", MIXES)
@settings(deadline=None, max_examples=8)
@given(
    requests=traces(most_samples=3),
    num_blocks=st.integers(6, 60),
    options=st.fixed_dictionaries(
        {
            "num_host_blocks": st.just(0) | st.integers(2, 30),
            "max_sequences": st.integers(3, 8),
            "max_batched_tokens": st.integers(8, 40),
            "eviction": st.sampled_from(TESTED_POLICIES),
            "beam_width": st.none() | st.none() | st.integers(1, 3),
        }
    ),
)
def test_totals_add_up(mix: str, requests: list[TokenizedRequest], num_blocks: int, options: dict[str, Any]) -> None:
    preemption = "swap" if options["num_host_blocks"] else "recompute"
    server, result = served(mix, requests, {"num_blocks": num_blocks, "preemption": preemption, **options})
    counts = result["requests"]
    assert counts["num_finished"] + counts["num_rejected"] == counts["num_requests"] == len(requests)
    assert 0 <= result["hits"]["num_hit_tokens"] <= counts["num_prompt_tokens"]
    assert sum(result["timeline"]["duration_s"]) == pytest.approx(result["steps"]["virtual_s"])
    assert result["steps"]["busy_s"] == pytest.approx(0.25 * result["steps"]["num_steps"])
    for pool in server.statistics().pools:
        told = result["pools"][pool.name]
        assert told["num_evictions"] == sum(told["evictions_by_age"]["num_blocks"])
        assert 0 <= told["num_never_reused"] <= told["num_evictions"] <= pool.num_evictions
        assert pool.num_in_use == pool.num_deferred == 0
        total = sum(told[level]["mean"] for level in ("num_live", "num_cached", "num_free"))
        assert total <= told["num_blocks"] + 1e-9


def test_a_window_holds_no_more_than_its_blocks() -> None:
    requests = [request_of(range(100), range(200, 260))]
    _, result = served("full and window", requests, {"num_blocks": 60, "max_batched_tokens": 8, "max_sequences": 4})
    full, window = result["pools"]["full"], result["pools"]["window"]
    assert full["num_live"]["peak"] == -(-159 // 4)
    # The window's blocks and a chunk's before it slides, and the sinks'.
    assert window["num_live"]["peak"] <= 6 // 4 + 2 + 8 // 4 + 1
    assert result["requests"]["num_finished"] == 1


def test_the_same_prompt_again_hits_in_every_group() -> None:
    requests = [request_of(range(40), range(200, 204), arrival_s) for arrival_s in (0.0, 100.0)]
    for mix in MIXES:
        _, result = served(mix, requests, {"num_blocks": 80, "max_sequences": 4})
        assert result["hits"]["num_hit_tokens"] == 36 + 2 * (mix in END_AT_ANY_BLOCK), mix
        assert all(sum(pool["hits_by_age"]["num_blocks"]) > 0 for pool in result["pools"].values()), mix
