"""VirtualCluster: several replicas on one virtual clock, behind the production router.

Each replica is a :class:`~pagedkv.simulation.virtual_clock.VirtualClock` with a space of its own. All replicas
advance in the order of time. Messages reach the router late, or not at all::

    a step of a replica ends --> events of its blocks --- delay, loss ---> index; a gap --> snapshot --- delay
                            +--> first tokens, ends ---- delay ----------> loads
    a request arrives       --> the router chooses, by the messages so far --> the replica's queue
    a replica is killed     --- delay --> its requests are routed again, as prompts that end with the tokens sent
                            --- restart_s --> a new one joins under its name
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

from pagedkv import scheduling
from pagedkv.contract.arguments import as_count
from pagedkv.contract.events import CacheEvents, TierEvents
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.traces.request import Request, TokenizedRequest
from pagedkv.planner.traces.token_blocks import tokenize
from pagedkv.routing import Choice, IndexState, RecordWriter, ReplicaIndex, Router, Routing, RoutingRules
from pagedkv.simulation.cluster.cluster_figures import ClusterFigures
from pagedkv.simulation.cluster.kills import Kills
from pagedkv.simulation.cluster.network import Network
from pagedkv.simulation.cluster.replica import Replica, Report
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.request_log import RequestLog
from pagedkv.space import StoredBlocks

__all__ = ["VirtualCluster"]

MINUTE_S: Final = 60.0
NO_KILLS: Final = Kills()
NO_REPLICA: Final = "no replica can serve: all were killed, and none has joined yet"


@dataclass(slots=True)
class _UnderWay:
    """A request that has not ended: its tokens as it arrived, and the number of its answer's tokens that were sent."""

    request: TokenizedRequest
    num_sent: int = 0

    @property
    def remaining(self) -> TokenizedRequest:
        """The request from here on: the prompt with the tokens sent, and the remaining tokens of the answer."""
        if not self.num_sent:
            return self.request
        sent, others = np.split(self.request.output_token_ids, [self.num_sent])
        prompt = np.concatenate((self.request.prompt_token_ids, sent))
        return replace(self.request, prompt_token_ids=prompt, output_token_ids=others)


@final
class VirtualCluster:
    """Serves requests by several replicas, and measures hits, first tokens and balance.

    Args:
        config: configuration of each replica; costs: duration of its steps.
        num_replicas: number of replicas, at most 64.
        routing: how requests are routed; rules: the numbers of the router.
        network: delays and losses of messages to the router.
        kills: when replicas are killed.
        record: receives all inputs and choices of the router; None: they are not recorded.

    Attributes:
        log: the records of all requests, by number.
        errors: reasons of the requests that ended without an answer, since there was no replica, by number.

    Raises:
        ConfigurationError: the configuration contradicts itself, there are too many replicas, or ``kills`` names a
            replica that does not exist.
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
        kills: Kills = NO_KILLS,
        record: RecordWriter | None = None,
    ) -> None:
        as_count(num_replicas, "num_replicas", least=1)
        self._config, self._costs = config, costs
        self._network = network or Network()
        self._random = Random(self._network.seed)  # noqa: S311 - of a simulation
        self._victim_random = Random(kills.seed)  # noqa: S311 - as above
        self._restart_s = kills.restart_s
        self.router = Router(ReplicaIndex(config.group_specs), routing, rules, note=record)
        self.log = RequestLog(config.scheduling_config())
        self.errors: dict[int, str] = {}
        self._names = tuple(f"r{number}" for number in range(num_replicas))
        self._replicas = {name: Replica(name, 1, config, costs, self.log) for name in self._names}
        for name in self._replicas:
            self.router.add_replica(name)
        self._messages: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._under_way: dict[int, _UnderWay] = {}
        self._num_requests = self._num_lost = self._num_snapshots = self._num_kills = self._num_moves = 0
        self._last_arrival_s = 0.0
        self._heartbeat_s = 0.0
        self._computed: dict[tuple[str, int], int] = {}
        for at_s, victim in kills.at:
            if victim is not None and victim not in self._replicas:
                raise ConfigurationError(f"kills names {victim!r}, and the replicas are {', '.join(self._names)}")
            self._push(at_s, partial(self._kill, victim))

    def offer(self, request: Request | TokenizedRequest) -> Choice | None:
        """Route the next request, after all steps and messages before its arrival.

        Returns:
            The decision; None if there is no replica, so that the request ends with an error.

        Raises:
            TraceError: it arrives before the previous request.
        """
        arrival_s = request.arrival_s / self._config.load
        number = self._num_requests
        if arrival_s < self._last_arrival_s:
            raise TraceError(
                "the trace",
                None,
                f"request {number + 1} arrives at {arrival_s} s, the one before it at {self._last_arrival_s} s",
                "Sort it: `sorted_by_arrival`",
            )
        self._run_until(arrival_s)
        tokens = tokenize(request, number) if isinstance(request, Request) else request
        self._note_arrival(number, tokens, arrival_s)
        self._num_requests += 1
        self._last_arrival_s = arrival_s
        return self._route(number, arrival_s)

    def run(
        self, requests: Iterable[Request | TokenizedRequest], show: Callable[[], None] = lambda: None
    ) -> ClusterFigures:
        """Serve requests to their end; ``show`` is called after each arrival."""
        for request in requests:
            self.offer(request)
            show()
        self.finish()
        return self.figures()

    def finish(self) -> None:
        """Run until all requests are served, and all messages are delivered."""
        self._run_until(math.inf)

    def check(self) -> None:
        """Check requests, spaces, and that an index marked as exact is exact; call it after a run.

        Every request has an answer, or was rejected, or has an error, and none has two of these.

        Raises:
            AssertionError: a check failed.
        """
        self.router.loads.check()
        assert not self._under_way, f"requests {sorted(self._under_way)} never ended"
        assert not len(self.router.loads), "a request is still outstanding"
        for number in self.errors:
            assert math.isnan(self.log.end_s[number]), f"request {number} has an answer and an error"
        for name, replica in self._replicas.items():
            replica.space.check()
            view = self.router.index.view(name)
            stored = sum(len(replica.space.stored_blocks(pool).groups) for pool in replica.space.config.pool_names)
            if view.state is IndexState.EXACT and view.next_batch == replica.next_batch:
                assert view.num_blocks == stored, f"{name} has {stored} blocks, its exact index {view.num_blocks}"

    @property
    def peak_live(self) -> dict[str, int]:
        """The sum of the replicas' most live blocks, by pool."""
        peaks = [replica.clock.peak_live for replica in self._replicas.values()]
        return {pool: sum(each[pool] for each in peaks) for pool in peaks[0]}

    def figures(self) -> ClusterFigures:
        """Sum up the run so far. Changes nothing."""
        log, num_replicas = self.log, len(self._names)
        hits = log.counts("num_hit_tokens")
        until = max(1, int(self._last_arrival_s // MINUTE_S))
        worked = sorted({minute for _, minute in self._computed if minute < until})
        minutes = {minute: place for place, minute in enumerate(worked)}
        computed = np.zeros((num_replicas, len(minutes)))
        for (name, minute), number in self._computed.items():
            if minute in minutes:
                computed[self._names.index(name), minutes[minute]] += number
        return ClusterFigures(
            self._num_requests,
            int(log.counts("num_prompt_tokens").sum()),
            int(hits[hits > 0].sum()),
            log.first_token_s - log.arrival_s,
            computed,
            log.busy_s / num_replicas / max(self._last_arrival_s, 1e-9),
            {str(reason): number for reason, number in self.router.num_by_reason.items() if number},
            self._num_lost,
            self._num_snapshots,
            self._num_kills,
            self._num_moves,
            len(self.errors),
        )

    # Requests

    def _note_arrival(self, number: int, request: TokenizedRequest, arrival_s: float) -> None:
        config = self._config
        own = scheduling.Request(
            number=number,
            num_prompt_tokens=request.input_length,
            max_new_tokens=request.output_length,
            load=lambda _: request.prompt_token_ids,
            num_sequences=config.beam_width or config.num_samples or request.num_samples,
        )
        self.log.arrived(own, arrival_s, has_content=request.has_content, tenant=request.tenant)
        self._under_way[number] = _UnderWay(request)

    def _route(self, number: int, now_s: float) -> Choice | None:
        """Send a request, or the rest of it, to a replica; without a replica, end it with an error."""
        if not self.router.index.names:
            self.errors[number] = NO_REPLICA
            del self._under_way[number]
            return None
        request = self._under_way[number].remaining
        keys = NO_KEYS if request.salt is None else RequestKeys(salt=request.salt.encode())
        choice = self.router.choose(number, request.prompt_token_ids, now_s, keys=keys)
        replica = self._replicas[choice.replica]
        replica.offer(number, request, now_s)
        self._report(replica, now_s)
        return choice

    # The clock

    def _run_until(self, end_s: float) -> None:
        """Run steps that begin, and deliver messages that are due, before ``end_s``, in the order of time."""
        while True:
            replica = min(self._replicas.values(), key=lambda each: (each.next_s, each.name), default=None)
            step_s = math.inf if replica is None else replica.next_s
            message_s = self._messages[0][0] if self._messages else math.inf
            if min(step_s, message_s) >= end_s:
                return
            if replica is None or message_s <= step_s:
                at_s, _, deliver = heapq.heappop(self._messages)
                deliver(at_s)
            else:
                self._step(replica, end_s)

    def _step(self, replica: Replica, end_s: float) -> None:
        before = replica.meters.num_computed_tokens
        minute = int(replica.clock.now_s // MINUTE_S)
        replica.clock.run_step(end_s)
        now_s = replica.clock.now_s
        place = (replica.name, minute)
        self._computed[place] = self._computed.get(place, 0) + replica.meters.num_computed_tokens - before
        changed: list[CacheEvents | TierEvents] = [*replica.space.drain_events(), *replica.clock.drain_tier_events()]
        events = [each for each in changed if len(each)]
        if events:
            batch, replica.next_batch = replica.next_batch, replica.next_batch + 1
            if self._random.random() < self._network.loss:
                self._num_lost += 1
            else:
                self._send(now_s, partial(self._apply, replica, batch, events))
        self._send_heartbeats(now_s)
        if replica.needs_snapshot:
            self._send_snapshot(replica, now_s)
        self._report(replica, now_s)

    def _report(self, replica: Replica, now_s: float) -> None:
        """Send a replica's first tokens and ends to the router; requests that have ended are no longer under way."""
        for report in replica.meters.take_reports(now_s):
            for number in report.ended:
                del self._under_way[number]
            self._send(report.at_s, partial(self._note, report))

    # Messages

    def _push(self, at_s: float, deliver: Callable[[float], None]) -> None:
        heapq.heappush(self._messages, (at_s, next(self._order), deliver))

    def _send(self, now_s: float, deliver: Callable[[float], None]) -> None:
        self._push(now_s + self._network.delay_s, deliver)

    def _send_heartbeats(self, now_s: float) -> None:
        """Send a heartbeat of every running replica, if one is due."""
        if now_s < self._heartbeat_s:
            return
        self._heartbeat_s = now_s + self._network.heartbeat_s
        for each in self._replicas.values():
            if not each.is_dead:
                self._send(now_s, partial(self._note_alive, each, each.next_batch))

    def _is_gone(self, replica: Replica) -> bool:
        """Whether the router has noticed that a replica was killed, so that messages of that lifetime are dropped."""
        return self._replicas.get(replica.name) is not replica

    def _apply(self, replica: Replica, batch: int, events: list[CacheEvents | TierEvents], at_s: float) -> None:
        if self._is_gone(replica):
            return
        is_exact = self.router.apply(replica.name, replica.lifetime, batch, events, at_s)
        replica.needs_snapshot = replica.needs_snapshot or not is_exact

    def _note_alive(self, replica: Replica, next_batch: int, at_s: float) -> None:
        if self._is_gone(replica):
            return
        is_exact = self.router.index.note_alive(replica.name, replica.lifetime, next_batch, at_s)
        replica.needs_snapshot = replica.needs_snapshot or not is_exact

    def _send_snapshot(self, replica: Replica, now_s: float) -> None:
        """Send the snapshot that the index needs since it noticed a gap."""
        replica.needs_snapshot = False
        self._num_snapshots += 1
        listed = [replica.space.stored_blocks(pool) for pool in replica.space.config.pool_names]
        blocks: list[StoredBlocks | TierEvents] = [*listed, *replica.clock.tier_entries()]
        self._send(now_s, partial(self._restore, replica, replica.next_batch, blocks))

    def _restore(self, replica: Replica, next_batch: int, blocks: list[StoredBlocks | TierEvents], at_s: float) -> None:
        if self._is_gone(replica):
            return
        self.router.index.restore(replica.name, replica.lifetime, next_batch, blocks, at_s)

    def _note(self, report: Report, at_s: float) -> None:
        del at_s
        for number in report.first_tokens:
            self.router.prefilled(number)
        for number in report.ended:
            self.router.ended(number)

    # Kills and restarts

    def _kill(self, name: str | None, at_s: float) -> None:
        """Kill a replica between two steps; without a name, a running one at random."""
        running = [each for each in self._replicas.values() if not each.is_dead and name in {None, each.name}]
        if running:
            replica = self._victim_random.choice(running) if name is None else running[0]
            self._end_lifetime(replica, at_s)

    def _end_lifetime(self, replica: Replica, at_s: float) -> None:
        if replica.is_dead:
            return  # a second kill during the same step
        if replica.clock.now_s > at_s:
            self._push(replica.clock.now_s, partial(self._end_lifetime, replica))
            return
        replica.is_dead = True
        self._num_kills += 1
        self._send(at_s, partial(self._note_kill, replica))

    def _note_kill(self, replica: Replica, at_s: float) -> None:
        """Route the requests of a killed replica again, in their order; a new replica joins later."""
        requests = self.router.remove_replica(replica.name)
        del self._replicas[replica.name]
        self._push(at_s + self._restart_s, partial(self._join, replica.name, replica.number_of_lifetime + 1))
        for number in requests:
            self._num_moves += 1
            self._under_way[number].num_sent += replica.num_sent_tokens(number)
            self._route(number, at_s)

    def _join(self, name: str, lifetime: int, at_s: float) -> None:
        """Add a replica with an empty cache, and send its first heartbeat."""
        replica = self._replicas[name] = Replica(name, lifetime, self._config, self._costs, self.log)
        self.router.add_replica(name, at_s)
        self._send(at_s, partial(self._note_alive, replica, 0))
