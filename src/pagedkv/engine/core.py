"""EngineCore: an engine without text. Requests come in, and steps compute their tokens.

::

    add(prompt, params)      -> EngineRequest, waiting
    step()                   -> StepRecord
      schedule   scheduler.schedule()              Batch, with the plan
      forward    executor.launch(plan, model)      logits of the sequences to be sampled
      sample     answering.begin(logits, rows)     a token each, except for rows that wait or fail
      finish     answering.end, scheduler.finish   the tokens join their answers, and some answers end

One thread drives it at a time, and a step is over when :meth:`EngineCore.step` returns. A step whose pass or sampling
fails is aborted and tried once more (:mod:`~pagedkv.engine.failed_steps`). Any other error ends the engine.

If steps overlap (``EngineConfig.overlap``), a call launches a step and then finishes the one before, whose tokens the
new step reads from device memory. Sampling comes last, since penalties need the tokens of the step before::

    device   | forward 7 | sample 7 | forward 8 | sample 8 | forward 9
    host       launch 8 ... wait 7 | finish 7 | begin sampling 8 | schedule 9 | launch 9 ... wait 8 | finish 8
"""

from collections.abc import Callable, ValuesView
from typing import final

from pagedkv.contract.arguments import as_token_array, require_instance
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine.captured_passes import CaptureState
from pagedkv.engine.engine_request import EngineRequest, RequestSpec
from pagedkv.engine.forking import fork_params, fork_prefix
from pagedkv.engine.intent import PLAIN, Intent
from pagedkv.engine.outputs import FinishReason
from pagedkv.engine.prefix_core import PrefixCore
from pagedkv.engine.ranks import follow
from pagedkv.engine.records import StepRecord
from pagedkv.engine.sampling import SamplingParams
from pagedkv.errors import ConfigurationError, RequestError, TokenError

__all__ = ["EngineCore"]


@final
class EngineCore(PrefixCore):
    """An engine without text: token ids in, token ids out.

    Args:
        model: a probed decoder.
        groups: the groups of its layers, and the place of each layer in them.
        config: memory, limits, policies.
        replays_steps, continues: what a self-test found about recurrent layers, see :class:`ModelRunner`. With
            ``replays_steps`` the blocks of decoded tokens are not published, so no other request hits them.
        decode: maps token ids to text, for stop texts; None: requests have none.
        sampler: samples tokens; None: :class:`~pagedkv.engine.sampling.BatchSampler`.
        clock: returns seconds, never backwards.
        ranks: the processes that share the model's heads; None: this process has the whole model.
        whole: for tiers at rank 0, what was known of the model before it was split; None: there are no tiers.
        draft: a model that proposes tokens, whose groups are the last ones of ``groups``
            (:func:`~pagedkv.engine.drafting.paired`); None: there is none.

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

    @property
    def capture_state(self) -> CaptureState:
        """The sizes of steps that are captured as graphs, and the reason where none are."""
        return self._parts.runner.capture_state

    @property
    def draft_capture_state(self) -> CaptureState:
        """The same of the draft model's passes."""
        drafter = self._parts.drafter
        return CaptureState(0, "there is no draft model") if drafter is None else drafter.capture_state

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
            spec = self._rules.complete(tokens, params, PLAIN if intent is None else intent, self._live.num_entered)
            request = EngineRequest(self._live.num_entered, spec, self._clock(), self.fork)
            if self.scheduler.add(request.scheduled):
                self._enter(request)
            else:
                self._live.refuse(request)
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
                prefix, fork_params(request, n, params, len(prefix)), child_intent, self._live.num_entered
            )
            return self._branch_off(request, spec, sample)

    def _branch_off(self, request: EngineRequest, spec: RequestSpec, sample: int) -> EngineRequest:
        child = EngineRequest(self._live.num_entered, spec, self._clock(), self.fork)
        answer = request.samples[sample]
        sequence = request.live.index(answer) if answer in request.live else None
        if sequence is None:  # the answer has ended, and its row is released
            num_shared = 0 if self.scheduler.add(child.scheduled) else None
        else:
            num_shared = self.scheduler.fork(request.scheduled, child.scheduled, sequence=sequence)
        if num_shared is None:
            self._live.refuse(child)
            return child
        if num_shared:
            child.num_cached_tokens, child.admitted = num_shared, child.arrived
        self._enter(child)
        return child

    def _enter(self, request: EngineRequest) -> None:
        if request.intent.prediction and self._num_predicted:
            request.guess_by_prediction(self._num_predicted)
        elif self._parts.drafter is not None:
            request.guess_by_model(self.config.num_draft_tokens)
        elif self.config.speculation is not None:
            request.guess_by(self.config.speculation)
        self._live.enter(request)

    @property
    def requests(self) -> ValuesView[EngineRequest]:
        """The requests that wait or run, in the order of their numbers."""
        return self._live.by_schedule.values()

    def abort(self, request: EngineRequest, reason: FinishReason = "aborted") -> None:
        """End a request now, waiting or running, for that reason. Without effect on a request that has ended.

        Raises EngineError where another thread drives the engine.
        """
        if not request.is_finished:
            with self.driver.driving():
                self._live.end(request, reason)
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
            return follow(self._ranks, self.executor, self._parts.runner)

    # The prefix cache

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
            ConfigurationError: an epoch that goes back, text for a number or a number for text, or an engine on several
                ranks; nothing is changed.
            EngineError: the engine has failed, or another thread drives it; nothing is changed.

        Cost: O(blocks + rows).
        """
        with self._driving():
            if self._ranks is not None:
                raise ConfigurationError("an engine on several ranks has no new weights: build another engine")
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
                if self._live.tiers is not None:
                    self._live.tiers.renew()

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step is in flight."""
        return not self.scheduler.is_idle or self._loop.has_flight

    # Steps

    def step(self) -> StepRecord:
        """Run one step.

        If the model fails or runs out of memory, the step is aborted, its record has the failure, and the next call
        repeats it. If that fails too, requests of the step end, "failed" (:class:`FailedSteps
        <pagedkv.engine.failed_steps.FailedSteps>` has the rules).

        Raises:
            EngineError: the engine failed or the device is lost, and the engine cannot be used any more; or another
                thread drives it, and nothing was changed. If the device is lost, all requests have ended, "failed",
                with their tokens so far.
        """
        with self._driving(), self._at_stake():
            return self._loop.step()
