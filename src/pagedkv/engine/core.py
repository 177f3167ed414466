"""EngineCore: the loop. Schedule, carry the plan out, run the model, sample, tell the scheduler.

::

    add(prompt, params)      -> EngineRequest, waiting
    step()                   -> StepRecord
      schedule   scheduler.schedule()              Batch, with the plan
      forward    executor.launch(plan, model)      logits of the sequences that are sampled
      sample     sampler.sample(logits, rows)      a token each
      finish     scheduler.finish(batch, tokens)   who has ended

One thread drives it, and a step is over when :meth:`EngineCore.step` returns. A step that fails ends the
engine: what it had computed is not known.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import final

import numpy as np
import torch

from pagedkv.arrays import Int32Array
from pagedkv.attention import CPUBackend
from pagedkv.device import BlockTables, KVStorage, PlanExecutor
from pagedkv.engine import compat
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.engine_request import EngineRequest
from pagedkv.engine.flat_batch import flatten
from pagedkv.engine.grouping import EngineGroups
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.records import StepRecord
from pagedkv.engine.runner import ModelRunner
from pagedkv.engine.sampler import GreedySampler, Sampler, SampleRow
from pagedkv.errors import EngineError, RequestError
from pagedkv.scheduling import Batch, Decoding, Progress, Request, Scheduler
from pagedkv.space import BlockSpace

__all__ = ["EngineCore"]


@final
class EngineCore:
    """An engine without text: token ids in, token ids out.

    Args:
        model: a decoder that was probed; its groups are ``groups``.
        groups: where its layers lie.
        config: memory, limits, policies.
        replays_steps, continues: what a self-test found of recurrent layers, see :class:`ModelRunner`.
        sampler: what chooses tokens; None: the most likely ones.
        clock: gives seconds, never backwards.

    Attributes:
        space: the block space, to be looked at.
        executor: storage and tables, likewise.
        scheduler: the scheduler, likewise.
        model_end_ids: tokens that end a sequence unless it ignores them.

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
        sampler: Sampler | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.config = config
        space_config = config.space(groups, compat.longest_sequence(model))
        self.space = BlockSpace(space_config)
        storage = KVStorage(space_config, groups.shapes, model.device)
        tables = BlockTables(space_config, max_batched_tokens=config.max_batched_tokens, device=model.device)
        self.executor = PlanExecutor(storage, tables, zero_new_blocks=False)  # back ends read what was written alone
        self.scheduler = Scheduler(config.scheduling(), self.space)
        self.model_end_ids = compat.end_token_ids(model)
        self._num_vocabulary = compat.vocabulary_size(model)
        backend = CPUBackend(storage, groups.attention)
        self._runner = ModelRunner(
            model, groups, self.executor, backend, replays_steps=replays_steps, continues=continues
        )
        self._sampler: Sampler = GreedySampler() if sampler is None else sampler
        self._clock = clock
        self._requests: dict[Request, EngineRequest] = {}
        self._num_requests = 0
        self._decoding: Decoding | None = None
        self._decoding_rows: tuple[SampleRow, ...] = ()
        self._failure: str | None = None

    # Requests

    def add(self, prompt_token_ids: Int32Array, params: SamplingParams) -> EngineRequest:
        """Let a request wait.

        Args:
            prompt_token_ids: int32 ``[n]``.
            params: what it asks for.

        Raises:
            RequestError: it could not be served, even alone, or asks for what the sampler does not know. Nothing is
                changed.
            EngineError: the engine has failed.
        """
        self._require_alive()
        self._sampler.require_supported(params)
        self._require_tokens(prompt_token_ids, params)
        end_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else self.model_end_ids)
        request = EngineRequest(self._num_requests, prompt_token_ids, params, frozenset(end_ids), self._clock())
        if not self.scheduler.add(request.scheduled):
            raise RequestError(
                f"a prompt of {len(prompt_token_ids)} tokens with {params.n} answers of {params.max_tokens} does not "
                f"fit {self.space.config.blocks_by_pool()} blocks and {self.config.max_sequences} sequences, even "
                "alone: ask for less, or give the engine more memory"
            )
        self._num_requests += 1
        self._requests[request.scheduled] = request
        return request

    def abort(self, request: EngineRequest) -> None:
        """End a request now, wherever it is; one that has ended stays as it is."""
        if self._requests.pop(request.scheduled, None) is not None:
            self.scheduler.abort(request.scheduled)
            request.end("aborted", self._clock())

    @property
    def has_work(self) -> bool:
        """Whether there is a request to serve."""
        return not self.scheduler.is_idle

    # Steps

    def step(self) -> StepRecord:
        """Run one step to its end.

        Raises:
            EngineError: the model or the device failed in it; the engine is at its end.
        """
        self._require_alive()
        try:
            return self._step()
        except Exception as problem:
            self._failure = f"{type(problem).__name__}: {problem}"
            raise EngineError(f"a step failed, and the engine is at its end: {self._failure}") from problem

    def _step(self) -> StepRecord:
        times = [self._clock()]
        batch = self.scheduler.schedule()
        self._note_admitted(batch)
        times.append(self._clock())
        logits = self._forward(batch)
        times.append(self._clock())
        rows = self._rows(batch)
        tokens = self._sampler.sample(logits, rows) if rows else np.zeros(0, np.int32)
        times.append(self._clock())
        self.executor.done()
        ended = [place for place, row in enumerate(rows) if row.request.take(row.sample, int(tokens[place]))]
        progress = self.scheduler.finish(batch, tokens, ended=ended)
        self._note_ended(progress, rows, ended)
        times.append(self._clock())
        return self._record(batch, progress, np.diff(times).tolist())

    def _forward(self, batch: Batch) -> torch.Tensor:
        flat = flatten(batch)
        plan = batch.plan
        if not len(flat.token_ids):
            return self.executor.launch(plan, lambda _: torch.zeros(0))
        logits = self.executor.launch(plan, lambda inputs: self._runner.compute(plan, inputs, flat))
        is_one_each = len(flat.source) == len(flat.wanted) and bool((np.diff(flat.source) > 0).all())
        return logits if is_one_each else logits[torch.from_numpy(flat.source).to(logits.device)]

    def _rows(self, batch: Batch) -> Sequence[SampleRow]:
        """Tell whose tokens are sampled, in the batch's order."""
        if batch.decoding is not self._decoding:
            self._decoding = batch.decoding
            requests = [] if batch.decoding is None else [self._requests[each] for each in batch.decoding.requests]
            self._decoding_rows = tuple(SampleRow(request, sample) for request in requests for sample in request.live)
        chunks = [chunk for chunk in batch.prefilling if chunk.num_samples]
        if not chunks:
            return self._decoding_rows
        requests = [self._requests[chunk.request] for chunk in chunks]
        return [*self._decoding_rows, *(SampleRow(request, sample) for request in requests for sample in request.live)]

    # What a step changed

    def _note_admitted(self, batch: Batch) -> None:
        for preempted in batch.preempted:
            request = self._requests[preempted.request]
            request.num_preemptions += 1
            if preempted.kind == "recompute":
                request.num_recomputed_tokens += preempted.num_computed_tokens
        for admission in batch.admitted:
            request = self._requests[admission.request]
            if request.num_cached_tokens is None:
                request.num_cached_tokens = admission.num_hit_tokens
        for rejected in batch.rejected:
            self._requests.pop(rejected).end("rejected", self._clock())

    def _note_ended(self, progress: Progress, rows: Sequence[SampleRow], ended: Sequence[int]) -> None:
        now = self._clock()
        for scheduled in progress.first_tokens:
            request = self._requests[scheduled]
            request.first_token = now if request.first_token is None else request.first_token
        for place in ended:
            rows[place].request.live = [each for each in rows[place].request.live if each is not rows[place].sample]
        if ended:
            self._decoding, self._decoding_rows = None, ()
        for scheduled in progress.finished:
            self._requests.pop(scheduled).end("length", now)

    def _record(self, batch: Batch, progress: Progress, seconds: list[float]) -> StepRecord:
        num_decoded = len(batch.decoded_token_ids)
        kinds = [preempted.kind for preempted in batch.preempted]
        names = self.space.config.pool_names
        num_free = sum(self.space.num_free_blocks(name) for name in names)
        num_blocks = sum(count - 1 for count in self.space.config.blocks_by_pool().values())
        return StepRecord(
            step_id=batch.plan.step_id,
            num_decoded=num_decoded,
            num_prefilled=sum(len(chunk.token_ids) for chunk in batch.prefilling),
            num_sampled=batch.num_samples,
            num_admitted=len(batch.admitted),
            num_resumed=len(batch.resumed),
            num_swapped_out=kinds.count("swap"),
            num_recomputed=kinds.count("recompute"),
            num_finished=len(progress.finished),
            num_rejected=len(batch.rejected),
            num_hit_tokens=sum(admission.num_hit_tokens for admission in batch.admitted),
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting,
            num_swapped=self.scheduler.num_swapped,
            num_used_blocks=num_blocks - num_free,
            num_blocks=num_blocks,
            schedule_seconds=seconds[0],
            forward_seconds=seconds[1],
            sample_seconds=seconds[2],
            finish_seconds=seconds[3],
        )

    # Checks

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine has failed before: {self._failure}. Build another one")

    def _require_tokens(self, prompt_token_ids: Int32Array, params: SamplingParams) -> None:
        num_tokens, most = len(prompt_token_ids), self.space.config.max_tokens
        if not num_tokens:
            raise RequestError("a prompt needs at least one token, and this one is empty")
        if num_tokens + params.max_tokens > most:
            raise RequestError(
                f"a prompt of {num_tokens} tokens and {params.max_tokens} new ones are more than the {most} of the "
                "longest sequence: shorten one, or set max_tokens of the engine if the model knows more"
            )
        low, high = int(prompt_token_ids.min()), int(prompt_token_ids.max())
        if low < 0 or high >= self._num_vocabulary:
            raise RequestError(
                f"token ids must be from 0 to {self._num_vocabulary - 1}, got {low if low < 0 else high}: is this the "
                "model's own tokenizer?"
            )
