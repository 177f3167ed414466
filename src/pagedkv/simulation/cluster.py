"""VirtualCluster: several replicas on one virtual clock, behind the production router.

Each replica is a :class:`~pagedkv.simulation.virtual_clock.VirtualClock` with a space of its own. All replicas
advance in the order of time. Messages reach the router late, or not at all::

    a step of a replica ends --> events of its blocks --- delay, loss ---> index; a gap --> snapshot --- delay
                            +--> first tokens, ends ---- delay ----------> loads
    a request arrives       --> the router chooses, by the messages so far --> the replica's queue
    a replica is killed     --- delay --> its requests are routed again, as prompts that end with the tokens sent
                            --- restart_s --> a new one joins under its name

A replica is killed between two steps: at its time, or at the end of the step that runs then. The router notices it
after a delay, and after all messages that the replica had sent, as when a connection breaks. After ``restart_s`` a new
replica joins under the old name, with a new lifetime and an empty cache.
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
from pagedkv.contract.answers import CacheEvents, TierEvents
from pagedkv.contract.arguments import as_choice, as_count, as_number
from pagedkv.contract.arrays import Float64Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.errors import ConfigurationError, TraceError
from pagedkv.planner.results import Result
from pagedkv.planner.traces.request import Request, TokenizedRequest
from pagedkv.planner.traces.token_blocks import tokenize
from pagedkv.routing import ROUTINGS, Choice, IndexState, RecordWriter, ReplicaIndex, Router, Routing, RoutingRules
from pagedkv.scheduling import Batch, Progress, Request as ScheduledRequest
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.meters import RequestLog, RunningRows, StepWork
from pagedkv.simulation.virtual_clock import VirtualClock
from pagedkv.space import BlockSpace, StoredBlocks


@dataclass(frozen=True, slots=True)
class Network:
    """The delays and losses of messages between replicas and router.

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


LATE: Final = Network(delay_s=0.1, loss=0.01)
"""The network that plans assume: messages arrive 100 ms late, and 1 % of the batches of events are lost."""


@dataclass(frozen=True, slots=True)
class ClusterSetting(Result):
    """A cluster.

    Args:
        num_replicas: number of replicas, 1 to 64.
        routing: how requests are routed; rules: the numbers of the router.
        network: delays and losses of messages to the router.

    Raises:
        ConfigurationError: no replica, or an unknown routing.
    """

    num_replicas: int
    routing: Routing = "prefix"
    rules: RoutingRules = RoutingRules()  # noqa: RUF009 - a value: frozen
    network: Network = LATE

    def __post_init__(self) -> None:
        as_count(self.num_replicas, "replicas", least=1, most=64)
        as_choice(self.routing, ROUTINGS, "routing")


@dataclass(frozen=True, slots=True)
class Kills:
    """A schedule of kills.

    Args:
        at: pairs of seconds and the name of a replica; None instead of a name: a running replica, at random.
        restart_s: seconds until a new replica joins, after the router has noticed the kill.
        seed: determines which replicas are killed at random.

    Raises:
        ConfigurationError: a time is negative.

    >>> Kills(((3.0, "r1"), (5.0, None)), restart_s=2.0).at
    ((3.0, 'r1'), (5.0, None))
    """

    at: tuple[tuple[float, str | None], ...] = ()
    restart_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            any(as_number(at_s, "the time of a kill") < 0 for at_s, _ in self.at)
            or as_number(self.restart_s, "restart_s") < 0
        ):
            raise ConfigurationError(f"times of kills and restart_s must be 0 or more, got {self.at}, {self.restart_s}")

    @classmethod
    def at_random(cls, number: int, mean_s: float, *, restart_s: float = 1.0, seed: int = 0) -> "Kills":
        """Draw ``number`` kills, ``mean_s`` seconds apart in the mean, each independent of all others.

        Raises ConfigurationError: a number is negative, or ``mean_s`` is not above 0.
        """
        as_count(number, "the number of kills")
        if as_number(mean_s, "mean_s") <= 0:
            raise ConfigurationError(f"mean_s must be above 0, got {mean_s}")
        random, at_s, times = Random(seed), 0.0, []  # noqa: S311 - of a simulation
        for _ in range(number):
            at_s += random.expovariate(1 / mean_s)
            times.append((at_s, None))
        return cls(tuple(times), restart_s, seed)


@dataclass(frozen=True, slots=True, eq=False)
class ClusterFigures:
    """The results of a run of a cluster.

    Args:
        num_requests: requests that arrived; num_prompt_tokens: of them all; num_hit_tokens: those that were hits when
            the request was admitted for the first time.
        first_token_s: seconds from arrival to the first token of each request: float64 ``[requests]``, NaN without one.
        computed_tokens: tokens computed by each replica in each whole minute until the last arrival, else in the first;
            minutes without a step are left out: float64 ``[replicas, minutes]``.
        busy: fraction of the time until the last arrival in which a step ran, the mean of all replicas.
        num_by_reason: routing decisions by reason.
        num_lost_batches: batches of events that were lost; num_snapshots: snapshots that were sent instead.
        num_kills: replicas that were killed; num_moves: requests that were routed again; num_failed: requests that
            ended with an error, since there was no replica.
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
    num_kills: int = 0
    num_moves: int = 0
    num_failed: int = 0

    @property
    def hit_ratio(self) -> float:
        """Fraction of the prompts' tokens that were hits."""
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)

    @property
    def imbalance(self) -> float:
        """The largest number of tokens that a replica computed in a minute, over the mean of all replicas.

        Both are summed over the minutes, so a minute counts in proportion to its tokens. A minute with few requests can
        hardly be balanced, and counts little.
        """
        largest, mean = self.computed_tokens.max(axis=0).sum(), self.computed_tokens.mean(axis=0).sum()
        return float(largest / mean) if mean else 1.0

    @property
    def imbalance_of_minutes(self) -> float:
        """The mean of this ratio over all minutes with computed tokens, each counted alike."""
        minutes = self.computed_tokens[:, self.computed_tokens.any(axis=0)]
        return float((minutes.max(axis=0) / minutes.mean(axis=0)).mean()) if minutes.size else 1.0

    def first_token_percentile_s(self, percent: float) -> float:
        """Return a percentile of the times to the first token, in seconds; NaN without any."""
        known_s = self.first_token_s[~np.isnan(self.first_token_s)]
        return float(np.percentile(known_s, percent)) if len(known_s) else math.nan


@dataclass(frozen=True, slots=True)
class Report:
    """A message to the router at ``at_s`` seconds: the requests with a first token, and those that ended in any way."""

    at_s: float
    first_tokens: tuple[int, ...]
    ended: tuple[int, ...]


class ReplicaMeters:
    """Records the steps of one replica in the cluster's log, under the cluster's numbers of requests.

    The log has a request from its arrival at the cluster on, so a request that was moved is in it once.

    Args:
        log: the log of the cluster.

    Attributes:
        next_number: number of the request that is offered next.
        under_way: the offered requests that have not ended, by number.
        num_computed_tokens: tokens computed so far.
    """

    def __init__(self, log: RequestLog) -> None:
        self._log = log
        self.next_number = 0
        self.under_way: dict[int, ScheduledRequest] = {}
        self.num_computed_tokens = 0
        self._reports: list[Report] = []
        self._refused: list[int] = []

    @property
    def uses_rows(self) -> bool:
        """Whether the running rows are used."""
        return False

    @property
    def num_requests(self) -> int:
        """The number that the next request gets."""
        return self.next_number

    def take_reports(self, now_s: float) -> list[Report]:
        """Return the reports since the last call; requests that were refused ended at ``now_s``."""
        refused, self._refused = self._refused, []
        reports, self._reports = self._reports, []
        return reports + ([Report(now_s, (), tuple(refused))] if refused else [])

    def arrived(
        self, request: ScheduledRequest, arrival_s: float, *, has_content: bool, tenant: str | None = None
    ) -> None:
        """Record a request as under way."""
        del arrival_s, has_content, tenant  # the cluster has logged them
        self.under_way[request.number] = request

    def rejected(self, request: ScheduledRequest) -> None:
        """Record that a request cannot be served."""
        del self.under_way[request.number]
        self._refused.append(request.number)

    def scheduled(self, batch: Batch, now_s: float) -> None:
        """Log admissions and preemptions."""
        self._log.scheduled(batch, now_s)
        for request in batch.rejected:
            self.rejected(request)

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:
        """Log a step, and count its tokens."""
        self._log.planned(batch, running, work)
        self.num_computed_tokens += work.num_new_tokens

    def hold(self, duration_s: float, running: RunningRows, num_waiting: int, num_swapped: int) -> None:
        """Log a duration in which nothing changes."""
        self._log.hold(duration_s, running, num_waiting, num_swapped)

    def stepped(self, step_s: float) -> None:
        """Log the seconds of a step."""
        self._log.stepped(step_s)

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Log first and last tokens, and keep them for the router."""
        self._log.progressed(progress, end_s)
        first_tokens = tuple(request.number for request in progress.first_tokens)
        ended = tuple(request.number for request in progress.finished)
        for number in ended:
            del self.under_way[number]
        if first_tokens or ended:
            self._reports.append(Report(end_s, first_tokens, ended))


class Replica:
    """One lifetime of a replica.

    Args:
        name: its name; lifetime: number of its process under this name, from 1.
        config: of its space and scheduler; costs: duration of its steps.
        log: the log of the cluster.

    Attributes:
        next_batch: number of its next batch of events.
        needs_snapshot: whether the router's index needs a snapshot, since it noticed a gap.
        is_dead: whether it was killed.
    """

    def __init__(self, name: str, lifetime: int, config: ServingConfig, costs: CostModel, log: RequestLog) -> None:
        self.name = name
        self.number_of_lifetime = lifetime
        self.lifetime = str(lifetime)
        self.space = BlockSpace(replace(config.space_config(), explain=False))
        self.meters = ReplicaMeters(log)
        self.clock = VirtualClock(config, costs, self.space, self.meters, uses_queue_file=False)
        self.next_batch = 0
        self.needs_snapshot = False
        self.is_dead = False
        self._load = config.load

    @property
    def next_s(self) -> float:
        """The time at which its next step begins; infinite if it has no request, or was killed."""
        return math.inf if self.is_dead or self.clock.is_idle else self.clock.now_s

    def offer(self, number: int, request: TokenizedRequest, now_s: float) -> None:
        """Offer a request of the cluster, as arriving at ``now_s``; a killed replica ignores it."""
        if not self.is_dead:
            self.meters.next_number = number
            self.clock.offer(replace(request, arrival_s=now_s * self._load))

    def num_sent_tokens(self, number: int) -> int:
        """Return the tokens that it has sent of a request's answer; 0 for several samples, which are computed anew."""
        request = self.meters.under_way.get(number)
        return 0 if request is None or request.num_sequences > 1 else request.num_generated


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
