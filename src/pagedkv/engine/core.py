"""EngineCore: an engine without text. Requests come in, and steps compute their tokens.

::

    add(prompt, params)      -> EngineRequest, waiting
    step()                   -> StepRecord
      schedule   scheduler.schedule()              Batch, with the plan
      forward    executor.launch(plan, model)      logits of the sequences to be sampled
      sample     answering.begin(logits, rows)     a token each, except for rows that wait or fail
      finish     answering.end, scheduler.finish   the tokens join their answers, and some answers end

One thread drives it at a time: a step reads and changes the scheduler, the block space and the device's tables, none of
which is thread-safe. A step is over when :meth:`EngineCore.step` returns. A step whose pass or sampling
fails is aborted and tried once more (:mod:`~pagedkv.engine.step`). Any other error ends the engine.

If steps overlap (``EngineConfig.overlap``), a call launches a step and then finishes the one before, whose tokens the
new step reads from device memory. Sampling comes last, since penalties need the tokens of the step before::

    device   | forward 7 | sample 7 | forward 8 | sample 8 | forward 9
    host       launch 8 ... wait 7 | finish 7 | begin sampling 8 | schedule 9 | launch 9 ... wait 8 | finish 8
"""

import threading
from collections.abc import Callable, Iterator, Sequence, ValuesView
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple, final

from pagedkv.contract.answers import BlockHolders, TierEvents
from pagedkv.contract.arguments import as_count, as_token_array, require_instance
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import RequestKeys
from pagedkv.contract.space_config import TenantLimits
from pagedkv.device import is_device_failure
from pagedkv.device.memory import PoolMemory
from pagedkv.engine.adapters import Adapters
from pagedkv.engine.answering import Answering, Sampler
from pagedkv.engine.captured_passes import CaptureState
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.content import StoredContent, content_through
from pagedkv.engine.drafter import DraftModel
from pagedkv.engine.engine_tiers import EngineTiers, HandOff, hand_over_direct, take_over_direct
from pagedkv.engine.outputs import FinishReason, StepRecord
from pagedkv.engine.parts import EngineParts, ModelTraits, require_draft_model
from pagedkv.engine.prefix_file import NixlLink, read_prefix, write_prefix
from pagedkv.engine.ranked_content import WholeModel, follow
from pagedkv.engine.ranks import RankGroup, SentWeights
from pagedkv.engine.request import PLAIN, Decode, EngineRequest, Intent, RequestSpec, fork_params, fork_prefix
from pagedkv.engine.sampling import BatchSampler, SamplingParams
from pagedkv.engine.step import LiveRequests, RequestRules, StepLoop
from pagedkv.errors import ConfigurationError, DeviceLostError, EngineError, RankLostError, RequestError, TokenError
from pagedkv.probe import compat
from pagedkv.probe.compat import BorrowedModel
from pagedkv.probe.layers import EngineGroups
from pagedkv.scheduling import Request, Scheduler
from pagedkv.tiers.served import LoadUnderWay, TierStatistics

NO_SHARED_TIER: Final = "a hand-off needs a tier that both engines have: a folder, Redis or an object store"


class PoolSize(NamedTuple):
    """The memory of one engine's blocks, and what its requests may come to take.

    Args:
        unit_nbytes: a piece of memory that can be given back by itself.
        nbytes: what there is now; least_nbytes, most_nbytes: what there always is, and can ever be.
        wanted_nbytes: what the requests that wait or run may come to take, all together.
        first_nbytes: what the one of them that came first may come to take; 0: there is none.
        first_arrived: when that one came, in seconds of the engine's clock.
    """

    unit_nbytes: int
    nbytes: int
    least_nbytes: int
    most_nbytes: int
    wanted_nbytes: int
    first_nbytes: int = 0
    first_arrived: float = 0.0


@final
class Driver:
    """The lock of one engine; reentrant."""

    def __init__(self) -> None:
        self._wheel = threading.RLock()

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Hold the lock, without waiting for it. Raises EngineError where another thread holds it."""
        if not self._wheel.acquire(blocking=False):
            raise EngineError(
                "another thread drives this engine: an AsyncLLM has it until it is closed, another thread's step until "
                "it is over. Ask through that AsyncLLM, or build another engine over the model"
            )
        try:
            yield
        finally:
            self._wheel.release()


@final
class EngineCore:
    """An engine without text: token ids in, token ids out.

    Args:
        model: a probed decoder.
        groups: the groups of its layers, and the place of each layer in them.
        config: memory, limits, policies; the attribute has no open choices left.
        replays_steps, continues: what a self-test found about recurrent layers, see :class:`ModelRunner`. With
            ``replays_steps`` the blocks of decoded tokens are not published, so no other request hits them.
        decode: maps token ids to text, for stop texts; None: requests have none.
        sampler: samples tokens; None: :class:`~pagedkv.engine.sampling.BatchSampler`.
        clock: returns seconds, never backwards.
        ranks: the processes that share the model's heads; None: this process has the whole model.
        whole: for tiers at rank 0, what was known of the model before it was split; None: there are no tiers.
        draft: a model that proposes tokens, whose groups are the last ones of ``groups``
            (:func:`~pagedkv.engine.drafter.paired`); None: there is none.
        adapters: the model's adapters, which requests choose from; None: there are none.

    Attributes:
        space: the block space; to be read only.
        executor: storage and block tables; to be read only.
        scheduler: the scheduler; to be read only.
        memory: bytes of device memory that the engine takes, and that were free when it was built.
        driver: the lock of the engine: calls of other threads raise EngineError.
        model_end_ids: tokens that end a sequence, unless its request ignores them.
        absorbed: the layers that attend to latents without unfolding them.
        on_entered: called with each new request before it waits or runs, in the driving thread.
        is_asleep: whether the memory of blocks is given back: requests wait until :meth:`wake`.

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
        whole: WholeModel | None = None,
        draft: DraftModel | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        require_draft_model(config, draft)
        self._ranks = ranks
        self.driver = Driver()
        self._model, self._draft_model = model, None if draft is None else draft.model
        self._borrowed = BorrowedModel(*(each for each in (model, self._draft_model) if each is not None))
        self._parts = EngineParts(model, groups, config, ModelTraits(replays_steps, continues), ranks, draft, adapters)
        self.config = config = self._parts.config
        self.space, self.executor = self._parts.space, self._parts.executor
        self.memory, self.absorbed = self._parts.memory, self._parts.absorbed
        self._content = content_through(self._parts.content(whole), [tier.coding for tier in config.tiers])
        tiers = self._new_tiers()
        scheduling = config.scheduling(publishes_answers=not replays_steps)
        self.scheduler = Scheduler(scheduling, self.space, tiers)
        self.model_end_ids = compat.end_token_ids(model)
        limit = config.num_draft_states if groups.states else config.predicted_tokens
        self._num_predicted = min(limit, config.predicted_tokens)
        answering = Answering(BatchSampler(self.vocabulary_size) if sampler is None else sampler)
        self._rules = RequestRules(config, self.space, self.model_end_ids, self.vocabulary_size, decode, adapters)
        self._clock = clock
        self._live = LiveRequests(
            self.scheduler, self.space, self._rules, tiers=tiers, answering=answering, clock=clock
        )
        self.on_entered = self._live.on_entered
        self._loop = StepLoop(
            config, self._parts, self.scheduler, self._live, answering=answering, ranks=ranks, clock=clock
        )
        self._failure: str | None = None
        self.is_asleep = False

    def _new_tiers(self) -> EngineTiers | None:
        if not self.config.tiers or self._content is None:
            return None
        return EngineTiers(self.config.tiers, self._content, self.space, self._note_loaded)

    def _note_loaded(self, scheduled: Request) -> None:
        self.scheduler.loaded(scheduled)

    @property
    def vocabulary_size(self) -> int:
        """Columns of the logits; all token ids are below it."""
        return self._parts.num_vocabulary

    @property
    def choices(self) -> str:
        """A sentence that tells whether the model is compiled and whether steps overlap, and why not."""
        return self._parts.choices

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
            if self._live.tiers is not None:
                self._live.tiers.reset()

    def forget(self, prompt_token_ids: Int32Array, *, salt: bytes = b"", start: int = 0) -> int:
        """Drop a prompt, and everything that continues it, from the prefix cache and from every tier, of all adapters.

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
            start = as_count(start, "start")
            num_dropped = 0
            for keys in self._rules.all_keys(salt):
                if self._live.tiers is not None:
                    self._live.tiers.forget(tokens, keys, start)
                num_dropped += self.space.forget(tokens, keys=keys, start=start)
            return num_dropped

    def forget_branches(self, prompts: Sequence[Int32Array], *, salt: bytes = b"") -> int:
        """Drop the end of each prompt that nothing else shares from the prefix cache; tiers keep what they have.

        Those of requests with an adapter too.

        Args:
            prompts: int32 ``[n]`` each, such as the turns of an agent's session that is over.
            salt: of the requests that computed them.

        Returns how many blocks left the prefix cache: see :meth:`BlockSpace.forget_branch`.

        Raises:
            EngineError: the engine has failed, or another thread drives it.

        Cost: O(blocks + blocks of all rows) for each prompt.
        """
        with self._driving():
            self._land()
            tokens = [as_token_array(prompt) for prompt in prompts]
            return sum(
                self.space.forget_branch(each, keys=keys) for keys in self._rules.all_keys(salt) for each in tokens
            )

    def set_weights_epoch(self, weights_epoch: str | int, *, change: Callable[[], object] | None = None) -> None:
        """Begin a new epoch of weights with the next step: blocks computed by older weights are not hit any more.

        Requests under way go on: they keep their blocks, and compute with the new weights. Other requests do not hit
        these blocks.

        Args:
            weights_epoch: text if ``EngineConfig.weights_epoch`` is text. If that is a number, a number not below the
                current epoch; hits may then rest on weights up to ``EngineConfig.max_epoch_lag`` epochs back.
            change: sets the new weights, as ``lambda: model.load_state_dict(weights)``; called while no engine computes
                with the model or the draft model. None: they are set already. Its error is raised here with the epoch
                begun, since some weights may be new: try again with another epoch. On several ranks each sets its own,
                in the same order with steps (:meth:`follow`).

        Raises:
            ConfigurationError: an epoch that goes back, text for a number or a number for text, or an engine on several
                ranks with tiers, which know the weights from before the model was split; nothing is changed.
            EngineError: the engine has failed, or another thread drives it; nothing is changed.

        Cost: O(blocks + rows).
        """
        with self._driving():
            if self._ranks is not None and self.config.tiers:
                raise ConfigurationError(
                    "an engine on several ranks with tiers has no new weights, whose digest it cannot compute from "
                    "parts: build another engine, or leave out `tiers`"
                )
            if not isinstance(weights_epoch, str) and isinstance(self.config.weights_epoch, str):
                raise ConfigurationError(
                    f"weights_epoch must be text, got {weights_epoch!r}: epochs are counted where the first one is a "
                    "number, EngineConfig(weights_epoch=0)"
                )
            self._land()
            self.space.set_weights_epoch(weights_epoch)
            if self._ranks is not None:
                with self._at_stake():
                    self._ranks.send_weights(SentWeights(weights_epoch))
            self._change_weights(change)

    def _change_weights(self, change: Callable[[], object] | None) -> None:
        """Set weights, if they are not set already, and read again what was made of them."""
        try:
            if change is not None:
                with self._borrowed.alone():
                    change()
        finally:
            self.absorbed.read_again()
            self._parts.runner.products.read_again()
            if self._parts.drafter is not None:
                self._parts.drafter.products.read_again()
            if self._live.tiers is not None:
                self._live.tiers.renew()

    # Prefixes as files

    def export(self, prompt_token_ids: Int32Array, path: str | Path, *, salt: bytes = b"") -> int:
        """Write the cached blocks of a prompt to a file for another process or machine, as frames with checksums.

        Of requests without an adapter, as what :meth:`import_`, :meth:`hand_over` and :meth:`take_over` bring.

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
            tokens, keys = as_token_array(prompt_token_ids), RequestKeys(salt=salt)
            return write_prefix(Path(path), self._file_content(), self.space, tokens, keys)

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
            return read_prefix(Path(path), self._file_content(), self.space, RequestKeys(salt=salt))

    def _file_content(self) -> StoredContent:
        if self._content is None:
            raise ConfigurationError(
                "an engine on several ranks has files of prefixes only at rank 0 and with `tiers`: configure a tier"
            )
        return self._content

    def hand_over(
        self,
        prompt_token_ids: Int32Array,
        *,
        salt: bytes = b"",
        timeout_s: float = 60.0,
        link: NixlLink | None = None,
    ) -> HandOff:
        """Store the computed blocks of a prompt in the shared tiers; return where they are, for another engine.

        Args:
            prompt_token_ids: int32 ``[n]``; salt: of the requests that computed it.
            timeout_s: longest time to wait for the stores; what is not stored by then is not in the hand-off. Neither
                is what the tiers do not admit.
            link: offers what is cached from memory to memory, without a tier; None: by the tiers.

        Raises:
            ConfigurationError: the engine has no tiers and there is no link, or the prompt is too large for the link.
            EngineError: the engine has failed, or another thread drives it.

        Cost: O(tokens + bytes that are not stored yet), and the weights are read once; with a link O(bytes).
        """
        with self._driving():
            self._land()
            tokens, keys = as_token_array(prompt_token_ids), RequestKeys(salt=salt)
            if link is not None:
                return hand_over_direct(link, self._file_content(), self.space, tokens, keys)
            return self._shared_tiers().hand_over(tokens, keys, timeout_s)

    def take_over(
        self,
        hand_off: HandOff,
        prompt_token_ids: Int32Array,
        *,
        salt: bytes = b"",
        timeout_s: float = 60.0,
        link: NixlLink | None = None,
    ) -> int:
        """Take the blocks of a prompt over from another engine: later requests with this prompt load them.

        Args:
            hand_off: from :meth:`hand_over` of an engine with the same model and settings.
            prompt_token_ids: int32 ``[n]``, the same prompt; salt: the same salt; else nothing is listed.
            timeout_s: longest time to wait for a link.
            link: of a hand-off by a link, which brings the blocks into the cache at once; None: by the tiers.

        Returns the number of leading tokens that can be loaded, whose bytes are verified when they are loaded. With a
        link, the number of those in the cache; 0: nothing was cached there, or there are too few free blocks.

        Raises:
            ConfigurationError: the fingerprint differs, the prompt is another one, a tier or a link is missing here, or
                the other engine does not answer; nothing is changed.
            EngineError: the engine has failed, or another thread drives it.

        Cost: O(tokens), and the weights are read once; with a link O(bytes).
        """
        require_instance(hand_off, HandOff, "hand_off")
        if hand_off.direct is not None and link is None:
            raise ConfigurationError("the hand-off is in the memory of its engine: pass a link (NixlLink)")
        with self._driving():
            self._land()
            tokens, keys = as_token_array(prompt_token_ids), RequestKeys(salt=salt)
            if link is not None:
                content = self._file_content()
                return take_over_direct(hand_off, link, timeout_s, content, self.space, tokens, keys)
            return self._shared_tiers().take_over(hand_off, tokens, keys)

    # Tiers

    def _shared_tiers(self) -> EngineTiers:
        if self._live.tiers is None:
            raise ConfigurationError(NO_SHARED_TIER)
        return self._live.tiers

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier of ``EngineConfig.tiers``."""
        return () if self._live.tiers is None else self._live.tiers.statistics()

    def tier_loads(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads from tiers that are under way. O(loads)."""
        return () if self._live.tiers is None else self._live.tiers.loads()

    def drain_tier_events(self) -> tuple[TierEvents, ...]:
        """Take the events of entries of tiers since the last call, by medium; none unless ``EngineConfig.events``."""
        return () if self._live.tiers is None else self._live.tiers.drain_events()

    def tier_entries(self) -> tuple[TierEvents, ...]:
        """Return all entries of tiers whose events were drained, by medium. O(entries)."""
        return () if self._live.tiers is None else self._live.tiers.entries()

    def tier_weights(self) -> dict[str, float]:
        """Return by medium the measured part of the time of computing that loading saves, between 0 and 1."""
        return {} if self._live.tiers is None else self._live.tiers.weights()

    def flush_tiers(self, timeout_s: float = 60.0) -> bool:
        """Wait until all computed blocks are stored in the tiers that admit them; return whether they are.

        False: some that were computed since the last call are late, failed to be stored, or were dropped, as where a
        tier is full or out of service.

        Raises EngineError where another thread drives the engine.
        """
        with self.driver.driving():
            return self._live.tiers is None or self._live.tiers.flush(timeout_s)

    def close(self, timeout_s: float = 60.0) -> bool:
        """Flush and close the tiers; the engine goes on without them. Return what :meth:`flush_tiers` does.

        Not needed for correct answers, nor before the process ends: stores then have ten seconds to finish.

        Raises EngineError where another thread drives the engine.
        """
        with self.driver.driving():
            tiers, self._live.tiers = self._live.tiers, None
            is_stored = tiers is None or tiers.close(timeout_s)
            self.scheduler.end_loading()
            return is_stored

    # Sleeping

    def sleep(self, timeout_s: float = 60.0) -> int:
        """Give the device memory of all blocks back until :meth:`wake`, as to training; the weights stay.

        What tiers are to store is stored first, and they keep it. All else that was cached is lost.

        Args:
            timeout_s: seconds that tiers have.

        Returns the bytes given back; 0 where the engine sleeps already.

        Raises:
            ConfigurationError: an engine on several ranks; nothing is changed.
            EngineError: requests are under way, the engine has failed, or another thread drives it; nothing is changed.
            StorageError: tiers still read blocks; nothing is changed.
        """
        with self._driving():
            if self._ranks is not None:
                raise ConfigurationError("an engine on several ranks does not sleep: end it")
            if self.is_asleep:
                return 0
            self._land()
            if not self.scheduler.is_idle:
                raise EngineError(f"{len(self.requests)} requests are under way: end them before the engine sleeps")
            if self._live.tiers is not None:
                self._live.tiers.flush(timeout_s)
            self.executor.storage.sleep()
            self.space.invalidate_memory()
            self.is_asleep = True
            return sum(pool.device_nbytes for pool in self.executor.storage.pools.values())

    def wake(self) -> None:
        """Take the memory of blocks again, at the same addresses; nothing is cached. Does nothing where it is awake.

        Raises:
            ConfigurationError: there is not enough memory now; the engine stays asleep.
            EngineError: the engine has failed, or another thread drives it.
        """
        with self._driving():
            if self.is_asleep:
                self.executor.storage.wake()
                self.is_asleep = False

    # The size of the pool

    @property
    def pool_size(self) -> PoolSize:
        """The memory of the engine's blocks, and what its requests may come to take. O(requests).

        Raises ConfigurationError if the pool keeps its size (``EngineConfig.kv_at_first``).
        """
        pool = self._resizable()
        num_blocks, unit = pool.num_blocks - self.space.num_absent_blocks(pool.name), pool.run * pool.block_nbytes
        needs = [self.scheduler.most_blocks(request.scheduled)[pool.name] for request in self.requests]
        first = next(iter(self.requests), None)
        return PoolSize(
            unit_nbytes=unit,
            nbytes=num_blocks * pool.block_nbytes,
            least_nbytes=(pool.num_blocks % pool.run + pool.run) * pool.block_nbytes,
            most_nbytes=pool.num_blocks * pool.block_nbytes,
            wanted_nbytes=(1 + max(sum(needs), self.space.num_live_blocks(pool.name))) * pool.block_nbytes,
            first_nbytes=(1 + needs[0]) * pool.block_nbytes if needs else 0,
            first_arrived=0.0 if first is None else first.arrived,
        )

    def shrink(self, num_units: int) -> int:
        """Give memory of blocks that no request uses back, and what is cached in them, between two steps.

        Requests under way are not affected, but wait where the rest is too little for them, until :meth:`grow`.

        Args:
            num_units: pieces of memory (:attr:`PoolSize.unit_nbytes`).

        Returns how many were given back: fewer if requests use the others, and none while tiers copy blocks.

        Raises:
            ConfigurationError: the pool keeps its size (``EngineConfig.kv_at_first``).
            EngineError: the engine has failed, sleeps, or another thread drives it.
        """
        with self._driving():
            pool, count = self._resizable(), as_count(num_units, "num_units")
            self._land()
            if self.executor.storage.num_users:
                return 0
            answer = self.space.shrink(count * pool.run, pool=pool.name, run=pool.run)
            if isinstance(answer, BlockHolders):
                answer = self.space.shrink(answer.num_available, pool=pool.name, run=pool.run)
            assert not isinstance(answer, BlockHolders), answer
            if len(answer):
                self.executor.storage.release(pool.name, answer)
            return len(answer) // pool.run

    def grow(self, num_units: int) -> None:
        """Take memory for blocks again, between two steps; addresses, and graphs, stay as they are.

        Raises:
            ConfigurationError: not so many units are absent, there is not enough memory, or the pool keeps its size;
                nothing is changed.
            EngineError: the engine has failed, sleeps, or another thread drives it.
        """
        with self._driving():
            pool, count = self._resizable(), as_count(num_units, "num_units")
            self._land()
            block_ids = self.space.grow(count * pool.run, pool=pool.name, run=pool.run)
            try:
                self.executor.storage.take(pool.name, block_ids)
            except BaseException:
                self.space.shrink(len(block_ids), pool=pool.name, run=pool.run)
                raise

    def _resizable(self) -> PoolMemory:
        pool = next(iter(self.executor.storage.pools.values()))
        if not pool.run:
            raise ConfigurationError("the engine's pools keep their size: set EngineConfig(kv_at_first=...)")
        if self.is_asleep:
            raise EngineError("the engine sleeps, and has no memory for blocks: wake it first")
        return pool

    # Ranks

    def follow(self, change: Callable[[str | int], object] | None = None) -> int:
        """Carry out the steps of rank 0, as another rank of its model, until rank 0 ends; return their number.

        Args:
            change: sets this rank's part of the weights of an epoch, when rank 0 begins it (:meth:`set_weights_epoch`);
                None: they are set already then. Its error ends all ranks.

        Raises:
            ConfigurationError: this engine has no ranks, or is rank 0 itself.
            EngineError: a rank is lost, or a step failed here; or another thread drives the engine.
        """
        if self._ranks is None or self._ranks.is_first:
            raise ConfigurationError("only ranks other than the first follow: submit requests to rank 0")
        with self._driving(), self._at_stake():
            return follow(
                self._ranks,
                self.executor,
                self._parts.runner,
                lambda epoch: self._change_weights(None if change is None else partial(change, epoch)),
            )

    # Steps

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step is in flight; False while the engine sleeps."""
        return not self.is_asleep and (not self.scheduler.is_idle or self._loop.has_flight)

    def step(self) -> StepRecord:
        """Run one step.

        If the model fails or runs out of memory, the step is aborted, its record has the failure, and the next call
        repeats it. If that fails too, requests of the step end, "failed" (:class:`FailedSteps
        <pagedkv.engine.step.FailedSteps>` has the rules).

        Raises:
            EngineError: the engine failed or the device is lost, and the engine cannot be used any more; or it sleeps,
                or another thread drives it, and nothing was changed. If the device is lost, all requests have ended,
                "failed", with their tokens so far.
        """
        with self._driving():
            if self.is_asleep:
                raise EngineError("the engine sleeps, and has no memory for blocks: wake it first")
            with self._at_stake():
                return self._loop.step()

    def _land(self) -> None:
        """Finish the step in flight, if there is one. Raises EngineError, after which the engine cannot be used."""
        with self._at_stake():
            self._loop.finish_last()

    # Checks

    @contextmanager
    def _at_stake(self) -> Iterator[None]:
        """Make the engine unusable after an error that leaves a step half done.

        Raises EngineError: after any error; RankLostError is raised as it is.
        """
        try:
            yield
        except Exception as problem:
            self._failure = f"{type(problem).__name__}: {problem}"
            self._loop.abandon()
            if isinstance(problem, DeviceLostError) or is_device_failure(problem):
                self._live.end_all(self._failure)
            if isinstance(problem, RankLostError):
                raise
            if self._ranks is not None:
                self._ranks.require_all()  # the loss of a rank may be behind any other error
            raise EngineError(f"a step failed, and the engine is at its end: {self._failure}") from problem

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """Hold the engine's lock. Raises EngineError where another thread holds it, or the engine has failed."""
        with self.driver.driving():
            if self._failure is not None:
                raise EngineError(f"the engine has failed before: {self._failure}. Build another one")
            yield
