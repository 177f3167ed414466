"""VirtualCluster: several replicas on one virtual clock, behind the router that serves.

Each replica is a :class:`~pagedkv.planner.simulation.virtual_clock.VirtualClock` with a space of its own. All replicas
advance in the order of time. Messages reach the router late, or not at all::

    a step of a replica ends --> events of its blocks --- delay, loss ---> index; a gap --> snapshot --- delay
                            +--> first tokens, ends ---- delay ----------> loads
    a request arrives       --> the router chooses, by what has reached it --> the replica's queue
"""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from random import Random
from typing import Final, final

import numpy as np

from pagedkv.memory.contract.arguments import as_count, as_number
from pagedkv.memory.contract.arrays import Float64Array
from pagedkv.memory.contract.errors import ConfigurationError
from pagedkv.memory.contract.events import CacheEvents
from pagedkv.memory.contract.keys import NO_KEYS, RequestKeys
from pagedkv.memory.routing import Choice, IndexState, ReplicaIndex, Router, Routing, RoutingRules
from pagedkv.memory.scheduling import Batch, Progress
from pagedkv.memory.space import BlockSpace, StoredBlocks
from pagedkv.planner.simulation.config import ServingConfig
from pagedkv.planner.simulation.cost import CostModel
from pagedkv.planner.simulation.request_log import RequestLog
from pagedkv.planner.simulation.running_rows import RunningRows
from pagedkv.planner.simulation.step_work import StepWork
from pagedkv.planner.simulation.virtual_clock import VirtualClock
from pagedkv.planner.traces.request import Request, TokenizedRequest
from pagedkv.planner.traces.tokens import tokenize

__all__ = ["ClusterFigures", "Network", "VirtualCluster"]

MINUTE_S: Final = 60.0
LIFETIME: Final = "1"


@dataclass(frozen=True, slots=True)
class Network:
    """What lies between replicas and router.

    Args:
        delay_s: seconds until a message reaches the router; a snapshot takes as long again.
        loss: fraction of the batches of events that never arrive.
        heartbeat_s: seconds between heartbeats, by which a loss is noticed.
        seed: determines which batches are lost.

    Raises:
        ConfigurationError: a value is out of range.
    """

    delay_s: float = 0.0
    loss: float = 0.0
    heartbeat_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if as_number(self.delay_s, "delay_s") < 0 or not 0 <= as_number(self.loss, "loss") <= 1:
            raise ConfigurationError(f"delay_s must be 0 or more and loss a fraction, got {self.delay_s}, {self.loss}")
        if as_number(self.heartbeat_s, "heartbeat_s") <= 0:
            raise ConfigurationError(f"heartbeat_s must be above 0, got {self.heartbeat_s}")


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """What a run of a cluster came to.

    Args:
        num_requests: requests that were routed; num_prompt_tokens: of them all; num_hit_tokens: those that were hits.
        first_token_s: seconds from arrival to the first token of each request: float64 ``[requests]``, NaN without one.
        computed_tokens: tokens computed by each replica in each minute: float64 ``[replicas, minutes]``.
        busy: fraction of the time until the last arrival that replicas computed, their mean.
        num_by_reason: decisions by reason.
        num_lost_batches: batches of events that were lost; num_snapshots: snapshots that were taken for it.
    """

    num_requests: int
    num_prompt_tokens: int
    num_hit_tokens: int
    first_token_s: Float64Array
    computed_tokens: Float64Array
    busy: float
    num_by_reason: dict[str, int]
    num_lost_batches: int
    num_snapshots: int

    @property
    def hit_ratio(self) -> float:
        """Fraction of the prompts' tokens that were hits."""
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)

    @property
    def imbalance(self) -> float:
        """Largest over mean of the tokens that replicas computed in a minute; the mean of all minutes with work."""
        minutes = self.computed_tokens[:, self.computed_tokens.any(axis=0)]
        return float((minutes.max(axis=0) / minutes.mean(axis=0)).mean()) if minutes.size else 1.0

    def first_token_percentile_s(self, percent: float) -> float:
        """Return the seconds within which so many percent of the first tokens came."""
        came = self.first_token_s[~np.isnan(self.first_token_s)]
        return float(np.percentile(came, percent)) if len(came) else math.nan


class _Meters(RequestLog):
    """The records of a replica's requests, its computed tokens, and what its router is to be notified of."""

    def __init__(self, config: ServingConfig) -> None:
        super().__init__(config.scheduling_config())
        self.num_computed_tokens = 0
        self.progress: list[tuple[float, Progress]] = []

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:
        super().planned(batch, running, work)
        self.num_computed_tokens += work.num_new_tokens

    def progressed(self, progress: Progress, end_s: float) -> None:
        super().progressed(progress, end_s)
        self.progress.append((end_s, progress))


class _Replica:
    """One replica: its clock, its space, and the numbers of its requests in the cluster."""

    def __init__(self, name: str, config: ServingConfig, costs: CostModel) -> None:
        self.name = name
        self.space = BlockSpace(replace(config.space_config(), explain=False))
        self.meters = _Meters(config)
        self.clock = VirtualClock(config, costs, self.space, self.meters, keeps_back=False)
        self.requests: list[int] = []
        self.next_batch = 0
        self.wants_snapshot = False


@final
class VirtualCluster:
    """Serves requests by several replicas, and measures hits, first tokens and balance.

    Args:
        config: of each replica; costs: duration of its steps.
        num_replicas: how many there are, at most 64.
        routing: how requests are routed; rules: the numbers of the router.
        network: which messages reach the router, and when.

    Raises:
        ConfigurationError: the configuration contradicts itself, or there are too many replicas.
    """

    def __init__(  # noqa: PLR0913 - what is simulated, by keywords
        self,
        config: ServingConfig,
        costs: CostModel,
        num_replicas: int,
        *,
        routing: Routing = "prefix",
        rules: RoutingRules | None = None,
        network: Network | None = None,
    ) -> None:
        as_count(num_replicas, "num_replicas", least=1)
        self._config = config
        self._network = network or Network()
        self._random = Random(self._network.seed)  # noqa: S311 - of a simulation
        self.router = Router(ReplicaIndex(config.group_specs), routing, rules)
        self._replicas = {f"r{number}": _Replica(f"r{number}", config, costs) for number in range(num_replicas)}
        for name in self._replicas:
            self.router.add_replica(name)
        self._messages: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._num_requests = self._num_lost = self._num_snapshots = 0
        self._last_arrival_s = 0.0
        self._heartbeat_s = 0.0
        self._computed: dict[tuple[str, int], int] = {}

    def offer(self, request: Request | TokenizedRequest) -> Choice:
        """Route the next request, after everything that happens before it arrives; return the decision.

        Raises:
            TraceError: it arrives before the previous request.
        """
        arrival_s = request.arrival_s / self._config.load
        self._run_until(arrival_s)
        number = self._num_requests
        tokens = tokenize(request, number) if isinstance(request, Request) else request
        keys = NO_KEYS if tokens.salt is None else RequestKeys(salt=tokens.salt.encode())
        choice = self.router.choose(number, tokens.prompt_token_ids, arrival_s, keys=keys)
        replica = self._replicas[choice.replica]
        replica.requests.append(number)
        replica.clock.offer(tokens)
        self._num_requests += 1
        self._last_arrival_s = arrival_s
        return choice

    def run(self, requests: Iterable[Request | TokenizedRequest]) -> ClusterFigures:
        """Serve requests to their end."""
        for request in requests:
            self.offer(request)
        self.finish()
        return self.figures()

    def finish(self) -> None:
        """Run until all requests are served, and all messages are delivered."""
        self._run_until(math.inf)

    def check(self) -> None:
        """Check that an index that says so is exact, and the spaces. Raises AssertionError. After :meth:`finish`."""
        self.router.loads.check()
        for name, replica in self._replicas.items():
            replica.space.check()
            view = self.router.index.view(name)
            stored = sum(len(replica.space.stored_blocks(pool).groups) for pool in replica.space.config.pool_names)
            if view.state is IndexState.EXACT and view.next_batch == replica.next_batch:
                assert view.num_blocks == stored, f"{name} has {stored} blocks, its exact index {view.num_blocks}"

    def figures(self) -> ClusterFigures:
        """Sum up the run so far. Changes nothing."""
        logs = [replica.meters for replica in self._replicas.values()]
        hits = np.concatenate([log.counts("num_hit_tokens") for log in logs])
        num_minutes = 1 + max((minute for _, minute in self._computed), default=0)
        computed = np.zeros((len(logs), num_minutes))
        for place, name in enumerate(self._replicas):
            for minute in range(num_minutes):
                computed[place, minute] = self._computed.get((name, minute), 0)
        until = 1 + int(self._last_arrival_s // MINUTE_S)
        return ClusterFigures(
            self._num_requests,
            int(sum(log.counts("num_prompt_tokens").sum() for log in logs)),
            int(hits[hits > 0].sum()),
            np.concatenate([log.first_token_s - log.arrival_s for log in logs]),
            computed[:, :until],
            sum(log.busy_s for log in logs) / len(logs) / max(self._last_arrival_s, 1e-9),
            {str(reason): number for reason, number in self.router.num_by_reason.items() if number},
            self._num_lost,
            self._num_snapshots,
        )

    # The clock

    def _run_until(self, end_s: float) -> None:
        """Run steps that begin, and deliver messages that are due, before ``end_s``, in the order of time."""
        while True:
            replica = min(self._replicas.values(), key=lambda each: (_next_s(each), each.name))
            step_s, message_s = _next_s(replica), self._messages[0][0] if self._messages else math.inf
            if min(step_s, message_s) >= end_s:
                return
            if message_s <= step_s:
                at_s, _, deliver = heapq.heappop(self._messages)
                deliver(at_s)
            else:
                self._step(replica, end_s)

    def _step(self, replica: _Replica, end_s: float) -> None:
        before = replica.meters.num_computed_tokens
        minute = int(replica.clock.now_s // MINUTE_S)
        replica.clock.run_step(end_s)
        now_s = replica.clock.now_s
        place = (replica.name, minute)
        self._computed[place] = self._computed.get(place, 0) + replica.meters.num_computed_tokens - before
        events = [each for each in replica.space.drain_events() if len(each)]
        if events:
            batch, replica.next_batch = replica.next_batch, replica.next_batch + 1
            if self._random.random() < self._network.loss:
                self._num_lost += 1
            else:
                self._send(now_s, partial(self._apply, replica, batch, events))
        self._beat(now_s)
        if replica.wants_snapshot:
            self._send_snapshot(replica, now_s)
        progress, replica.meters.progress = replica.meters.progress, []
        for at_s, each in progress:
            self._send(at_s, partial(self._note, replica, each))

    def _send(self, now_s: float, deliver: Callable[[float], None]) -> None:
        heapq.heappush(self._messages, (now_s + self._network.delay_s, next(self._order), deliver))

    def _beat(self, now_s: float) -> None:
        """Let all replicas send heartbeats, if it is time."""
        if now_s < self._heartbeat_s:
            return
        self._heartbeat_s = now_s + self._network.heartbeat_s
        for each in self._replicas.values():
            self._send(now_s, partial(self._note_alive, each, each.next_batch))

    def _apply(self, replica: _Replica, batch: int, events: list[CacheEvents], at_s: float) -> None:
        is_exact = self.router.apply(replica.name, LIFETIME, batch, events, at_s)
        replica.wants_snapshot = replica.wants_snapshot or not is_exact

    def _note_alive(self, replica: _Replica, next_batch: int, at_s: float) -> None:
        is_exact = self.router.index.note_alive(replica.name, LIFETIME, next_batch, at_s)
        replica.wants_snapshot = replica.wants_snapshot or not is_exact

    def _send_snapshot(self, replica: _Replica, now_s: float) -> None:
        """Answer the index's request for a snapshot, which was sent when a gap was noticed."""
        replica.wants_snapshot = False
        self._num_snapshots += 1
        blocks = [replica.space.stored_blocks(pool) for pool in replica.space.config.pool_names]
        self._send(now_s, partial(self._restore, replica.name, replica.next_batch, blocks))

    def _restore(self, name: str, next_batch: int, blocks: list[StoredBlocks], at_s: float) -> None:
        self.router.index.restore(name, LIFETIME, next_batch, blocks, at_s)

    def _note(self, replica: _Replica, progress: Progress, at_s: float) -> None:
        del at_s
        for request in progress.first_tokens:
            self.router.prefilled(replica.requests[request.number])
        for request in progress.finished:
            self.router.ended(replica.requests[request.number])


def _next_s(replica: _Replica) -> float:
    """Return when a replica's next step begins; infinite if it has nothing to do."""
    return math.inf if replica.clock.is_idle else replica.clock.now_s
