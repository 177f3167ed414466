"""StepLoop: runs steps. Schedule, carry the plan out, run the model, sample, advance the scheduler, record.

:class:`LiveRequests` has the requests that wait or run, and what admissions, tokens and failures change in them;
:class:`RequestRules` has refused what the engine cannot serve, and filled in what parameters leave open.

With ``EngineConfig.overlap`` a call launches a step and then finishes the one before: see
:mod:`~pagedkv.engine.core`, where both are drawn.

A step that fails is aborted, and its requests are scheduled again: one more step, the retry. If that one fails too, the
prompts that it computes end, or, if it computes none, all of its requests. Others go on::

    step 7 fails     aborted: rows return to the tokens that are computed
    step 8           the retry; after a shortage of memory with half as many tokens
    step 8 fails     aborted; requests with prompts in it end "failed", else all of its requests
    step 9           those that are left

Not retried are errors of this library, broken assertions among them, and the loss of the device: these end the engine.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
import torch

from pagedkv.contract.arguments import require_instance
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.device import StepInputs, is_device_failure
from pagedkv.engine.adapters import Adapters, keys_for
from pagedkv.engine.answering import Answering, RowLists, SampledRow, Sampling, Taken, lines_of
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.drafter import Drafter
from pagedkv.engine.engine_tiers import EngineTiers
from pagedkv.engine.outputs import FinishReason, StepRecord
from pagedkv.engine.parts import EngineParts
from pagedkv.engine.ranks import RankGroup, SentStep
from pagedkv.engine.request import PLAIN, Decode, EngineRequest, Intent, RequestSpec
from pagedkv.engine.runner import FlatBatch, PromptReading, adapters_of, flatten, readings_of
from pagedkv.engine.sampling import SamplingParams, seed_of
from pagedkv.errors import ConfigurationError, PagedKVError, RequestError
from pagedkv.scheduling import AbortedBatches, Batch, Progress, Request, Scheduler, longest_alone
from pagedkv.space import BlockSpace


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was launched and is not finished.

    Args:
        batch: the step; rows: the rows to be sampled, in the batch's order.
        places: places of the rows that were sampled, without answers that had ended; None: all of them.
        sampling: the sampled tokens; None: no row was sampled.
    """

    batch: Batch
    rows: Sequence[SampledRow]
    places: list[int] | None = None
    sampling: Sampling | None = None


STEPS_UNTIL_FULL: Final = 64
"""Steps without a failure after which a step may be as large as before memory ran out."""


def may_be_retried(problem: Exception) -> bool:
    """Return whether a step that raised this can be computed again: the model or memory failed, and not this engine."""
    return not isinstance(problem, (AssertionError, PagedKVError)) and not is_device_failure(problem)


@final
class FailedSteps:
    """The failures of one engine's steps.

    Args:
        max_batched_tokens: tokens of a step, if memory does not run out.

    Attributes:
        max_batched_tokens: tokens of the next step at most.
        reason: what the last step that failed raised; None before one did.
    """

    def __init__(self, max_batched_tokens: int) -> None:
        self._most = self.max_batched_tokens = max_batched_tokens
        self._num_in_turn = 0
        self._num_good = 0
        self.reason: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether the last step and its retry have failed, so that requests are to end."""
        return self._num_in_turn > 1

    def note_failure(self, problem: Exception) -> None:
        """Record that a step failed. If memory ran out, later steps are half as large."""
        self._num_in_turn = 1 if self.is_final else self._num_in_turn + 1
        self._num_good = 0
        self.reason = f"{type(problem).__name__}: {problem}"
        if isinstance(problem, (torch.OutOfMemoryError, MemoryError)):
            self.max_batched_tokens = max(1, self.max_batched_tokens // 2)

    def note_success(self) -> None:
        """Record that a step has computed tokens."""
        self._num_in_turn = 0
        if self.max_batched_tokens < self._most:
            self._num_good += 1
            if self._num_good >= STEPS_UNTIL_FULL:
                self.max_batched_tokens = self._most


@final
class Recorder:
    """Makes the records of one engine's steps.

    Args:
        scheduler, space: of the engine; the numbers of blocks are counted once.
    """

    def __init__(self, scheduler: Scheduler, space: BlockSpace) -> None:
        self._scheduler = scheduler
        self._space = space
        pools = space.config.blocks_by_pool()
        self._pools = tuple(pools)
        self._num_blocks = sum(pools.values()) - len(pools)  # without the null blocks

    def record_of(
        self, batch: Batch, seconds: Sequence[float], *, num_finished: int, num_accepted: int = 0
    ) -> StepRecord:
        """Make the record of a step, after it.

        Args:
            batch: the step.
            seconds: of scheduling, the forward pass, sampling and finishing.
            num_finished, num_accepted: requests that the same call finished, and drafts that it accepted.
        """
        kinds = [preempted.kind for preempted in batch.preempted]
        space = self._space
        num_unused = sum(space.num_free_blocks(pool) + space.num_absent_blocks(pool) for pool in self._pools)
        return StepRecord(
            step_id=batch.plan.step_id,
            num_decoded=len(batch.decoded_token_ids),
            num_prefilled=sum(len(chunk.token_ids) for chunk in batch.prefilling),
            num_sampled=batch.num_samples,
            num_admitted=len(batch.admitted),
            num_resumed=len(batch.resumed),
            num_swapped_out=kinds.count("swap"),
            num_recomputed=kinds.count("recompute"),
            num_finished=num_finished,
            num_rejected=len(batch.rejected),
            num_hit_tokens=sum(admission.num_hit_tokens for admission in batch.admitted),
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            num_swapped=self._scheduler.num_swapped,
            num_used_blocks=self._num_blocks - num_unused,
            num_blocks=self._num_blocks,
            schedule_seconds=seconds[0],
            forward_seconds=seconds[1],
            sample_seconds=seconds[2],
            finish_seconds=seconds[3],
            num_drafted=batch.num_drafted,
            num_accepted=num_accepted,
        )


@final
class RequestRules:
    """The limits of one engine.

    Args:
        config: the engine's configuration.
        space: the block space, which has the longest sequence and the tenants.
        end_ids: tokens that end a sequence, unless its request ignores them.
        num_vocabulary: columns of the logits.
        decode: maps token ids to text, for stop texts; None: there are none.
        adapters: the model's adapters; None: there are none.
    """

    def __init__(
        self,
        config: EngineConfig,
        space: BlockSpace,
        end_ids: frozenset[int],
        num_vocabulary: int,
        decode: Decode | None,
        adapters: Adapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._config = config
        self._space = space
        self._end_ids = end_ids
        self._num_vocabulary = num_vocabulary
        self._decode = decode

    def complete(
        self, prompt_token_ids: Int32Array, params: SamplingParams, intent: Intent, number: int
    ) -> RequestSpec:
        """Fill in the values that the parameters leave open; the default seed comes from the request's ``number``.

        Raises RequestError if the prompt, the parameters or the intent cannot be served.
        """
        self._require_tokens(prompt_token_ids)
        require_possible(intent, self._space, len(prompt_token_ids))
        for token_ids in (intent.prediction, intent.answered):
            if token_ids:
                self._require_tokens(np.array(token_ids, np.int32))
        longest = self._space.config.max_tokens
        if self._config.beyond_context == "clip":
            num_answers = max(params.n, params.num_beams)
            longest = longest_alone(self._space, len(prompt_token_ids), num_answers, intent.tenant)
        room = longest - len(prompt_token_ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if self._config.beyond_context == "clip":
            max_tokens = min(max_tokens, room)
        if max_tokens > room or max_tokens < max(1, params.min_tokens):
            is_least = params.max_tokens is None or self._config.beyond_context == "clip"
            wanted = max(1, params.min_tokens) if is_least else params.max_tokens
            raise RequestError(
                f"a prompt of {len(prompt_token_ids)} tokens and {wanted} new ones are more than the "
                f"{longest} of the longest sequence: shorten one, set max_tokens of the engine "
                "if the model knows more, or let answers end there (EngineConfig(beyond_context='clip'))"
            )
        if intent.answered:
            _require_continuable(intent.answered, params, max_tokens)
        own_ends = frozenset() if params.ignore_eos else self._end_ids
        return RequestSpec(
            prompt_token_ids,
            params,
            max_tokens,
            own_ends | set(params.stop_token_ids),
            self._end_ids,
            seed_of(self._config.seed, number),
            self._num_vocabulary,
            self._decode,
            intent,
            keys_for(self._adapters, intent.adapter, intent.salt),
        )

    def all_keys(self, salt: bytes) -> list[RequestKeys]:
        """Return the extra keys of blocks of all requests with a salt: without an adapter, and with each."""
        names = () if self._adapters is None else self._adapters.names
        return [keys_for(self._adapters, name, salt) for name in (None, *names)]

    def too_large(self, spec: RequestSpec) -> RequestError:
        """Return the error for a request that does not fit the pools, even alone."""
        num_answers = max(spec.params.n, spec.params.num_beams)
        return RequestError(
            f"a prompt of {len(spec.prompt_token_ids)} tokens with {num_answers} answers of {spec.max_tokens} does "
            f"not fit {self._space.config.blocks_by_pool()} blocks and {self._config.max_sequences} sequences, even "
            "alone: ask for less (n, max_tokens), or give the engine more memory"
        )

    def beyond_limits(self, request: EngineRequest) -> str:
        """Return the message for a request that exceeds its tenant's limits."""
        tenant, params = request.intent.tenant, request.params
        return (
            f"a prompt of {len(request.prompt_token_ids)} tokens with {max(params.n, params.num_beams)} answers of "
            f"{request.spec.max_tokens} needs more than tenant {tenant!r} can have, {self._space.most_blocks(tenant)} "
            "blocks: ask for less (n, max_tokens), or raise its cap"
        )

    def _require_tokens(self, prompt_token_ids: Int32Array) -> None:
        if not len(prompt_token_ids):
            raise RequestError("a prompt needs at least one token, and this one is empty")
        low, high = int(prompt_token_ids.min()), int(prompt_token_ids.max())
        if low < 0 or high >= self._num_vocabulary:
            raise RequestError(
                f"token ids must be from 0 to {self._num_vocabulary - 1}, got {low if low < 0 else high}: is this the "
                "model's own tokenizer?"
            )


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
        for request, failure in taken.failures.items():
            self.fail(request, failure)


@final
class StepLoop:
    """The steps of one engine.

    Args:
        config, scheduler, requests, answering: of the engine; parts: its model over blocks.
        ranks: the processes that share the model's heads; None: this process has the whole model.
        clock: returns seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        parts: EngineParts,
        scheduler: Scheduler,
        requests: LiveRequests,
        *,
        answering: Answering,
        ranks: RankGroup | None,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._parts = parts
        self._scheduler = scheduler
        self._requests = requests
        self._answering = answering
        self._ranks = ranks
        self._clock = clock
        self._began = clock()
        self._recorder = Recorder(scheduler, parts.space)
        self._failed_steps = FailedSteps(config.max_batched_tokens)
        self._flight: Flight | None = None
        self._last_done = 0  # the last step that the device has run
        self._num_finished = self._num_accepted = 0  # of this call: requests that ended, drafts that were accepted

    @property
    def has_flight(self) -> bool:
        """Whether a step is launched and not finished."""
        return self._flight is not None

    def step(self) -> StepRecord:
        """Run one step; with overlap, launch one and finish the one before."""
        times = [self._begin()]
        batch = self._scheduler.schedule(self._failed_steps.max_batched_tokens)
        tiers = self._requests.tiers
        if tiers is not None and not (_computes(batch) or (self._flight is not None and _computes(self._flight.batch))):
            tiers.await_load()
        self._requests.note_admitted(batch)
        times.append(self._clock())
        try:
            logits = self._forward(batch)
        except Exception as problem:  # noqa: BLE001 - raised again unless the step can be repeated
            return self._failed(batch, times, problem)
        flight = Flight(batch, self._requests.rows.of(batch))
        times.append(self._clock())
        if self._config.overlap:
            self.finish_last()
            times.append(self._clock())
        try:
            self._sample(flight, logits)
        except Exception as problem:  # noqa: BLE001 - as above
            has_beams = any(row.request.beams is not None for row in flight.rows)  # which have advanced
            return self._failed(batch, times, problem, is_repeatable=not has_beams)
        times.append(self._clock())
        if self._config.overlap:
            self._flight = flight
            if self._scheduler.is_idle:  # no step follows that could overlap this one
                self.finish_last()
            seconds = np.diff(times)[[0, 1, 3, 2]]
        else:
            self._finish(flight)
            times.append(self._clock())
            seconds = np.diff(times)
        if _computes(batch):
            self._failed_steps.note_success()
        if tiers is not None:
            tiers.after_step(batch, times[-1] - times[0], is_idle=self._scheduler.is_idle)
        return self._recorder.record_of(
            batch, seconds.tolist(), num_finished=self._num_finished, num_accepted=self._num_accepted
        )

    def _begin(self) -> float:
        """Supply rows that waited; end loads that have arrived, and leases that are over; return the time."""
        self._num_finished = self._num_accepted = 0
        if self._answering.held:
            self._supply()
        if self._requests.tiers is not None:
            self._requests.tiers.before_step(none_running=not self._scheduler.running)
        now = self._clock()
        if self._config.leases:
            self._parts.space.advance(max(self._parts.space.now_s, now - self._began))
        return now

    def _sample(self, flight: Flight, logits: torch.Tensor) -> None:
        """Begin to sample the rows whose answers have not ended. Tokens stay on the device for the next step."""
        rows = flight.rows
        if self._config.overlap and not all(row.goes_on for row in rows):
            flight.places = [place for place, row in enumerate(rows) if row.goes_on]
            lines = lines_of(rows)
            logits = logits[[line for place in flight.places for line in lines[place]]]
            rows = [rows[place] for place in flight.places]
        if rows:
            flight.sampling = self._answering.begin(logits, rows)
            if self._config.overlap:
                self._keep_last_tokens(flight)

    def _keep_last_tokens(self, flight: Flight) -> None:
        """Keep the tokens of rows that may run ahead: neither beams nor rows with drafts do, which have more tokens."""
        sampling = flight.sampling
        if sampling is None or sampling.pending is None:
            return
        rows, token_ids = flight.batch.sampled_rows(), sampling.pending.token_ids
        rows = rows if flight.places is None else rows[flight.places]
        rows = rows if len(sampling.places) == len(rows) else rows[sampling.places]
        drawn = [sampling.rows[place] for place in sampling.places]
        if any(row.drafts for row in drawn):
            plain = [place for place, row in enumerate(drawn) if not row.drafts]
            lines = lines_of(drawn)
            rows, token_ids = rows[plain], token_ids[[lines[place].start for place in plain]]
        self._parts.runner.last_tokens.keep(rows, token_ids)

    def _finish(self, flight: Flight) -> None:
        """Append a step's sampled tokens to the answers, and finish the step in the scheduler."""
        batch, rows, places = flight.batch, flight.rows, flight.places
        taken = Taken(np.zeros(0, np.int32)) if flight.sampling is None else self._answering.end(flight.sampling)
        if self._ranks is not None:
            self._ranks.finish_step()
        if places is not None:
            taken = taken.among(places, len(rows))
        self._last_done = max(self._parts.executor.done(), default=self._last_done)
        for request, failure in taken.failures.items():
            if request.scheduled.num_ahead > 1:  # a later step already decodes the row, so the row cannot be held
                self._requests.fail(request, failure)
        apart = [request.scheduled for request in (*taken.held, *taken.failures)]
        parents = {request.scheduled: beams for request, beams in taken.parents.items()}
        accepted = taken.accepted_of(len(batch.decoded_token_ids)) if taken.num_accepted else None
        progress = self._scheduler.finish(
            batch, taken.token_ids, ended=taken.ended, parents=parents, held=apart, num_accepted=accepted
        )
        self._requests.note_progress(progress, taken, rows)
        if self._requests.tiers is not None:
            self._requests.tiers.chunks_computed(batch, self._requests.by_schedule)
        self._num_finished += len(progress.finished)
        self._num_accepted += sum(taken.num_accepted.values())

    def finish_last(self) -> None:
        """Finish the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._finish(flight)

    def _supply(self) -> None:
        """Sample the waiting rows again, and resume requests that have all their tokens."""
        for request, taken in self._answering.retry_waiting():
            rows = [SampledRow(request, sample) for sample in request.live]
            if taken.failures:
                self._requests.fail(request, taken.failures[request])
                continue
            progress = self._scheduler.supply(request.scheduled, taken.token_ids, ended=taken.ended)
            self._requests.note_progress(progress, taken, rows)
            self._num_finished += len(progress.finished)

    def _forward(self, batch: Batch) -> torch.Tensor:
        flat = flatten(batch)
        if self._parts.adapters is not None:
            flat = replace(flat, adapters=adapters_of(batch))
        plan = batch.plan
        readings: Sequence[PromptReading] = ()
        if batch.prefilling:
            requests = [self._requests.by_schedule[chunk.request] for chunk in batch.prefilling]
            readings = readings_of(zip(requests, batch.prefilling, flat.chunk_starts, strict=True))
        drafter = self._parts.drafter if len(flat.token_ids) else None
        if self._ranks is not None and drafter is None:
            self._ranks.send(SentStep(plan, flat, is_scored=len(readings) > 0))
        if not len(flat.token_ids):
            return self._parts.executor.launch(plan, lambda _: torch.zeros(0))
        executor, runner = self._parts.executor, self._parts.runner
        if drafter is None:
            logits = executor.launch(plan, lambda inputs: runner.compute(plan, inputs, flat, readings))
        else:
            logits = executor.launch(plan, lambda inputs: self._draft(drafter, batch, inputs, flat, readings))
        is_one_each = len(flat.source) == len(flat.wanted) and bool((flat.source[1:] > flat.source[:-1]).all())
        return logits if is_one_each else logits[torch.from_numpy(flat.source).to(logits.device)]

    def _draft(
        self,
        drafter: Drafter,
        batch: Batch,
        inputs: StepInputs,
        flat: FlatBatch,
        readings: Sequence[PromptReading],
    ) -> torch.Tensor:
        """Run the models of a step: first a draft model, whose drafts the other model then verifies.

        Only rank 0 has the draft model: the other ranks get the step with its drafts.
        """
        flat, drafts = drafter.draft(batch, inputs, flat, self._requests.rows.decoding(batch))
        if len(drafts):
            self._scheduler.fill_drafts(batch, drafts)
        if self._ranks is not None:
            self._ranks.send(SentStep(batch.plan, flat, is_scored=len(readings) > 0))
        return self._parts.runner.compute(batch.plan, inputs, flat, readings)

    # Steps that fail

    def _failed(
        self, batch: Batch, times: list[float], problem: Exception, *, is_repeatable: bool = True
    ) -> StepRecord:
        """Abort a failed step, and end requests of it if it was the retry. Raises the problem if it cannot be repeated.

        The step before it is finished first.
        """
        is_whole = self._ranks is None  # other ranks may have run the step
        if not (is_whole and is_repeatable and _computes(batch) and may_be_retried(problem)):
            raise problem
        self._failed_steps.note_failure(problem)
        self.finish_last()
        if self._parts.executor.storage.device.type == "cuda":
            torch.cuda.empty_cache()  # fragments of the failed pass, which the next pass may not fit into
        aborted = self._abort_in_flight()
        assert aborted is not None, f"step {batch.plan.step_id} failed, and is not in flight"
        for scheduled in aborted.withdrawn:
            if not scheduled.num_preemptions:  # this was its first admission
                request = self._requests.by_schedule[scheduled]
                request.num_cached_tokens = request.explanation = request.admitted = None
        for scheduled in aborted.preempted:
            request = self._requests.by_schedule[scheduled]
            request.num_preemptions += 1
            self._answering.forget(request)
        ended = self._ended_by_failure(batch, aborted) if self._failed_steps.is_final else []
        for scheduled in ended:
            error = f"a step that computes it failed twice: {self._failed_steps.reason}"
            self._requests.end(self._requests.by_schedule[scheduled], "failed", error)
        seconds = [*np.diff([*times, self._clock()]).tolist(), 0.0, 0.0]
        record = self._recorder.record_of(
            batch, seconds, num_finished=self._num_finished + len(ended), num_accepted=self._num_accepted
        )
        return replace(
            record,
            num_decoded=0,
            num_prefilled=0,
            num_sampled=0,
            num_admitted=0,
            num_hit_tokens=0,
            num_recomputed=record.num_recomputed + len(aborted.preempted),
            num_drafted=0,
            failure=self._failed_steps.reason,
        )

    def _ended_by_failure(self, batch: Batch, aborted: AbortedBatches) -> list[Request]:
        """Return the requests to end after a failed retry: those whose prompts the step computes; if none, all."""
        prompts = [chunk.request for chunk in batch.prefilling if chunk.request in aborted.requests]
        return prompts or list(aborted.requests)

    def _abort_in_flight(self) -> AbortedBatches | None:
        """Abort the batches in flight, in the space and on the device; return None if there are none."""
        aborted = self._scheduler.abort_in_flight()
        if aborted is not None:
            on_device = tuple(step_id for step_id in aborted.steps.step_ids if step_id > self._last_done)
            self._parts.executor.abort(replace(aborted.steps, step_ids=on_device))
        return aborted

    def abandon(self) -> None:
        """Abort the steps in flight, as far as possible: an error has ended the engine."""
        self._flight = None
        with suppress(PagedKVError):  # the first error is the one to be raised
            self._abort_in_flight()


def _computes(batch: Batch) -> bool:
    return len(batch.plan.compute.rows) > 0


def require_possible(intent: Intent, space: BlockSpace, num_prompt_tokens: int) -> None:
    """Check an intent for a prompt of so many tokens. O(breakpoints + tenants).

    Raises:
        RequestError: it is not an Intent; there is no such tenant; a breakpoint lies after the prompt; ``retention`` is
            1 and the space has no leases; ``replaces`` is not a request.
    """
    if intent is PLAIN:
        return
    require_instance(intent, Intent, "intent", RequestError)
    if intent.replaces is not None:
        require_instance(intent.replaces, EngineRequest, "replaces", RequestError)
    try:
        space.most_blocks(intent.tenant)
    except ConfigurationError as problem:
        raise RequestError(f"the intent names a tenant that this engine does not have: {problem}") from problem
    behind = [place.num_tokens for place in intent.breakpoints if place.num_tokens > num_prompt_tokens]
    if behind:
        raise RequestError(f"a breakpoint after {behind[0]} tokens is behind the prompt, of {num_prompt_tokens} tokens")
    if intent.retention > 0 and not space.config.leases:
        raise RequestError("retention=1 needs EngineConfig(leases=True)")


def _require_continuable(answered: Sequence[int], params: SamplingParams, max_tokens: int) -> None:
    """Check that tokens of an answer can be continued. Raises RequestError."""
    if max(params.n, params.num_beams) > 1:
        raise RequestError(
            f"tokens of an answer are given, and {max(params.n, params.num_beams)} answers or beams are requested: "
            "only a single answer can be continued"
        )
    if len(answered) >= max_tokens:
        raise RequestError(f"{len(answered)} tokens of an answer of at most {max_tokens} are given: none is left")
