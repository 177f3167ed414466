"""Replays whose steps overlap: the engine's mode, worked out on paper, and with pools that are far too small."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.cost import CostModel
from tests.simulation.traffic import crowds, request_of, scenes

ONE_SECOND = CostModel(fixed_s=1.0)
ROOMY = ServingConfig(num_blocks=200, block_size=4)


def test_a_step_is_scheduled_when_the_one_before_it_begins() -> None:
    """Without overlap B, which comes in the first step, is in the second; with it the second is scheduled by then."""
    requests = [request_of([1, 2, 3], range(50, 54)), request_of([7, 8], [90, 91], arrival_s=0.5)]
    found = {}
    for overlap in (False, True):
        server = VirtualServer(replace(ROOMY, overlap=overlap), ONE_SECOND)
        result = server.run(requests)
        server.check()
        found[overlap] = server.now_s, server.num_steps, result.latency["first_token_s"]["max"]
    assert found[False] == (4.0, 4, 1.5)
    assert found[True] == (4.0, 4, 2.5)


@given(st.data())
@settings(max_examples=15)
def test_all_are_served_and_say_the_same(data: st.DataObject) -> None:
    """Whatever is preempted; as many tokens as without overlap, in all."""
    preemption = data.draw(st.sampled_from(["recompute", "swap"]))
    beam_width = data.draw(st.sampled_from([None, None, 2]))
    kind = scenes(preemption, beam_width=beam_width) if data.draw(st.booleans()) or beam_width else crowds(preemption)
    requests, naive = data.draw(kind)
    results = []
    for overlap in (False, True):
        server = VirtualServer(ServingConfig(**asdict(naive), overlap=overlap), ONE_SECOND)
        for request in requests:
            server.offer(request)
        server.finish()
        server.check()
        results.append(server.result())
    plain, ahead = results
    assert ahead.requests == plain.requests
    assert all(pool.num_in_use == pool.num_deferred == 0 for pool in server.statistics().pools)
    assert ahead.as_dict()["config"] == {**plain.as_dict()["config"], "overlap": True}


@pytest.mark.parametrize("num_blocks", [14, 200])
def test_a_decoding_sequence_gets_a_token_in_every_step(num_blocks: int) -> None:
    """One step a token, also behind prompts in chunks; a short pool is drained before a request is preempted."""
    requests = [request_of([number] * 9, range(100 * number, 100 * number + 20)) for number in range(1, 5)]
    config = replace(ROOMY, num_blocks=num_blocks, max_batched_tokens=300, overlap=True)
    server = VirtualServer(config, ONE_SECOND)
    result = server.run(requests)
    assert result.requests["num_finished"] == 4
    assert (result.preemptions["num_recompute"] == 0) == (num_blocks == 200)
    if num_blocks == 200:
        assert server.now_s == 20.0
