"""A replica as Serve calls it, without Serve: its messages, its numbers, its health, its events."""

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

from pagedkv.memory.contract.errors import EngineError, RequestError
from pagedkv.memory.routing import IndexState, ReplicaIndex
from pagedkv.memory.sockets import EventFollower, follow
from pagedkv.serving.cluster import ReplicaSpec
from pagedkv.serving.cluster.messages import ReplicaFacts, ReplicaMessage, RoutedRequest
from pagedkv.serving.cluster.replica import EngineReplica
from pagedkv.serving.engine import EngineConfig, Intent, SamplingParams

PROMPT: Final = np.arange(20, 70, dtype=np.int32)
PARAMS: Final = SamplingParams(max_tokens=6, ignore_eos=True)
MOST_POLLS: Final = 100


@pytest.fixture(scope="module")
def replica() -> Iterator[EngineReplica]:
    replica = EngineReplica(ReplicaSpec(None, "float32", EngineConfig(num_blocks=60, block_size=8, self_test=False)))
    yield replica
    asyncio.run(replica._engine.stop())


def messages_of(replica: EngineReplica, request: RoutedRequest) -> list[ReplicaMessage]:
    """Return all messages of one request."""

    async def collect() -> list[ReplicaMessage]:
        return [message async for message in replica.generate(request)]

    return asyncio.run(collect())


def test_messages_are_an_acceptance_then_tokens_then_the_end(replica: EngineReplica) -> None:
    first, *middle, last = messages_of(replica, RoutedRequest(0, PROMPT, PARAMS, Intent()))
    assert not first.updates
    assert not first.is_over
    assert {message.num_cached_tokens for message in middle} == {0}
    tokens = [token for message in middle for each in message.updates for token in each.token_ids]
    assert last.output is not None
    assert tuple(tokens) == last.output.token_ids
    again = messages_of(replica, RoutedRequest(1, PROMPT, PARAMS, Intent()))
    assert {message.num_cached_tokens for message in again[1:-1]} == {48}
    continued = messages_of(replica, RoutedRequest(2, PROMPT, PARAMS, Intent(answered=tuple(tokens[:2]))))
    assert [token for message in continued for each in message.updates for token in each.token_ids] == tokens[2:]


def test_a_refusal_is_a_message(replica: EngineReplica) -> None:
    (refused,) = messages_of(replica, RoutedRequest(3, PROMPT, SamplingParams(max_tokens=2), Intent(answered=(5, 6))))
    assert isinstance(refused.problem, RequestError)
    assert refused.is_over
    assert not refused.is_lost


def test_numbers_are_those_of_the_engine(replica: EngineReplica) -> None:
    async def during() -> tuple[dict[str, Any], dict[str, float]]:
        long = RoutedRequest(4, PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), Intent())
        stream = replica.generate(long)
        await anext(stream)
        await anext(stream)
        numbers = await replica.record_routing_stats(), await replica.record_autoscaling_stats()
        await stream.aclose()
        return numbers

    routing, scaling = asyncio.run(during())
    assert routing["num_running"] == 1
    assert routing["num_blocks"] == 59
    assert routing["num_live"] >= 7
    assert scaling["num_waiting"] == 0
    assert routing["num_live"] / 59 <= scaling["blocks_in_use"] <= 1, "read a moment later, and the answer only grows"
    facts = replica.record_replica_metadata()["facts"]
    assert isinstance(facts, ReplicaFacts)
    assert facts == replica.facts()


def test_events_make_an_index_exact(replica: EngineReplica) -> None:
    facts = replica.facts()
    index = ReplicaIndex(facts.groups, weights_epoch=facts.weights_epoch)
    index.add_replica("r")
    with EventFollower(facts.events, facts.replays, facts.groups) as follower:
        for _ in range(MOST_POLLS):
            for message in follower.poll(0.2):
                follow(index, "r", message, 0.0)
            if index.state("r") is IndexState.EXACT and index.view("r").num_blocks:
                break
    assert index.state("r") is IndexState.EXACT
    assert index.hits(index.hash(PROMPT))["r"] == 48


def test_a_failed_engine_is_unhealthy_and_its_requests_are_lost() -> None:
    replica = EngineReplica(ReplicaSpec(None, "float32", EngineConfig(num_blocks=60, block_size=8, self_test=False)))
    asyncio.run(replica.check_health())
    asyncio.run(replica._engine.stop())
    with pytest.raises(EngineError, match="has failed"):
        asyncio.run(replica.check_health())
    (lost,) = messages_of(replica, RoutedRequest(0, PROMPT, PARAMS, Intent()))
    assert lost.is_lost
