"""A replica as Serve calls it, without Serve: its messages, its numbers, its health, its events."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from pagedkv.cluster import ReplicaSpec
from pagedkv.cluster.messages import ReplicaFacts, ReplicaMessage, RoutedRequest
from pagedkv.cluster.replica import RESCAN_S, EngineReplica
from pagedkv.cluster.replicated_engine import sums_by_tier
from pagedkv.contract.answers import TierEvents
from pagedkv.engine import EngineConfig, Intent, SamplingParams
from pagedkv.errors import EngineError, RequestError
from pagedkv.events import EventFollower, follow
from pagedkv.routing import IndexState, ReplicaIndex
from pagedkv.tiers import FolderTier, HostTier
from pagedkv.wire import Alive, Applied, FollowedMessage, Snapshot

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


def without_blocks(message: FollowedMessage) -> FollowedMessage:
    """Return a message with the entries of tiers alone."""
    match message:
        case Applied():
            return replace(message, events=tuple(each for each in message.events if isinstance(each, TierEvents)))
        case Snapshot():
            return replace(message, blocks=tuple(each for each in message.blocks if isinstance(each, TierEvents)))
        case Alive():
            return message


def test_entries_of_tiers_are_in_the_index_and_their_numbers_are_added_up(tmp_path: Path) -> None:
    prompt = np.array([place % 150 + 20 for place in range(150)], np.int32)
    tiers = (HostTier("16MiB"), FolderTier(tmp_path, "16MiB"))
    engine = EngineConfig(num_blocks=60, block_size=8, self_test=False, tiers=tiers)
    replica = EngineReplica(ReplicaSpec(None, "float32", engine))
    facts = replica.facts()
    whole, late, of_tiers = (ReplicaIndex(facts.groups, weights_epoch=facts.weights_epoch) for _ in range(3))
    for index in (whole, late, of_tiers):
        index.add_replica("r")
    with EventFollower(facts.events, facts.replays, facts.groups) as follower:
        for _ in range(3):  # a tier may admit what is offered a second time
            messages_of(replica, RoutedRequest(1, prompt, PARAMS, Intent()))
        for _ in range(MOST_POLLS):
            for message in follower.poll(0.2):
                follow(whole, "r", message, 0.0)
                follow(of_tiers, "r", without_blocks(message), 0.0)
            if len(whole.view("r").num_tier_entries) == 2:
                break
    assert whole.state("r") is IndexState.EXACT
    assert whole.hits_by_medium(whole.hash(prompt))["r"] == {"GPU": 144}, "all of it is on the device"
    hits = of_tiers.hits_by_medium(of_tiers.hash(prompt), ("CPU", "FOLDER"))["r"]
    assert hits == {"GPU": 0, "CPU": 128}, "two runs of 64 tokens"
    with EventFollower(facts.events, facts.replays, facts.groups) as follower:
        for _ in range(MOST_POLLS):
            for message in follower.poll(0.2):
                follow(late, "r", message, 0.0)
            if late.state("r") is IndexState.EXACT:
                break
    numbers = asyncio.run(replica.record_routing_stats())
    stored = {tier.medium: tier.store.num_entries for tier in numbers["tiers"]}
    assert stored == {"host": 2, "folder": 2}
    assert late.view("r").num_tier_entries == {"CPU": 2, "FOLDER": 2}, "by a snapshot"
    both = sums_by_tier([*numbers["tiers"], *numbers["tiers"]])
    assert [(tier.medium, tier.store.num_entries) for tier in both] == [("host", 4), ("folder", 4)]
    asyncio.run(replica._engine.stop())


def test_replicas_scan_tiers_that_they_share_and_keep_what_was_set(tmp_path: Path) -> None:
    tiers = (HostTier("16MiB"), FolderTier(tmp_path, "16MiB"), FolderTier(tmp_path, "16MiB", rescan_s=0))
    engine = EngineConfig(num_blocks=60, tiers=tiers)
    own = ReplicaSpec(None, "float32", engine).own_engine
    assert [tier.rescan_s for tier in own.tiers] == [None, RESCAN_S, 0]
    assert own == replace(engine, events=True, tiers=own.tiers)
