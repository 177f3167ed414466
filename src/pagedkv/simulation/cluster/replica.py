"""One replica of a cluster: its clock, its space, and the requests that it serves, by their numbers in the cluster."""

import math
from dataclasses import dataclass, replace

from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.scheduling import Batch, Progress, Request
from pagedkv.simulation.config import ServingConfig
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.request_log import RequestLog
from pagedkv.simulation.running_rows import RunningRows
from pagedkv.simulation.step_work import StepWork
from pagedkv.simulation.virtual_clock import VirtualClock
from pagedkv.space import BlockSpace

__all__ = ["Replica", "ReplicaMeters", "Report"]


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
        self.under_way: dict[int, Request] = {}
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

    def arrived(self, request: Request, arrival_s: float, *, has_content: bool, tenant: str | None = None) -> None:
        """Record a request as under way."""
        del arrival_s, has_content, tenant  # the cluster has logged them
        self.under_way[request.number] = request

    def rejected(self, request: Request) -> None:
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
