"""A recorded sequence chooses the same again: what the service did can be examined, and simulator and service agree."""

import json
from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from pagedkv import FullAttention, GroupSpec, SlidingWindow
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.routing import RecordWriter, ReplicaIndex, Router, RoutingRules, replay
from pagedkv.simulation import ServingConfig, SimulatedTier
from pagedkv.simulation.cluster import Kills, Network, VirtualCluster
from pagedkv.simulation.cost import CostModel
from tests.space.spaces import tokens

pytestmark = pytest.mark.interpreted

COSTS: Final = CostModel(fixed_s=0.01, token_compute_s=0.001)
FULL: Final[tuple[GroupSpec, ...]] = (FullAttention(4),)
WINDOW: Final[tuple[GroupSpec, ...]] = (FullAttention(4), SlidingWindow(6, 4, pool="small"))
HYBRID: Final[tuple[GroupSpec, ...]] = (FullAttention(4), SlidingWindow(6, 2, pool="small"))


def recorded(groups: tuple[GroupSpec, ...], tiers: tuple[SimulatedTier, ...] = ()) -> tuple[list[str], list[str]]:
    """Serve a trace by replicas that die, with losses; return the record, and the explanation of each choice."""
    blocks = dict.fromkeys((group.pool for group in groups), 60)
    config = ServingConfig(num_blocks=blocks, block_size=4, groups=groups, max_sequences=4, max_batched_tokens=64)
    if tiers:
        config = replace(
            config, tiers=tiers, num_blocks=dict.fromkeys(blocks, 24), block_nbytes=dict.fromkeys(blocks, 2**24)
        )
    lines: list[str] = []
    cluster = VirtualCluster(
        config,
        COSTS,
        3,
        network=Network(delay_s=0.1, loss=0.2, heartbeat_s=0.2),
        kills=Kills.at_random(4, 0.7, restart_s=0.2),
        record=RecordWriter(lines.append),
    )
    rng = np.random.default_rng(3)
    told = []
    for arrival_s in np.sort(rng.uniform(0, 3, 30)).tolist():
        prompt = np.concatenate(
            (tokens(24, first=100 * int(rng.integers(4))), tokens(9, first=int(rng.integers(2000))))
        )
        salt = "a" if rng.random() < 0.3 else None
        choice = cluster.offer(TokenizedRequest(arrival_s, prompt, tokens(6), salt=salt))
        if choice is not None:
            told.append(choice.explain())
    cluster.finish()
    cluster.check()
    return lines, told


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_a_recorded_run_chooses_the_same_for_the_same_reasons(groups: tuple[GroupSpec, ...]) -> None:
    lines, told = recorded(groups)
    kinds = {json.loads(line)["kind"] for line in lines}
    assert kinds == {"router", "join", "leave", "events", "snapshot", "alive", "arrival", "first_token", "end"}
    again = list(replay(lines, groups))
    assert len(again) > len(told), "requests of dead replicas were routed twice"
    assert all(each.is_same for each in again)
    reasons = [json.loads(line)["reason"] for line in lines if json.loads(line)["kind"] == "arrival"]
    assert [str(each.choice.reason) for each in again] == reasons
    assert set(told) <= {each.choice.explain() for each in again}


@pytest.mark.parametrize("groups", [FULL, WINDOW], ids=["full", "window"])
def test_a_recorded_run_with_tiers_chooses_the_same(groups: tuple[GroupSpec, ...]) -> None:
    lines, told = recorded(groups, (SimulatedTier("host", 2**30, 1e12, loads="always"),))
    again = list(replay(lines, groups))
    assert all(each.is_same for each in again)
    assert set(told) <= {each.choice.explain() for each in again}
    if groups is FULL:  # no prompt of this trace continues at an end that another one has stored
        assert any(" in CPU" in each for each in told), "the simulation's tiers are in the router's index"
    assert any("medium" in each for line in lines if '"snapshot"' in line for each in json.loads(line)["blocks"])


def test_other_rules_are_tried_on_the_same_sequence() -> None:
    lines, _ = recorded(FULL)
    others = list(replay(lines, FULL, RoutingRules(lack_weight=0.0)))
    assert not all(each.is_same for each in others)


def test_a_choice_among_some_is_one_again() -> None:
    lines: list[str] = []
    router = Router(ReplicaIndex(FULL), note=RecordWriter(lines.append))
    for name in ("a", "b"):
        router.add_replica(name)
    router.choose(1, tokens(20), 0.5, among=["b"])
    router.index.forget("b", 0.7)
    (again,) = replay(lines, FULL)
    assert (again.request, again.now_s, again.recorded, again.is_same) == (1, 0.5, "b", True)


def test_a_choice_that_was_taken_back_is_taken_back_again() -> None:
    lines: list[str] = []
    router = Router(ReplicaIndex(FULL), note=RecordWriter(lines.append))
    for name in ("a", "b"):
        router.add_replica(name)
    prompt = router.index.hash(tokens(20), NO_KEYS)
    router.choose_hashed(1, prompt, 0.5)
    router.take_back(1, prompt, 0.6)
    told = [router.choose_hashed(number, prompt, 0.7).explain() for number in (1, 2)]
    again = list(replay(lines, FULL))
    assert all(each.is_same for each in again)
    assert [each.choice.explain() for each in again[1:]] == told


def test_the_tokens_of_a_prompt_are_not_in_a_record() -> None:
    lines: list[str] = []
    router = Router(ReplicaIndex(FULL), note=RecordWriter(lines.append))
    router.add_replica("a")
    router.choose(1, tokens(9), 0.0)
    assert set(json.loads(lines[-1])) == {"kind", "t", "request", "num_tokens", "digests", "among", "chosen", "reason"}
    assert len(json.loads(lines[-1])["digests"]["4"]) == 44, "two digests of 16 bytes"


def test_other_lines_are_refused() -> None:
    lines: list[str] = []
    Router(ReplicaIndex(FULL), note=RecordWriter(lines.append))
    for line in ("", "{", '{"kind": "other", "t": 0}', '{"kind": "join", "t": 0}', "[]"):
        with pytest.raises(ConfigurationError, match="line 2 is not an input of a router"):
            list(replay([*lines, line], FULL))
