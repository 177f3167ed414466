"""LiveRequests: the requests of an engine that wait or run, and what admissions, tokens and failures change in them."""

from collections.abc import Callable, Sequence
from typing import final

from pagedkv.engine.answering import Answering, Taken
from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.outputs import FinishReason
from pagedkv.engine.request_rules import RequestRules
from pagedkv.engine.row_lists import RowLists
from pagedkv.engine.sampled_rows import SampledRow
from pagedkv.engine.tiering import EngineTiers
from pagedkv.scheduling import Batch, Progress, Request, Scheduler
from pagedkv.space import BlockSpace

__all__ = ["LiveRequests"]


@final
class LiveRequests:
    """The requests under way.

    Args:
        scheduler, space, rules: of the engine.
        tiers: its tiers, or None; answering: samples its rows; clock: returns seconds.

    Attributes:
        by_schedule: the requests by the scheduler's record of each, in the order of their numbers.
        rows: lists the answers that a batch samples.
        tiers: the engine's tiers; None: there are none, or :meth:`EngineCore.close` has closed them.
        num_entered: requests that have been given a number.
        on_entered: called with each new request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        space: BlockSpace,
        rules: RequestRules,
        *,
        tiers: EngineTiers | None,
        answering: Answering,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._space = space
        self._rules = rules
        self._answering = answering
        self._clock = clock
        self.tiers = tiers
        self.by_schedule: dict[Request, EngineRequest] = {}
        self.rows = RowLists(self.by_schedule)
        self.num_entered = 0
        self.on_entered: list[Callable[[EngineRequest], None]] = []

    def enter(self, request: EngineRequest) -> None:
        """Add a request that the scheduler has taken."""
        self.num_entered += 1
        self.by_schedule[request.scheduled] = request
        for note in self.on_entered:
            note(request)

    def refuse(self, request: EngineRequest) -> None:
        """End a request that exceeds its tenant's limits, "rejected"; raise RequestError for any other reason."""
        if request.intent.tenant is None or not self._scheduler.fits_alone(request.scheduled, within_limits=False):
            raise self._rules.too_large(request.spec)
        self.num_entered += 1
        request.end("rejected", self._clock(), self._rules.beyond_limits(request))

    def end(self, request: EngineRequest, reason: FinishReason, error: str | None = None) -> None:
        """End a request now. Without effect on one that has ended."""
        if self.by_schedule.pop(request.scheduled, None) is not None:
            self._answering.forget(request)
            self._scheduler.abort(request.scheduled)
            if self.tiers is not None:
                self.tiers.ended(request)
            request.end(reason, self._clock(), error)

    def end_all(self, error: str) -> None:
        """End all requests with their tokens so far: the device is lost, and their blocks with it."""
        now = self._clock()
        for request in self.by_schedule.values():
            request.end("failed", now, error)
        self.by_schedule.clear()

    def fail(self, request: EngineRequest, failure: Exception) -> None:
        """End a request whose sampling has failed."""
        self.end(request, "failed", f"{type(failure).__name__}: {failure}")

    def note_admitted(self, batch: Batch) -> None:
        """Record what scheduling a batch decided: preemptions, admissions and rejections."""
        for preempted in batch.preempted:
            request = self.by_schedule[preempted.request]
            request.num_preemptions += 1
            if preempted.kind == "recompute":
                self._answering.forget(request)  # its waiting rows are sampled again after the recomputation
        for admission in batch.admitted:
            request = self.by_schedule[admission.request]
            if self.tiers is not None:
                self.tiers.admitted(request, admission.num_hit_tokens)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = min(admission.num_hit_tokens, len(request.prompt_token_ids))
                request.explanation = self._space.explanation(admission.request.rows[0])
                request.admitted = self._clock()
        for rejected in batch.rejected:
            request = self.by_schedule[rejected]
            reason = f"{rejected.rejection}; ask for less, or give the engine more memory"
            fits = request.intent.tenant is None or self._scheduler.fits_alone(rejected)
            self.end(request, "rejected", reason if fits else self._rules.beyond_limits(request))

    def note_progress(self, progress: Progress, taken: Taken, rows: Sequence[SampledRow]) -> None:
        """Record the tokens of a step: first tokens, answers and requests that ended, and failures."""
        now = self._clock()
        for scheduled in progress.first_tokens:
            request = self.by_schedule[scheduled]
            request.first_token = now if request.first_token is None else request.first_token
            if self.tiers is not None and scheduled not in progress.finished:
                self.tiers.prompt_computed(request)
        for place in taken.ended:
            request, ended = rows[place].request, rows[place].sample
            request.live = [each for each in request.live if each is not ended]
        if taken.ended:
            self.rows.forget()
        for scheduled in progress.finished:
            request = self.by_schedule.pop(scheduled)
            if self.tiers is not None:
                self.tiers.ended(request)
            request.end("length", now)
        self.note_failures(taken)

    def note_failures(self, taken: Taken) -> None:
        """End the requests whose sampling failed."""
        for request, failure in taken.failures.items():
            self.fail(request, failure)
