"""EngineCore: the engine's loop. Schedule, carry the plan out, run the model, sample, advance the scheduler.

::

    add(prompt, params)      -> EngineRequest, waiting
    step()                   -> StepRecord
      schedule   scheduler.schedule()              Batch, with the plan
      forward    executor.launch(plan, model)      logits of the sequences to be sampled
      sample     answering.begin(logits, rows)     a token each, except for rows that wait or fail
      finish     answering.end, scheduler.finish   the tokens join their answers, and some answers end

One thread drives it at a time, and a step is over when :meth:`EngineCore.step` returns. A step whose pass or sampling
fails is aborted and tried once more (:mod:`~pagedkv.serving.engine.failed_steps`). Any other error ends the engine.

If steps overlap (``EngineConfig.overlap``), a call launches a step and then finishes the one before, whose tokens the
new step reads from device memory. Sampling comes last, since penalties need the tokens of the step before::

    device   | forward 7 | sample 7 | forward 8 | sample 8 | forward 9
    host       launch 8 ... wait 7 | finish 7 | begin sampling 8 | schedule 9 | launch 9 ... wait 8 | finish 8
"""

from collections.abc import Callable, Iterator, Sequence, ValuesView
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TypeVar, final

import numpy as np
import torch

from pagedkv.memory.attention import AttentionBackend, backend_for
from pagedkv.memory.contract.arguments import as_count, as_token_array, require_instance
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.errors import (
    ConfigurationError,
    DeviceLostError,
    EngineError,
    PagedKVError,
    RequestError,
    TokenError,
    UnsupportedModelError,
)
from pagedkv.memory.contract.space_config import SpaceConfig, TenantLimits
from pagedkv.memory.device import BlockTables, KVStorage, PlanExecutor, StepInputs, block_nbytes_of, is_device_failure
from pagedkv.memory.scheduling import AbortedBatches, Batch, Progress, Request, Scheduler
from pagedkv.memory.space import BlockSpace
from pagedkv.serving.engine import compat
from pagedkv.serving.engine.answering import Answering, Sampler, Taken
from pagedkv.serving.engine.borrowing import BorrowedModel
from pagedkv.serving.engine.captured_passes import (
    CapturedPasses,
    CaptureState,
    of_tables,
    what_prevents_graphs,
)
from pagedkv.serving.engine.compiled_model import LEAST_TOKENS, CompiledModel, what_prevents_compiling
from pagedkv.serving.engine.config import EngineConfig
from pagedkv.serving.engine.drafting import Drafter, DraftModel
from pagedkv.serving.engine.driving import Driver
from pagedkv.serving.engine.engine_request import EngineRequest, RequestSpec
from pagedkv.serving.engine.failed_steps import FailedSteps, may_be_retried
from pagedkv.serving.engine.flat_batch import FlatBatch, flatten
from pagedkv.serving.engine.flights import Finished, Flight
from pagedkv.serving.engine.forking import fork_params, fork_prefix
from pagedkv.serving.engine.grouping import EngineGroups
from pagedkv.serving.engine.intent import PLAIN, Intent
from pagedkv.serving.engine.kv_scales import set_scales
from pagedkv.serving.engine.memory_use import refusing, require_room
from pagedkv.serving.engine.outputs import FinishReason
from pagedkv.serving.engine.prompt_scores import PromptScoring, scorings_of
from pagedkv.serving.engine.ranks import RankGroup, follow
from pagedkv.serving.engine.recording import record_of
from pagedkv.serving.engine.records import StepRecord
from pagedkv.serving.engine.request_rules import RequestRules
from pagedkv.serving.engine.request_tiers import NoTiers, RequestTiers
from pagedkv.serving.engine.row_lists import RowLists
from pagedkv.serving.engine.runner import ModelRunner
from pagedkv.serving.engine.sample import Decode
from pagedkv.serving.engine.sampled_rows import SampledRow, lines_of
from pagedkv.serving.engine.sampling import BatchSampler, SamplingParams
from pagedkv.serving.engine.tiering import EngineTiers, LoadUnderWay, TierStatistics, read_prefix, write_prefix
from pagedkv.serving.engine.unfoldings import AbsorbedLatents, latents_to_absorb

__all__ = ["EngineCore"]

Result = TypeVar("Result")


@final
class EngineCore:
    """An engine without text: token ids in, token ids out.

    Args:
        model: a probed decoder.
        groups: the groups of its layers, and the place of each layer in them.
        config: memory, limits, policies.
        replays_steps, continues: what a self-test found about recurrent layers, see :class:`ModelRunner`. With
            ``replays_steps`` the blocks of decoded tokens are not published, so no other request hits them.
        decode: maps token ids to text, for stop texts; None: requests have none.
        sampler: samples tokens; None: :class:`~pagedkv.serving.engine.sampling.BatchSampler`.
        clock: returns seconds, never backwards.
        ranks: the processes that share the model's heads; None: this process has the whole model.
        draft: a model that proposes tokens, whose groups are the last ones of ``groups``
            (:func:`~pagedkv.serving.engine.drafting.paired`); None: there is none.

    Attributes:
        space: the block space; to be read only.
        executor: storage and block tables; to be read only.
        scheduler: the scheduler; to be read only.
        memory: bytes of device memory that the engine takes, and that were free when it was built.
        driver: the lock of the engine: calls of other threads raise EngineError.
        model_end_ids: tokens that end a sequence, unless its request ignores them.
        absorbed: the layers that attend to latents without unfolding them.
        on_entered: called with each new request before it waits or runs, in the driving thread.

    Raises:
        ConfigurationError: memory or limits that cannot work.
    """

    def __init__(
        self,
        model: compat.Model,
        groups: EngineGroups,
        config: EngineConfig,
        *,
        replays_steps: bool = False,
        continues: bool = True,
        decode: Decode | None = None,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = perf_counter,
        ranks: RankGroup | None = None,
        draft: DraftModel | None = None,
    ) -> None:
        if draft is None and config.num_draft_tokens:
            raise ConfigurationError(
                f"num_draft_tokens is {config.num_draft_tokens}, and there is no draft model to guess them: give one "
                "(`LLM.draft_model`), or leave `num_draft_tokens` 0"
            )
        self.config = config
        self._ranks = ranks
        self.driver = Driver()
        self._model, self._draft_model = model, None if draft is None else draft.model
        self._borrowed = BorrowedModel(*(each for each in (model, self._draft_model) if each is not None))
        self.absorbed = AbsorbedLatents(
            model, latents_to_absorb(model, groups, wanted=config.absorb_latents, is_sharded=ranks is not None)
        )
        groups = replace(groups, absorbed=frozenset(self.absorbed.by_layer))
        groups = config.stored(groups, model.device)
        space_config = config.space(groups, compat.longest_sequence(model))
        require_room(_kv_nbytes(space_config, groups), model)
        self.space = BlockSpace(space_config)
        storage = KVStorage(space_config, groups.shapes, model.device)
        if config.kv_scales is not None:
            set_scales(storage, groups, config.kv_scales)
        tables = BlockTables(space_config, max_batched_tokens=config.max_batched_tokens, device=model.device)
        self.executor = PlanExecutor(storage, tables, zero_new_blocks=False)  # only written slots are read
        self._tiers = NoTiers()
        if config.tiers:
            self._tiers = RequestTiers(
                EngineTiers(config.tiers, model, self.space, storage, self._note_loaded, draft=self._draft_model)
            )
        scheduling = config.scheduling(publishes_answers=not replays_steps)
        self.scheduler = Scheduler(scheduling, self.space, self._tiers.loader)
        self.model_end_ids = compat.end_token_ids(model)
        self._num_vocabulary = compat.vocabulary_size(model)
        limit = config.num_draft_states if groups.states else config.predicted_tokens
        self._num_predicted = min(limit, config.predicted_tokens)
        self._uncaptured = (
            what_prevents_graphs(groups, model.device) if config.capture_steps else "capture_steps is off"
        )
        self._captured = None if self._uncaptured else self._new_graphs(model, tables)
        self._runner = ModelRunner(
            model,
            groups,
            self.executor,
            self._backend(model, groups, self.absorbed.latent_dim),
            replays_steps=replays_steps,
            continues=continues,
            captured=self._captured,
            compiled=_compiled(model, groups) if config.compile_model else None,
            unfoldings=self.absorbed.by_call(groups),
        )
        self.memory = self._runner.prepare(config.max_sequences)
        self._drafter = None if draft is None else self._new_drafter(draft)
        self._answering = Answering(BatchSampler(self._num_vocabulary) if sampler is None else sampler)
        self._rules = RequestRules(config, self.space, self.model_end_ids, self._num_vocabulary, decode)
        self._clock = clock
        self._began = clock()
        self._requests: dict[Request, EngineRequest] = {}
        self._num_requests = 0
        self.on_entered: list[Callable[[EngineRequest], None]] = []
        self._rows = RowLists(self._requests)
        self._failure: str | None = None
        self._failed_steps = FailedSteps(config.max_batched_tokens)
        self._flight: Flight | None = None
        self._last_done = 0  # the last step that the device has run

    def _backend(self, model: compat.Model, groups: EngineGroups, latent_dim: int = 0) -> AttentionBackend:
        config = self.config
        return backend_for(
            self.executor.storage,
            groups.attention,
            max_places=config.max_sequences,
            max_tokens=config.max_batched_tokens,
            max_length=self.space.config.max_tokens,
            query_dtype=model.dtype,
            num_draft=config.most_drafts,
            latent_dim=latent_dim,
        )

    def _new_drafter(self, draft: DraftModel) -> Drafter:
        with refusing("what the draft model's graphs read and write", draft.model.device):
            drafter = Drafter(
                draft,
                self.executor,
                self._backend(draft.model, draft.groups),
                self._num_vocabulary,
                max_places=self.config.max_sequences,
                capture_passes=self.config.capture_steps,
            )
        self.memory = self.memory.beside(drafter.prepare(), self._model, draft.model)
        return drafter

    def _new_graphs(self, model: compat.Model, tables: BlockTables) -> CapturedPasses:
        with refusing("what graphs read and write", model.device):
            return CapturedPasses(
                model,
                of_tables(tables, self.config.max_sequences),
                model.device,
                max_tokens=self.config.max_batched_tokens,
                num_vocabulary=self._num_vocabulary,
                min_tokens=LEAST_TOKENS if self.config.compile_model else 1,
            )

    @property
    def vocabulary_size(self) -> int:
        """Columns of the logits; all token ids are below it."""
        return self._num_vocabulary

    @property
    def capture_state(self) -> CaptureState:
        """The sizes of steps that are captured as graphs, and the reason where none are."""
        return CaptureState(0, self._uncaptured) if self._captured is None else self._captured.state

    @property
    def draft_capture_state(self) -> CaptureState:
        """The same of the draft model's passes."""
        return CaptureState(0, "there is no draft model") if self._drafter is None else self._drafter.capture_state

    # Requests

    def add(self, prompt_token_ids: Int32Array, params: SamplingParams, intent: Intent | None = None) -> EngineRequest:
        """Add a request to the queue.

        Args:
            prompt_token_ids: int32 ``[n]``, or another sequence of integers in that range.
            params: sampling, lengths and stops; bad words as token ids.
            intent: hints about caching and scheduling; None: none.

        Returns the request. If its tenant's limits leave too few blocks for it, even alone, it has ended, "rejected".

        Raises:
            RequestError: the request could not be served, even alone, or needs something that this model does not have.
                Nothing is changed.
            EngineError: the engine has failed, or another thread drives it.
        """
        with self._driving():
            require_instance(params, SamplingParams, "params", RequestError)
            try:
                tokens = as_token_array(prompt_token_ids)
            except TokenError as problem:
                raise RequestError(f"a prompt must be token ids: {problem}") from problem
            spec = self._rules.complete(tokens, params, PLAIN if intent is None else intent, self._num_requests)
            request = EngineRequest(self._num_requests, spec, self._clock(), self.fork)
            if self.scheduler.add(request.scheduled):
                self._enter(request)
            else:
                self._refuse(request)
            return request

    def fork(
        self,
        request: EngineRequest,
        n: int | None = None,
        at: int | None = None,
        params: SamplingParams | None = None,
        sample: int = 0,
        intent: Intent | None = None,
    ) -> EngineRequest:
        """Add a request that continues tokens of another one: see :meth:`EngineRequest.fork`."""
        with self._driving():
            self._land()
            prefix = fork_prefix(request, sample, at)
            child_intent = request.intent.for_fork(len(prefix)) if intent is None else intent
            spec = self._rules.complete(
                prefix, fork_params(request, n, params, len(prefix)), child_intent, self._num_requests
            )
            return self._branch_off(request, spec, sample)

    def _branch_off(self, request: EngineRequest, spec: RequestSpec, sample: int) -> EngineRequest:
        child = EngineRequest(self._num_requests, spec, self._clock(), self.fork)
        answer = request.samples[sample]
        sequence = request.live.index(answer) if answer in request.live else None
        if sequence is None:  # the answer has ended, and its row is released
            num_shared = 0 if self.scheduler.add(child.scheduled) else None
        else:
            num_shared = self.scheduler.fork(request.scheduled, child.scheduled, sequence=sequence)
        if num_shared is None:
            self._refuse(child)
            return child
        if num_shared:
            child.num_cached_tokens, child.admitted = num_shared, child.arrived
        self._enter(child)
        return child

    def _enter(self, request: EngineRequest) -> None:
        if request.intent.prediction and self._num_predicted:
            request.guess_by_prediction(self._num_predicted)
        elif self._drafter is not None:
            request.guess_by_model(self.config.num_draft_tokens)
        elif self.config.speculation is not None:
            request.guess_by(self.config.speculation)
        self._num_requests += 1
        self._requests[request.scheduled] = request
        for note in self.on_entered:
            note(request)

    def _refuse(self, request: EngineRequest) -> None:
        """End a request that exceeds its tenant's limits, "rejected"; raise RequestError for any other reason."""
        if request.intent.tenant is None or not self.scheduler.fits_alone(request.scheduled, within_limits=False):
            raise self._rules.too_large(request.spec)
        self._num_requests += 1
        request.end("rejected", self._clock(), self._rules.beyond_limits(request))

    @property
    def requests(self) -> ValuesView[EngineRequest]:
        """The requests that wait or run, in the order of their numbers."""
        return self._requests.values()

    def abort(self, request: EngineRequest, reason: FinishReason = "aborted") -> None:
        """End a request now, waiting or running, for that reason. Without effect on a request that has ended.

        Raises EngineError where another thread drives the engine.
        """
        if not request.is_finished:
            with self.driver.driving():
                self._end(request, reason)
                if self.scheduler.is_idle and self._failure is None:
                    self._land()

    # Tenants

    def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """Add a tenant, or change the limits of one, between two steps. They apply to waiting requests as well.

        Raises:
            ConfigurationError: tenants are not distinguished (``EngineConfig.tenants`` is None), the pools are too
                small for the limits, or the cap is below the use of its requests; nothing is changed.
            EngineError: the engine has failed, or another thread drives it.
        """
        with self._driving():
            self._land()
            self.space.set_tenant(name, limits)

    def remove_tenant(self, name: str) -> None:
        """Remove a tenant without requests. Its cached blocks are charged to the unnamed tenant.

        Raises:
            ConfigurationError: there is no such tenant, or it has requests, which must finish or be aborted first.
                Nothing is changed.
            EngineError: the engine has failed, or another thread drives it.
        """
        with self._driving():
            self._land()
            if self.scheduler.has_tenant(name):
                raise ConfigurationError(f"tenant {name!r} has requests: let them finish, or abort them, first")
            self.space.remove_tenant(name)

    # Ranks

    def follow(self) -> int:
        """Carry out the steps of rank 0, as another rank of its model, until rank 0 ends; return their number.

        Raises:
            ConfigurationError: this engine has no ranks, or is rank 0 itself.
            EngineError: a rank is lost, or a step failed here; or another thread drives the engine.
        """
        if self._ranks is None or self._ranks.is_first:
            raise ConfigurationError("only ranks other than the first follow: submit requests to rank 0")
        with self._driving(), self._at_stake():
            return follow(self._ranks, self.executor, self._runner)

    # The prefix cache

    def reset_prefix_cache(self) -> None:
        """Drop every cached block, so that later requests hit none. Requests under way keep their own blocks.

        Raises:
            EngineError: the engine has failed, or another thread drives it.

        Cost: O(blocks + rows).
        """
        with self._driving():
            self._land()
            self.space.reset_prefix_cache()
            self._tiers.reset()

    def forget(self, prompt_token_ids: Int32Array, *, salt: bytes = b"", start: int = 0) -> int:
        """Drop a prompt, and everything that continues it, from the prefix cache and from every tier.

        Requests under way are not affected. Tiers do not store the prompt again while this engine exists.

        Args:
            prompt_token_ids: int32 ``[n]``; salt: of the requests that computed it.
            start: first position to be dropped, with the whole block that contains it, and in a tier the whole run.

        Returns how many blocks left the prefix cache.

        Raises:
            EngineError: the engine has failed, or another thread drives it.

        Cost: O(blocks + blocks of all rows + entries of the tiers).
        """
        with self._driving():
            self._land()
            tokens = as_token_array(prompt_token_ids)
            keys = Intent(salt=salt).keys
            self._tiers.forget(tokens, keys, as_count(start, "start"))
            return self.space.forget(tokens, keys=keys, start=start)

    # Prefixes as files

    def export(self, prompt_token_ids: Int32Array, path: str | Path, *, salt: bytes = b"") -> int:
        """Write the cached blocks of a prompt to a file for another process or machine, as frames with checksums.

        Args:
            prompt_token_ids: int32 ``[n]``; salt: of the requests that computed it.
            path: the file, which is written atomically.

        Returns the number of leading tokens in the file. 0: nothing is cached, and no file is written.

        Raises:
            EngineError: the engine has failed, or another thread drives it.
            OSError: the file cannot be written.
            MissingExtraError: xxhash is not installed.

        Cost: O(tokens), and the weights are read once.
        """
        with self._driving():
            self._land()
            tokens, keys = as_token_array(prompt_token_ids), Intent(salt=salt).keys
            storage = self.executor.storage
            return write_prefix(Path(path), self._model, self.space, storage, tokens, keys, draft=self._draft_model)

    def import_(self, path: str | Path, *, salt: bytes = b"") -> int:
        """Load a prefix from a file of :meth:`export` into the cache. The file must have been written with this salt.

        Returns the number of leading tokens loaded. 0: there are too few free blocks, and nothing is changed.

        Raises:
            ConfigurationError: the file is of another model, other weights or another layout, or is damaged; nothing is
                changed.
            EngineError: the engine has failed, or another thread drives it.
            OSError: the file cannot be read.
            MissingExtraError: xxhash is not installed.

        Cost: O(bytes), and the weights are read once.
        """
        with self._driving():
            self._land()
            storage, keys = self.executor.storage, Intent(salt=salt).keys
            return read_prefix(Path(path), self._model, self.space, storage, keys, draft=self._draft_model)

    # Tiers

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier of ``EngineConfig.tiers``."""
        return self._tiers.statistics()

    def tier_loads(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads from tiers that are under way. O(loads)."""
        return self._tiers.loads()

    def flush_tiers(self, timeout_s: float = 60.0) -> bool:
        """Wait until all computed blocks are stored in the tiers that admit them; return whether they are in time.

        Raises EngineError where another thread drives the engine.
        """
        with self.driver.driving():
            return self._tiers.flush(timeout_s)

    def close(self, timeout_s: float = 60.0) -> bool:
        """Flush and close the tiers; the engine goes on without them. Return whether everything was stored.

        Not needed for correct answers, nor before the process ends: stores then have ten seconds to finish.

        Raises EngineError where another thread drives the engine.
        """
        with self.driver.driving():
            tiers, self._tiers = self._tiers, NoTiers()
            is_stored = tiers.close(timeout_s)
            self.scheduler.end_loading()
            return is_stored

    def set_weights_epoch(self, weights_epoch: str | int, *, change: Callable[[], object] | None = None) -> None:
        """Begin a new epoch of weights with the next step: blocks computed by older weights are not hit any more.

        Requests under way go on: they keep their blocks, and compute with the new weights. Other requests do not hit
        these blocks.

        Args:
            weights_epoch: text if ``EngineConfig.weights_epoch`` is text. If that is a number, a number not below the
                current epoch; hits may then rest on weights up to ``EngineConfig.max_epoch_lag`` epochs back.
            change: sets the new weights, as ``lambda: model.load_state_dict(weights)``; called while no engine computes
                with the model or the draft model. None: they are set already. Its error is raised here with the epoch
                begun, since some weights may be new: try again with another epoch.

        Raises:
            ConfigurationError: an epoch that goes back, or text for a number or a number for text; nothing is changed.
            EngineError: the engine has failed, or another thread drives it; nothing is changed.

        Cost: O(blocks + rows).
        """
        with self._driving():
            if not isinstance(weights_epoch, str) and isinstance(self.config.weights_epoch, str):
                raise ConfigurationError(
                    f"weights_epoch must be text, got {weights_epoch!r}: epochs are counted where the first one is a "
                    "number, EngineConfig(weights_epoch=0)"
                )
            self._land()
            self.space.set_weights_epoch(weights_epoch)
            try:
                if change is not None:
                    with self._borrowed.alone():
                        change()
            finally:
                self.absorbed.read_again()
                self._tiers.renew()

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step is in flight."""
        return not self.scheduler.is_idle or self._flight is not None

    def _end(self, request: EngineRequest, reason: FinishReason, error: str | None = None) -> None:
        if self._requests.pop(request.scheduled, None) is not None:
            self._answering.forget(request)
            self.scheduler.abort(request.scheduled)
            self._tiers.ended(request)
            request.end(reason, self._clock(), error)

    def _note_loaded(self, scheduled: Request) -> None:
        self.scheduler.loaded(scheduled)

    # Steps

    def step(self) -> StepRecord:
        """Run one step.

        If the model fails or runs out of memory, the step is aborted, its record has the failure, and the next call
        repeats it. If that fails too, requests of the step end, "failed" (:class:`FailedSteps
        <pagedkv.serving.engine.failed_steps.FailedSteps>` has the rules).

        Raises:
            EngineError: the engine failed or the device is lost, and the engine cannot be used any more; or another
                thread drives it, and nothing was changed. If the device is lost, all requests have ended, "failed",
                with their tokens so far.
        """
        with self._driving(), self._at_stake():
            return self._step()

    def _step(self) -> StepRecord:
        num_finished = self._supply() if self._answering.num_held else 0
        self._tiers.before_step(none_running=not self.scheduler.running)
        times = [self._clock()]
        if self.config.leases:
            self.space.advance(max(self.space.now_s, times[0] - self._began))
        batch = self.scheduler.schedule(self._failed_steps.max_batched_tokens)
        before = self._flight
        if not (_computes(batch) or (before is not None and _computes(before.batch))):
            self._tiers.await_load()
        self._note_admitted(batch)
        times.append(self._clock())
        logits = self._tried(batch, lambda: self._forward(batch))
        if logits is None:
            return self._undone(batch, times, num_finished, self._finish_last())
        flight = Flight(batch, self._rows.of(batch))
        times.append(self._clock())
        if self.config.overlap:
            finished = self._finish_last()
            times.append(self._clock())
            if not self._sampled(flight, logits):
                return self._undone(batch, times, num_finished, finished)
            self._flight = flight
            times.append(self._clock())
            if self.scheduler.is_idle:  # no step follows that could overlap this one
                finished = finished.plus(self._finish_last())
            seconds = np.diff(times)[[0, 1, 3, 2]]
        else:
            if not self._sampled(flight, logits):
                return self._undone(batch, times, num_finished, Finished())
            times.append(self._clock())
            finished = self._finish(flight)
            times.append(self._clock())
            seconds = np.diff(times)
        if _computes(batch):
            self._failed_steps.note_success()
        self._tiers.after_step(batch, times[-1] - times[0], is_idle=self.scheduler.is_idle)
        finished = finished.plus(Finished(num_finished))
        return record_of(batch, self.scheduler, self.space, finished, seconds.tolist())

    def _sample(self, flight: Flight, logits: torch.Tensor) -> Flight:
        """Begin to sample the rows whose answers have not ended. Tokens stay on the device for the next step."""
        rows = flight.rows
        if self.config.overlap and not all(row.goes_on for row in rows):
            flight.places = [place for place, row in enumerate(rows) if row.goes_on]
            lines = lines_of(rows)
            logits = logits[[line for place in flight.places for line in lines[place]]]
            rows = [rows[place] for place in flight.places]
        if rows:
            flight.sampling = self._answering.begin(logits, rows)
            if self.config.overlap:
                self._keep_last_tokens(flight)
        return flight

    def _keep_last_tokens(self, flight: Flight) -> None:
        sampling = flight.sampling
        if sampling is None or sampling.pending is None or any(row.drafts for row in sampling.rows):
            return  # beams, and requests with drafts, never run ahead
        rows = flight.batch.sampled_rows()
        going = rows if flight.places is None else rows[flight.places]
        is_all = len(sampling.places) == len(going)
        self._runner.last_tokens.keep(going if is_all else going[sampling.places], sampling.pending.token_ids)

    def _finish(self, flight: Flight | None) -> Finished:
        """Append a step's sampled tokens to the answers, and finish the step in the scheduler."""
        if flight is None:
            return Finished()
        batch, rows, places = flight.batch, flight.rows, flight.places
        taken = Taken(np.zeros(0, np.int32)) if flight.sampling is None else self._answering.end(flight.sampling)
        if places is not None:
            taken = taken.among(places, len(rows))
        self._last_done = max(self.executor.done(), default=self._last_done)
        for request, failure in taken.failures.items():
            if request.scheduled.num_ahead > 1:  # a later step already decodes the row, so the row cannot be held
                self._fail(request, failure)
        apart = [request.scheduled for request in (*taken.held, *taken.failures)]
        parents = {request.scheduled: beams for request, beams in taken.parents.items()}
        accepted = np.zeros(len(batch.decoded_token_ids), np.int32)
        accepted[list(taken.num_accepted)] = list(taken.num_accepted.values())
        progress = self.scheduler.finish(
            batch, taken.token_ids, ended=taken.ended, parents=parents, held=apart, num_accepted=accepted
        )
        self._note_progress(progress, taken, rows)
        self._tiers.chunks_computed(batch, self._requests)
        return Finished(len(progress.finished), sum(taken.num_accepted.values()))

    def _finish_last(self) -> Finished:
        """Finish the step in flight, if there is one."""
        flight, self._flight = self._flight, None
        return self._finish(flight)

    def _land(self) -> None:
        """Finish the step in flight, if there is one. Raises EngineError, after which the engine cannot be used."""
        with self._at_stake():
            self._finish_last()

    def _supply(self) -> int:
        """Sample the waiting rows again, and resume requests that have all their tokens; return how many finished."""
        num_finished = 0
        for request, taken in self._answering.retry_waiting():
            rows = [SampledRow(request, sample) for sample in request.live]
            if taken.failures:
                self._note_failures(taken)
                continue
            progress = self.scheduler.supply(request.scheduled, taken.token_ids, ended=taken.ended)
            self._note_progress(progress, taken, rows)
            num_finished += len(progress.finished)
        return num_finished

    def _forward(self, batch: Batch) -> torch.Tensor:
        flat = flatten(batch)
        plan = batch.plan
        if self._ranks is not None:
            self._ranks.send(plan, flat)
        if not len(flat.token_ids):
            return self.executor.launch(plan, lambda _: torch.zeros(0))
        requests = [self._requests[chunk.request] for chunk in batch.prefilling]
        scorings = scorings_of(zip(requests, batch.prefilling, flat.chunk_starts, strict=True))
        logits = self.executor.launch(plan, lambda inputs: self._compute(batch, inputs, flat, scorings))
        is_one_each = len(flat.source) == len(flat.wanted) and bool((flat.source[1:] > flat.source[:-1]).all())
        return logits if is_one_each else logits[torch.from_numpy(flat.source).to(logits.device)]

    def _compute(
        self, batch: Batch, inputs: StepInputs, flat: FlatBatch, scorings: Sequence[PromptScoring]
    ) -> torch.Tensor:
        """Run the models of a step: first a draft model, whose drafts the other model then verifies."""
        if self._drafter is not None:
            flat, drafts = self._drafter.draft(batch, inputs, flat, self._rows.decoding(batch))
            if len(drafts):
                self.scheduler.fill_drafts(batch, drafts)
        return self._runner.compute(batch.plan, inputs, flat, scorings)

    # Notes of what a step changed

    def _note_admitted(self, batch: Batch) -> None:
        for preempted in batch.preempted:
            request = self._requests[preempted.request]
            request.num_preemptions += 1
            if preempted.kind == "recompute":
                self._answering.forget(request)  # its waiting rows are sampled again after the recomputation
        for admission in batch.admitted:
            request = self._requests[admission.request]
            self._tiers.admitted(request, admission.num_hit_tokens)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = min(admission.num_hit_tokens, len(request.prompt_token_ids))
                request.explanation = self.space.explanation(admission.request.rows[0])
                request.admitted = self._clock()
        for rejected in batch.rejected:
            request = self._requests[rejected]
            reason = "it ran out of blocks, alone: ask for less, or give the engine more memory"
            fits = request.intent.tenant is None or self.scheduler.fits_alone(rejected)
            self._end(request, "rejected", reason if fits else self._rules.beyond_limits(request))

    def _note_progress(self, progress: Progress, taken: Taken, rows: Sequence[SampledRow]) -> None:
        now = self._clock()
        for scheduled in progress.first_tokens:
            request = self._requests[scheduled]
            request.first_token = now if request.first_token is None else request.first_token
            if scheduled not in progress.finished:
                self._tiers.prompt_computed(request)
        for place in taken.ended:
            request, ended = rows[place].request, rows[place].sample
            request.live = [each for each in request.live if each is not ended]
        if taken.ended:
            self._rows.forget()
        for scheduled in progress.finished:
            request = self._requests.pop(scheduled)
            self._tiers.ended(request)
            request.end("length", now)
        self._note_failures(taken)

    def _note_failures(self, taken: Taken) -> None:
        for request, failure in taken.failures.items():
            self._fail(request, failure)

    def _fail(self, request: EngineRequest, failure: Exception) -> None:
        self._end(request, "failed", f"{type(failure).__name__}: {failure}")

    # Steps that fail

    def _tried(self, batch: Batch, part: Callable[[], Result], *, is_repeatable: bool = True) -> Result | None:
        """Run a part of a step; return None if it failed and the step can be repeated."""
        try:
            return part()
        except Exception as problem:
            is_whole = self._ranks is None  # other ranks may have run the step
            if not (is_whole and is_repeatable and _computes(batch) and may_be_retried(problem)):
                raise
            self._failed_steps.note_failure(problem)
        return None

    def _sampled(self, flight: Flight, logits: torch.Tensor) -> bool:
        """Begin to sample a step; return False if that failed. Beams advance at once, so they cannot be repeated."""
        has_beams = any(row.request.beams is not None for row in flight.rows)
        sampled = self._tried(flight.batch, lambda: self._sample(flight, logits), is_repeatable=not has_beams)
        return sampled is not None

    def _undone(self, batch: Batch, times: list[float], num_finished: int, finished: Finished) -> StepRecord:
        """Abort a failed step, and end requests of it if it was the retry. The step before it has been finished."""
        if self.executor.storage.device.type == "cuda":
            torch.cuda.empty_cache()  # fragments of the failed pass, which the next pass may not fit into
        aborted = self._abort_in_flight()
        assert aborted is not None, f"step {batch.plan.step_id} failed, and is not in flight"
        for scheduled in aborted.withdrawn:
            if not scheduled.num_preemptions:  # this was its first admission
                request = self._requests[scheduled]
                request.num_cached_tokens = request.explanation = request.admitted = None
        for scheduled in aborted.preempted:
            request = self._requests[scheduled]
            request.num_preemptions += 1
            self._answering.forget(request)
        ended = self._ended_by_failure(batch, aborted) if self._failed_steps.is_final else []
        for scheduled in ended:
            error = f"a step that computes it failed twice: {self._failed_steps.reason}"
            self._end(self._requests[scheduled], "failed", error)
        seconds = [*np.diff([*times, self._clock()]).tolist(), 0.0, 0.0]
        finished = finished.plus(Finished(num_finished + len(ended)))
        record = record_of(batch, self.scheduler, self.space, finished, seconds)
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
        aborted = self.scheduler.abort_in_flight()
        if aborted is not None:
            on_device = tuple(step_id for step_id in aborted.steps.step_ids if step_id > self._last_done)
            self.executor.abort(replace(aborted.steps, step_ids=on_device))
        return aborted

    # Checks

    @contextmanager
    def _at_stake(self) -> Iterator[None]:
        """Make the engine unusable after an error that leaves a step half done. Raises EngineError."""
        try:
            yield
        except Exception as problem:
            self._failure = f"{type(problem).__name__}: {problem}"
            self._flight = None
            with suppress(PagedKVError):  # the first error is the one to be raised
                self._abort_in_flight()
            if isinstance(problem, DeviceLostError) or is_device_failure(problem):
                self._end_all(self._failure)
            raise EngineError(f"a step failed, and the engine is at its end: {self._failure}") from problem

    def _end_all(self, error: str) -> None:
        """End all requests with their tokens so far: the device is lost, and their blocks with it."""
        now = self._clock()
        for request in self._requests.values():
            request.end("failed", now, error)
        self._requests.clear()

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """Hold the engine's lock. Raises EngineError where another thread holds it, or the engine has failed."""
        with self.driver.driving():
            if self._failure is not None:
                raise EngineError(f"the engine has failed before: {self._failure}. Build another one")
            yield


def _computes(batch: Batch) -> bool:
    return len(batch.plan.compute.rows) > 0


def _kv_nbytes(config: SpaceConfig, groups: EngineGroups) -> int:
    """Return the bytes of all pools on the device."""
    nbytes = block_nbytes_of(groups.specs, groups.shapes)
    return sum(count * nbytes[pool] for pool, count in config.blocks_by_pool().items())


def _compiled(model: compat.Model, groups: EngineGroups) -> CompiledModel:
    """Return a model that is compiled when it first runs. Raises UnsupportedModelError."""
    why = what_prevents_compiling(groups)
    if why is not None:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be compiled: {why}. Leave compile_model off")
    return CompiledModel(model, groups)
