"""The inspector's page over a replay, from the first request until Ctrl-C.

The replay reports its requests and steps to the inspector, and is held to a pace: virtual time passes at a speed of
this machine's time. Work of other threads runs meanwhile::

    replay      | step |   hold   | step | hold | step |    hold     |
    calls                ^  ^^                              ^           run within a hold, between two steps
"""

import asyncio
import queue
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, ValuesView
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

import typer

from pagedkv.api_keys import new_key
from pagedkv.cli.options import InspectOptions, is_loopback
from pagedkv.engine.step import Recorder
from pagedkv.errors import EngineError
from pagedkv.planner.traces.request import Request
from pagedkv.scheduling import Batch, Progress, Request as ScheduledRequest
from pagedkv.server.config import Access, ApiKeys, Caller, OpenAccess
from pagedkv.server.inspector import InspectedReplay, MissedTokens, ReplayServer, ReplayState
from pagedkv.simulation import VirtualServer
from pagedkv.simulation.meters import MISS_LABELS, RunningRows, StepWork
from pagedkv.simulation.server import ReplayedRequest, RequestsUnderWay
from pagedkv.space import BlockSpace
from pagedkv.tiers.served import LoadUnderWay, TierStatistics

T = TypeVar("T")
ADMINISTRATOR: Final = "administrator"


@contextmanager
def replay_page(title: str, options: InspectOptions) -> Iterator["ReplayPage"]:
    """Yield a page to show a replay with; its server ends with the block.

    Raises:
        ConfigurationError: the file of keys cannot be read.
    """
    access, key = _access(options)
    with ExitStack() as serving:
        yield ReplayPage(title, options, access, key, serving)


def _access(options: InspectOptions) -> tuple[Access, str | None]:
    """Return who may see the page, and the key that was made for it, if any."""
    if options.inspect_keys is not None:
        return ApiKeys.read(options.inspect_keys), None
    if is_loopback(options.inspect_host):
        return OpenAccess(), None
    key, digest = new_key()
    return ApiKeys({digest: Caller(ADMINISTRATOR, is_admin=True)}), key


@final
class ReplayPage:
    """The page over one replay.

    Args:
        title: the page's title.
        options: where it is served, and how fast the replay runs.
        access: identifies callers; key: the key to be printed, if one was made.
        serving: the page is served until this is closed.
    """

    def __init__(
        self, title: str, options: InspectOptions, access: Access, key: str | None, serving: ExitStack
    ) -> None:
        self._title = title
        self._options = options
        self._access = access
        self._key = key
        self._serving = serving
        self._pace = Pace(options.speed)
        self._is_over = False

    def follow(self, server: VirtualServer, first: Request) -> None:
        """Serve the page of a replay, before it gets its first request.

        Raises:
            ConfigurationError: the server cannot listen at the address.
        """
        pace, subject = self._pace, ReplaySubject(server)
        inspected = InspectedReplay(
            subject,
            self._between_steps,
            virtual_clock=lambda: pace.now_s,
            state=lambda: follower.state(is_over=self._is_over),
            unit_s=pace.speed or 1.0,
            shows_tokens=first.prompt_token_ids is not None,
        )
        follower = ReplayFollower(server, subject, inspected, pace)
        server.follow(follower)
        page = ReplayServer(inspected, self._title, self._access, lambda paused: pace.pause(is_paused=paused))
        url = self._serving.enter_context(page.running(self._options.inspect_host, self._options.inspect_port))
        self._serving.callback(pace.close)
        typer.echo(f"pagedkv: the replay is shown at {url}", err=True)
        if self._key is not None:
            typer.echo(f"pagedkv: its administrator's key is {self._key}", err=True)

    def _between_steps(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.wrap_future(self._pace.call_soon(work))

    def stay(self) -> None:
        """Serve the page of the replay that has ended, until Ctrl-C."""
        self._is_over = True
        with suppress(KeyboardInterrupt):
            typer.echo("pagedkv: the replay has ended; its page stays until Ctrl-C", err=True)
            self._pace.stay()


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
class Pace:
    """The pace of one replay. Its thread calls ``hold``, ``stay`` and ``close``, any thread ``call_soon``.

    Args:
        speed: virtual seconds for each second of this machine; None: holds take no time.
        clock: returns monotonic seconds.

    Attributes:
        is_paused: whether virtual time stands still. Changed by calls alone.
    """

    def __init__(self, speed: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.speed = speed
        self.is_paused = False
        self._clock = clock
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._unanswered: set[Future[Any]] = set()  # also of a call that an interruption took from the queue unrun
        self._is_closed = False
        self._passed_s = 0.0
        self._end_s = 0.0
        self._last_at = clock()  # when virtual time was at passed_s

    @property
    def now_s(self) -> float:
        """Virtual seconds that have passed. Only the replay's thread may ask."""
        return self._passed_s

    def call_soon(self, work: Callable[[], T]) -> Future[T]:
        """Run work in the replay's thread, within a hold. The future has its result, or EngineError after the end."""
        future: Future[T] = Future()
        self._unanswered.add(future)
        future.add_done_callback(self._unanswered.discard)
        self._calls.put(_Call(work, future))
        if self._is_closed:
            self._refuse_all()
        return future

    def hold(self, from_s: float, duration_s: float) -> None:
        """Let virtual time pass, and run the calls that come meanwhile."""
        self._passed_s, self._end_s = max(self._passed_s, from_s), from_s + duration_s
        while True:
            self._run_waiting()
            left_s = 0.0 if self.is_paused else self._due_at() - self._clock()
            if left_s <= 0 and not self.is_paused:
                break
            self._run_next(LONGEST_WAIT_S if self.is_paused else min(left_s, LONGEST_WAIT_S))
        self._last_at = max(self._due_at(), self._clock() - MOST_LAG_S)
        self._passed_s = max(self._passed_s, self._end_s)

    def _due_at(self) -> float:
        """Return when this hold is over."""
        return self._last_at + (0.0 if self.speed is None else (self._end_s - self._passed_s) / self.speed)

    def _run_waiting(self) -> None:
        while not self._calls.empty():
            self._run_next(LONGEST_WAIT_S)

    def _run_next(self, timeout_s: float) -> None:
        """Wait for a call, and run it."""
        with suppress(queue.Empty):
            call = self._calls.get(timeout=timeout_s)
            self._advance()
            call.run()

    def _advance(self) -> None:
        """Count the virtual time that has passed within this hold."""
        now = self._clock()
        if self.is_paused or self.speed is None:
            self._last_at = now
            return
        passed_s = min(self._end_s - self._passed_s, max(0.0, now - self._last_at) * self.speed)
        self._passed_s += passed_s
        self._last_at += passed_s / self.speed

    def pause(self, *, is_paused: bool) -> None:
        """Let virtual time stand still, or pass again; takes effect within the next hold, or in this one."""
        self.call_soon(lambda: self._set_paused(is_paused=is_paused))

    def _set_paused(self, *, is_paused: bool) -> None:
        self.is_paused = is_paused
        self._last_at = self._clock()

    def stay(self) -> None:
        """Run calls until Ctrl-C, which this raises."""
        while True:
            self._run_next(LONGEST_WAIT_S)

    def close(self) -> None:
        """Refuse all calls from now on, and those without an answer."""
        self._is_closed = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        for future in self._unanswered.copy():
            with suppress(InvalidStateError):  # answered or cancelled meanwhile
                future.set_exception(EngineError("the replay has ended"))


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

    def arrived(
        self, request: ScheduledRequest, arrival_s: float, *, has_content: bool, tenant: str | None = None
    ) -> None:
        """Report a request."""
        del has_content, tenant
        self._inspected.arrived(self._under_way.arrived(request), arrival_s)

    def rejected(self, request: ScheduledRequest) -> None:
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
        step, num_finished = self._steps.popleft(), len(progress.finished)
        if step.is_of_note or num_finished:
            seconds = (0.0, step.seconds or 0.0, 0.0, 0.0)
            self._inspected.stepped(self._recorder.record_of(step.batch, seconds, num_finished=num_finished))

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


MOST_LAG_S: Final = 0.5
"""Time that a slow machine makes up for later; more is lost, so that a long stretch does not rush by afterwards."""
LONGEST_WAIT_S: Final = 0.5
"""A signal that comes just before a wait is handled after it."""


@final
class _Call:
    """Work, and the future of its result."""

    def __init__(self, work: Callable[[], Any], future: Future[Any]) -> None:
        self._work = work
        self._future = future

    def run(self) -> None:
        """Run the work, unless the caller has cancelled it."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            result = self._work()
        except Exception as problem:  # noqa: BLE001 - the caller's, who gets it
            self._future.set_exception(problem)
        else:
            self._future.set_result(result)
