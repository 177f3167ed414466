"""Replicas die under load: no request is lost, no answer is wrong, and the index is exact or says since when not."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pagedkv.contract.arrays import Int32Array
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.routing import IndexState
from pagedkv.scheduling import Batch, Scheduler
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.cluster import Kills, Network, VirtualCluster
from pagedkv.simulation.cost import CostModel

pytestmark = pytest.mark.interpreted

CONFIG: Final = ServingConfig(num_blocks=60, block_size=4, max_sequences=4, max_batched_tokens=64)
COSTS: Final = CostModel(fixed_s=0.01, token_compute_s=0.001)


class SentTokens:
    """The tokens that replicas send, by request: whatever their schedulers finish."""

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = defaultdict(list)

    def note(self, batch: Batch, token_ids: Int32Array) -> None:
        """Add the tokens of a finished batch."""
        decoded = [] if batch.decoding is None else [request.number for request in batch.decoding.requests]
        first = [chunk.request.number for chunk in batch.prefilling if chunk.num_samples]
        for number, token in zip([*decoded, *first], token_ids.tolist(), strict=True):
            self.of[number].append(token)


@contextmanager
def noted() -> Iterator[SentTokens]:
    told, finish = SentTokens(), Scheduler.finish

    def noting(self: Scheduler, batch: Batch, token_ids: Int32Array, **more: Any) -> object:  # noqa: ANN401 - passed on
        told.note(batch, token_ids)
        return finish(self, batch, token_ids, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "finish", noting)
        yield told


@pytest.fixture
def sent() -> Iterator[SentTokens]:
    with noted() as told:
        yield told


def requests_of(number: int, span_s: float, seed: int) -> list[TokenizedRequest]:
    """Prompts with common beginnings, and answers of different lengths, one of them empty now and then."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, 1000, 24).astype(np.int32) for _ in range(5)]
    requests = []
    for arrival_s in np.sort(rng.uniform(0, span_s, number)).tolist():
        tail = rng.integers(0, 1000, int(rng.integers(1, 40))).astype(np.int32)
        answer = rng.integers(0, 1000, int(rng.integers(0, 16))).astype(np.int32)
        requests.append(TokenizedRequest(arrival_s, np.concatenate((heads[rng.integers(5)], tail)), answer))
    return requests


def serve(
    requests: list[TokenizedRequest], kills: Kills, network: Network, config: ServingConfig = CONFIG
) -> VirtualCluster:
    cluster = VirtualCluster(config, COSTS, 3, network=network, kills=kills)
    for request in requests:
        cluster.offer(request)
        for name in cluster.router.index.names:
            view = cluster.router.index.view(name)
            assert view.state is IndexState.EXACT or 0 <= view.since_s <= request.arrival_s
    cluster.finish()
    cluster.check()
    return cluster


def require_every_answer(cluster: VirtualCluster, requests: list[TokenizedRequest], sent: SentTokens) -> None:
    """Every request has its answer, token by token, or an error, and its times are in their order."""
    log = cluster.log
    for number, request in enumerate(requests):
        if number in cluster.errors:
            assert "no replica can serve" in cluster.errors[number]
            assert math.isnan(log.end_s[number])
            assert sent.of[number] == request.output_token_ids[: len(sent.of[number])].tolist()
        else:
            assert sent.of[number] == request.output_token_ids.tolist(), f"request {number}"
            assert log.end_s[number] >= log.arrival_s[number] == request.arrival_s
            if request.output_length:
                assert log.arrival_s[number] <= log.first_token_s[number] <= log.end_s[number]


@settings(max_examples=4)
@given(
    st.integers(0, 2**16),
    st.sampled_from([Network(), Network(delay_s=0.1, loss=0.2, heartbeat_s=0.2)]),
    st.sampled_from([0.05, 0.5, 3.0]),
    st.booleans(),
)
def test_no_request_is_lost_and_no_answer_is_wrong(
    seed: int,
    network: Network,
    restart_s: float,
    overlap: bool,  # noqa: FBT001 - drawn
) -> None:
    with noted() as told:
        requests = requests_of(24, 2.0, seed)
        kills = Kills.at_random(8, 0.3, restart_s=restart_s, seed=seed)
        cluster = serve(requests, kills, network, replace(CONFIG, overlap=overlap))
        require_every_answer(cluster, requests, told)
    assert cluster.figures().num_kills


@pytest.mark.parametrize("num_kills", [30, pytest.param(1020, marks=pytest.mark.long)])
def test_many_kills_under_load(num_kills: int, sent: SentTokens) -> None:
    span_s = 0.5 * num_kills
    requests = requests_of(int(16 * span_s), span_s, 1)
    kills = Kills.at_random(num_kills, 0.5, restart_s=0.2, seed=2)
    cluster = serve(requests, kills, Network(delay_s=0.05, loss=0.05, heartbeat_s=0.3))
    require_every_answer(cluster, requests, sent)
    figures = cluster.figures()
    assert figures.num_kills >= 0.9 * num_kills, "the others came when no replica was alive"
    assert figures.num_moves > num_kills / 2


def test_the_tokens_sent_are_the_end_of_the_new_prompt(sent: SentTokens) -> None:
    """One long answer, and its replica dies in the middle of it."""
    prompt, answer = np.arange(24, dtype=np.int32), np.arange(100, 140, dtype=np.int32)
    cluster = VirtualCluster(CONFIG, COSTS, 2, kills=Kills(((0.3, "r0"),), restart_s=0.1))
    choice = cluster.offer(TokenizedRequest(0.0, prompt, answer))
    assert choice is not None
    assert choice.replica == "r0"
    figures = cluster.run([])
    cluster.check()
    assert sent.of[0] == answer.tolist()
    assert (figures.num_kills, figures.num_moves, figures.num_failed) == (1, 1, 0)
    assert figures.first_token_s.tolist() == pytest.approx([0.034]), "of the first replica"
    assert figures.num_prompt_tokens == 24
    first, second = figures.computed_tokens.sum(axis=1).tolist()
    assert 24 + 10 < first < 24 + 30
    assert second == 24 + 40 - 1, "the prompt, the tokens sent, and the others of the answer but the last"


def test_without_a_replica_a_request_ends_with_an_error() -> None:
    prompt, answer = np.arange(24, dtype=np.int32), np.arange(20, dtype=np.int32)
    cluster = VirtualCluster(CONFIG, COSTS, 1, kills=Kills(((0.1, "r0"), (0.1, None)), restart_s=1.0))
    cluster.offer(TokenizedRequest(0.0, prompt, answer))
    assert cluster.offer(TokenizedRequest(0.5, prompt, answer)) is None
    later = cluster.offer(TokenizedRequest(2.0, prompt, answer))
    assert later is not None
    assert later.chosen.state is IndexState.EXACT, "it has joined, with nothing cached"
    cluster.finish()
    cluster.check()
    assert sorted(cluster.errors) == [0, 1]
    assert not math.isnan(cluster.log.end_s[2])


def test_a_request_that_was_sent_to_a_dead_replica_moves_when_that_is_noticed() -> None:
    prompt, answer = np.arange(24, dtype=np.int32), np.arange(20, dtype=np.int32)
    cluster = VirtualCluster(CONFIG, COSTS, 2, network=Network(delay_s=0.2), kills=Kills(((0.1, "r0"),)))
    choice = cluster.offer(TokenizedRequest(0.15, prompt, answer))
    assert choice is not None
    assert choice.replica == "r0"
    figures = cluster.run([])
    assert figures.num_moves == 1
    assert figures.first_token_s.tolist() == pytest.approx([0.15 + 0.034])


def test_wrong_kills_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="kills names 'r7'"):
        VirtualCluster(CONFIG, COSTS, 2, kills=Kills(((1.0, "r7"),)))
    with pytest.raises(ConfigurationError, match="0 or more"):
        Kills(((-1.0, None),))
    with pytest.raises(ConfigurationError, match="mean_s"):
        Kills.at_random(3, 0)
