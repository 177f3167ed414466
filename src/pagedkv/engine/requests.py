"""The requests of an engine: what it refuses, which are under way, and what happens to them.

Checks of an intent against the engine: its tenant, its breakpoints, leases.

RequestRules: checks requests against the limits of one engine, and fills in what their parameters leave open.

It reads limits and changes nothing. The engine calls it before a request enters the scheduler, and for the message of a
request that exceeds its tenant's limits.

LiveRequests: the requests of an engine that wait or run, and what admissions, tokens and failures change in them.
"""

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from pagedkv.contract.arguments import require_instance
from pagedkv.contract.arrays import Int32Array
from pagedkv.engine.answering import Answering, RowLists, SampledRow, Taken
from pagedkv.engine.config import EngineConfig
from pagedkv.engine.outputs import FinishReason
from pagedkv.engine.request import PLAIN, Decode, EngineRequest, Intent, RequestSpec
from pagedkv.engine.sampling import SamplingParams, seed_of
from pagedkv.engine.tiering import EngineTiers
from pagedkv.errors import ConfigurationError, RequestError
from pagedkv.scheduling import Batch, Progress, Request, Scheduler
from pagedkv.space import BlockSpace

__all__ = ["LiveRequests", "RequestRules", "require_possible"]


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


@final
class RequestRules:
    """The limits of one engine.

    Args:
        config: the engine's configuration.
        space: the block space, which has the longest sequence and the tenants.
        end_ids: tokens that end a sequence, unless its request ignores them.
        num_vocabulary: columns of the logits.
        decode: maps token ids to text, for stop texts; None: there are none.
    """

    def __init__(
        self,
        config: EngineConfig,
        space: BlockSpace,
        end_ids: frozenset[int],
        num_vocabulary: int,
        decode: Decode | None,
    ) -> None:
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
        room = self._space.config.max_tokens - len(prompt_token_ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if self._config.beyond_context == "clip":
            max_tokens = min(max_tokens, room)
        if max_tokens > room or max_tokens < max(1, params.min_tokens):
            is_least = params.max_tokens is None or self._config.beyond_context == "clip"
            wanted = max(1, params.min_tokens) if is_least else params.max_tokens
            raise RequestError(
                f"a prompt of {len(prompt_token_ids)} tokens and {wanted} new ones are more than the "
                f"{self._space.config.max_tokens} of the longest sequence: shorten one, set max_tokens of the engine "
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
        )

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


def _require_continuable(answered: Sequence[int], params: SamplingParams, max_tokens: int) -> None:
    """Check that tokens of an answer can be continued. Raises RequestError."""
    if max(params.n, params.num_beams) > 1:
        raise RequestError(
            f"tokens of an answer are given, and {max(params.n, params.num_beams)} answers or beams are requested: "
            "only a single answer can be continued"
        )
    if len(answered) >= max_tokens:
        raise RequestError(f"{len(answered)} tokens of an answer of at most {max_tokens} are given: none is left")


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
