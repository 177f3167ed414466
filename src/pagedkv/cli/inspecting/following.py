"""ReplayFollower: reports the requests and steps of a replay to the inspector, and holds the replay to its pace."""

from collections import deque
from collections.abc import ValuesView
from dataclasses import dataclass
from typing import Final, final

from pagedkv.cli.inspecting.pace import Pace
from pagedkv.engine.step import Finished, Recorder
from pagedkv.scheduling import Batch, Progress, Request
from pagedkv.server.inspector import InspectedReplay, MissedTokens, ReplayState
from pagedkv.simulation import VirtualServer
from pagedkv.simulation.meters.meters import MISS_LABELS
from pagedkv.simulation.requests_under_way import ReplayedRequest, RequestsUnderWay
from pagedkv.simulation.running_rows import RunningRows
from pagedkv.simulation.step_work import StepWork
from pagedkv.space import BlockSpace
from pagedkv.tiers.served import LoadUnderWay, TierStatistics

__all__ = ["ReplayFollower", "ReplaySubject"]

MOST_UNITS: Final = 300
"""Units of time that the page's plots show."""


@final
class ReplaySubject:
    """A replay as the inspector looks at an engine.

    Args:
        server: runs the replay.

    Attributes:
        under_way: its requests.
    """

    def __init__(self, server: VirtualServer) -> None:
        self._server = server
        self.under_way = RequestsUnderWay(server.space)

    @property
    def requests(self) -> ValuesView[ReplayedRequest]:
        """Requests that wait or run, in the order of arrival."""
        return self.under_way.requests

    @property
    def space(self) -> BlockSpace:
        """The block space."""
        return self._server.space

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier."""
        tiers = self._server.tiers
        return () if tiers is None else tiers.statistics()

    def tier_loads(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads from tiers that are under way."""
        tiers = self._server.tiers
        return () if tiers is None else tiers.loads()


@dataclass(slots=True, eq=False)
class _Step:
    """A scheduled step, and its seconds; None: it computes and moves nothing."""

    batch: Batch
    seconds: float | None = None

    @property
    def is_of_note(self) -> bool:
        """Whether it did anything."""
        batch = self.batch
        return self.seconds is not None or bool(batch.admitted or batch.resumed or batch.preempted or batch.rejected)


@final
class ReplayFollower:
    """Follows a replay: the further meters of its server.

    Args:
        server: runs the replay.
        subject: has its requests.
        inspected: takes notes of requests and steps.
        pace: lets virtual time pass.
    """

    def __init__(self, server: VirtualServer, subject: ReplaySubject, inspected: InspectedReplay, pace: Pace) -> None:
        self._server = server
        self._under_way = subject.under_way
        self._inspected = inspected
        self._pace = pace
        self._recorder = Recorder(server.scheduler, server.space)
        self._steps: deque[_Step] = deque()
        self._unit_s = 1.0

    @property
    def uses_rows(self) -> bool:
        """Whether the running rows are used."""
        return False

    @property
    def num_requests(self) -> int:
        """Number of requests that have arrived."""
        return self._server.num_requests

    def arrived(self, request: Request, arrival_s: float, *, has_content: bool, tenant: str | None = None) -> None:
        """Report a request."""
        del has_content, tenant
        self._inspected.arrived(self._under_way.arrived(request), arrival_s)

    def rejected(self, request: Request) -> None:
        """Note that a request cannot be served."""
        self._under_way.rejected(request)

    def scheduled(self, batch: Batch, now_s: float) -> None:
        """Note admissions and rejections."""
        del now_s
        self._under_way.scheduled(batch)
        self._steps.append(_Step(batch))

    def planned(self, batch: Batch, running: RunningRows, work: StepWork) -> None:
        """Do nothing: the step was noted when it was scheduled."""

    def stepped(self, step_s: float) -> None:
        """Note the seconds of the last scheduled step."""
        self._steps[-1].seconds = step_s

    def hold(self, duration_s: float, running: RunningRows, num_waiting: int, num_swapped: int) -> None:
        """Let virtual time pass; the page is served meanwhile."""
        del running, num_waiting, num_swapped
        self._pace.hold(self._server.now_s, duration_s)
        if self._pace.speed is None and self._server.now_s > MOST_UNITS * self._unit_s:
            self._unit_s *= 2
            self._inspected.widen(self._unit_s)

    def progressed(self, progress: Progress, end_s: float) -> None:
        """Report the step that has ended."""
        del end_s
        self._under_way.progressed(progress)
        step, finished = self._steps.popleft(), Finished(len(progress.finished))
        if step.is_of_note or finished.num_requests:
            seconds = (0.0, step.seconds or 0.0, 0.0, 0.0)
            self._inspected.stepped(self._recorder.record_of(step.batch, finished, seconds))

    def state(self, *, is_over: bool) -> ReplayState:
        """Return the replay's state; its counts are those of the report."""
        meters = self._server.meters
        by_kind = meters.misses.num_tokens
        return ReplayState(
            self._pace.speed,
            self._pace.is_paused,
            is_over,
            meters.num_requests,
            meters.num_finished,
            meters.num_rejected,
            meters.num_prompt_tokens,
            meters.num_hit_tokens,
            tuple(MissedTokens(label, by_kind[kind]) for kind, label in MISS_LABELS.items()),
        )
