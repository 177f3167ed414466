"""One request, from the caller's hints and parameters to its output: its answers, its beams, its forks.

The scheduler's :class:`~pagedkv.scheduling.Request` has counts and rows. An :class:`EngineRequest` has the tokens: the
prompt, and those generated for each of its samples. The scheduler reads them from here when a preempted request is
computed again.

An :class:`Intent` has the caller's hints: tenant, priority, leases, predicted answer. But for its adapter it changes no
token of an answer, as :class:`SamplingParams` changes no block. It reaches the scheduler and the block space with the
request; forks inherit it, and a preempted request keeps it.

A :class:`Sample` is independent of rows and blocks: a preemption by swap does not change it, and a preemption by
recompute only if several answers of one prompt start again.

In a beam search a request's beams are its rows, and its answers are the finished hypotheses. The search
(:class:`~pagedkv.engine.sampling.BeamSearch`) selects the parent and the token of each new beam. The scheduler forks
and frees rows accordingly, and the sampled sequences are forked here. Beams that are preempted by recompute start
again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, final

import numpy as np
import torch

from pagedkv.contract.answers import Explanation, Receipt
from pagedkv.contract.arguments import as_count, as_token_array
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.engine.guessing import LookupText, PredictedText, PromptLookup
from pagedkv.engine.outputs import Completion, FinishReason, RequestOutput
from pagedkv.engine.sampling import (
    BeamSearch,
    BeamStep,
    Place,
    SampledSequence,
    SamplingParams,
    StopDetector,
    TokenLogprobs,
    beam_logprobs,
)
from pagedkv.errors import RequestError, SamplingError, TokenError
from pagedkv.scheduling import NO_INTENT, UNKNOWN_TOKEN, CacheIntent, Request
from pagedkv.tiers.served import TierNote

LARGEST_PRIORITY: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Intent(CacheIntent):
    """A caller's hints about a request; checked when built.

    Leases need ``EngineConfig(leases=True)``. Without it they are refused, and their counts in the output are 0.

    Args:
        tenant: one of the engine's tenants, which is charged for the request's blocks; None: the unnamed one.
        keep_for_s: seconds for which prompt and answer stay leased once the request has ended, whatever ended it. A
            lease is soft: it is broken if nothing else can be evicted. None: no lease.
        breakpoints: at most 4 :class:`Breakpoint`, places of the prompt whose leading tokens are leased once they are
            computed.
        retention: 1: what the request leaves is evicted after all other unleased content, which needs ``leases``; -1:
            before all other content. Excludes ``keep_for_s``.
        publish: what other requests may hit of it: "all", its "prompt", or "none".
        salt: requests of different salts share no content, and do not hit each other's.
        adapter: the adapter of ``EngineConfig.adapters`` that its tokens are computed with, the one field that changes
            them. Requests of different adapters share no content either. None: the model without an adapter.
        priority: requests of a higher one are scheduled first.
        replaces: a request that this one supersedes, such as the turn before it in a conversation. What only that one
            has is evicted first, from when both this one is admitted and that one has ended. It is not aborted.
        prediction: tokens that the answer may have, in order: guesses where ``EngineConfig.predicted_tokens`` allows
            them, in place of those by ``speculation``. Forks inherit none.
        answered: the first tokens of the answer, which another engine has generated, such as a replica that has failed.
            They are computed with the prompt, and the answer continues behind them; updates and log-probabilities
            begin there. Needs one answer without a beam search. With the same model, parameters and seed the answer is
            the one that the other engine would have given. Forks inherit none.

    Raises:
        RequestError: a value is out of range, or contradicts another.
    """

    salt: bytes = field(default=b"", repr=False)  # a secret of its tenant
    adapter: str | None = None
    priority: int = 0
    replaces: "EngineRequest | None" = None
    prediction: tuple[int, ...] = field(default=(), repr=False)
    answered: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check the values."""
        CacheIntent.__post_init__(self)  # super() fails in a dataclass with slots, which is a new class
        if not isinstance(self.salt, bytes):
            raise RequestError(f"salt must be bytes, got {self.salt!r}")
        if not isinstance(self.adapter, str | None):
            raise RequestError(f"adapter must be a name or None, got {self.adapter!r}")
        priority = as_count(
            self.priority, "priority", least=-LARGEST_PRIORITY, most=LARGEST_PRIORITY, error=RequestError
        )
        object.__setattr__(self, "priority", priority)
        for name in ("prediction", "answered"):
            try:
                tokens = as_token_array(getattr(self, name))
            except TokenError as problem:
                raise RequestError(f"{name} must be token ids: {problem}") from problem
            object.__setattr__(self, name, tuple(tokens.tolist()))

    def for_fork(self, num_tokens: int) -> "Intent":
        """Return the intent of a fork whose prompt has so many tokens: it replaces no request and predicts nothing."""
        places = tuple(place for place in self.breakpoints if place.num_tokens <= num_tokens)
        if places == self.breakpoints and self.replaces is None and not self.prediction and not self.answered:
            return self
        return replace(self, breakpoints=places, replaces=None, prediction=(), answered=())


PLAIN: Final = Intent()
"""The intent of a request whose caller gives none."""
Decode = Callable[[Sequence[int]], str]


@final
class Sample:
    """One answer.

    Args:
        index: its place among the request's answers.
        sequence: its tokens and their state for sampling.
        stop_ids: tokens that end it; the model's end tokens are among them unless the request ignores them.
        max_tokens: most tokens of it.
        decode: maps token ids to text; needed for stop texts alone.

    Attributes:
        place: its place for a row of logits without drafts.
        finish_reason: why it ended; stop: the token id or text that ended it; both None while it has not ended.
        score: its score in a beam search.
        num_continued: leading tokens that another engine generated.
    """

    def __init__(
        self,
        index: int,
        sequence: SampledSequence,
        stop_ids: Iterable[int],
        max_tokens: int,
        decode: Decode | None = None,
    ) -> None:
        self.index = index
        self.sequence = sequence
        self.place = Place(sequence)
        self.finish_reason: FinishReason | None = None
        self.stop: int | str | None = None
        self.score: float | None = None
        self._stop_ids = frozenset(stop_ids)
        self._max_tokens = max_tokens
        self._decode = decode if sequence.params.stop else None
        self.num_continued = len(sequence.generated_ids)
        self._stops = self._new_stops()
        self._logprobs: list[TokenLogprobs] = []

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens; not to be changed."""
        return self.sequence.generated_ids

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities of its tokens were requested."""
        return self.sequence.params.logprobs is not None

    def logprobs_from(self, first: int) -> tuple[TokenLogprobs, ...] | None:
        """Return the log-probabilities of its tokens from index ``first`` on; None if they were not requested."""
        first = max(0, first - self.num_continued)
        return tuple(self._logprobs[first:]) if self.has_logprobs else None

    def take(self, token_id: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Append a sampled token; return whether it ends the answer by a stop rule, and not by its length."""
        self.sequence.append_sampled(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        ending = self._stops.append((token_id,))
        if ending is None:
            return False
        self.finish_reason, self.stop = ending.reason.value, ending.stop
        return ending.reason.value == "stop"

    def go_on_as(self, sequence: SampledSequence) -> None:
        """Replace its sequence, as a beam whose place another one takes."""
        self.sequence, self.place = sequence, Place(sequence)

    def begin_again(self) -> None:
        """Drop all tokens generated here."""
        self.sequence.truncate(self.num_continued)
        self._logprobs.clear()
        self._stops = self._new_stops()

    def completion(self) -> Completion:
        """Return its tokens so far. O(tokens)."""
        return Completion(
            self.index,
            tuple(self.token_ids),
            self.finish_reason,
            self._stops.text if self._decode is not None else None,
            self.stop,
            self.logprobs_from(0),
            self.score,
        )

    def _new_stops(self) -> StopDetector:
        stops = StopDetector(self.sequence.params, self._stop_ids, self._decode, self._max_tokens)
        stops.append(self.sequence.generated_ids)
        return stops


@final
class Beams:
    """The beams of one request.

    Args:
        params: parameters of the request.
        beams: one for each row, without generated tokens.
        stop_ids: tokens that end an answer.
        max_tokens: most tokens of an answer.
    """

    def __init__(self, params: SamplingParams, beams: list[Sample], stop_ids: frozenset[int], max_tokens: int) -> None:
        self._params = params
        self._beams = beams
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._search = self._new_search()

    @property
    def live(self) -> list[Sample]:
        """The beams, in the order of their rows."""
        return list(self._beams)

    def step(self, logits: torch.Tensor) -> BeamStep:
        """Extend all beams by a token.

        Args:
            logits: float32 ``[num_beams, vocabulary]``.

        Raises:
            SamplingError: no beam has a token with a finite score.
        """
        logprobs = beam_logprobs(logits, [beam.place for beam in self._beams])
        if not bool(torch.isfinite(logprobs.amax())):
            raise SamplingError("no beam can go on: the model gave no numbers, or bias and bans forbid every token")
        step = self._search.step(logprobs)
        sequences = [self._beams[parent].sequence for parent in step.parents]
        for index, (beam, sequence, token) in enumerate(zip(self._beams, sequences, step.token_ids, strict=True)):
            grown = sequence.fork(index)
            grown.append_sampled(token)
            beam.go_on_as(grown)
        return step

    def tell(self, answers: list[Sample]) -> None:
        """Copy the best finished hypotheses into the answers, the best first."""
        for answer, finished in zip(answers, self._search.finished, strict=False):
            answer.score = finished.score
            for token in finished.token_ids:
                answer.take(token)

    def begin_again(self) -> None:
        """Drop all generated tokens, and start the search again."""
        for beam in self._beams:
            beam.begin_again()
        self._search = self._new_search()

    def _new_search(self) -> BeamSearch:
        return BeamSearch(
            self._params.num_beams,
            self._max_tokens,
            self._stop_ids,
            length_penalty=self._params.length_penalty,
            early_stopping=self._params.early_stopping,
        )


class Forker(Protocol):
    """How an engine forks a request: see :meth:`EngineRequest.fork`."""

    def __call__(
        self,
        request: "EngineRequest",
        n: int | None,
        at: int | None,
        params: SamplingParams | None,
        sample: int,
        intent: Intent | None,
    ) -> "EngineRequest":
        """Add a request that continues this one."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpec:
    """A request with the values that its parameters leave to the engine.

    Args:
        prompt_token_ids: int32 ``[n]``.
        params: its parameters, with bad words as token ids.
        max_tokens: most tokens of an answer.
        stop_ids: tokens that end an answer; the model's end tokens are among them unless the request ignores them.
        end_ids: the model's end tokens.
        seed: seed of its noise if the parameters have none.
        vocab_size: columns of the logits.
        decode: maps token ids to text; None without a tokenizer.
        intent: hints about caching and scheduling; keys: the extra keys of its blocks, of salt and adapter.
    """

    prompt_token_ids: Int32Array
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    end_ids: frozenset[int]
    seed: int
    vocab_size: int
    decode: Decode | None
    intent: Intent = PLAIN
    keys: RequestKeys = field(default=NO_KEYS, repr=False)  # a salt is a secret

    def make_samples(self, num_samples: int) -> list[Sample]:
        """Make answers, or beams, without tokens, or with those of the intent's ``answered``.

        Raises:
            RequestError: stop texts without a tokenizer, or tokens that the vocabulary does not have.
        """
        first = SampledSequence(
            self.params,
            self.prompt_token_ids,
            vocab_size=self.vocab_size,
            end_token_ids=self.end_ids,
            seed=self.seed,
            generated_ids=self.intent.answered,
        )
        sequences = [first, *(first.fork(index) for index in range(1, num_samples))]
        return [
            Sample(index, sequence, self.stop_ids, self.max_tokens, self.decode)
            for index, sequence in enumerate(sequences)
        ]


@final
@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request under way.

    Args:
        number: its place in the order of arrival.
        spec: the prompt, its parameters and limits.
        arrived: time of its arrival, in seconds of the engine's clock.
        fork_by: the engine's function that forks it.
        prompt_token_ids, params, intent: those of ``spec``; the intent without ``replaces``, once the request is made.
        samples: its answers; live: those that have not ended, in the order of its rows.
        beams: the beam search; ``live`` are its beams then. None: it is no beam search.
        scheduled: the scheduler's record of it.
        admitted, first_token, finished: times of its first admission, of its first token and of the end of its last
            answer.
        num_cached_tokens: tokens of the prompt that were hit at its first admission.
        explanation: why no more of them were.
        num_preemptions: times that it was preempted.
        error: why it failed or was rejected.
        prompt_logprobs: of the prompt's tokens after the first, as far as they are computed.
        pooled: sum of the hidden states of its first ``num_pooled`` tokens, or that of the last: float64 ``[width]``.
        num_drafted: drafts that were computed for it; num_accepted: those that were accepted.
        num_loaded_tokens, tier_notes: loads from tiers, as in its output.

    Raises:
        RequestError: the parameters name tokens outside of the vocabulary, or need a tokenizer.
    """

    number: int
    spec: RequestSpec
    arrived: float
    fork_by: Forker
    prompt_token_ids: Int32Array = field(init=False)
    params: SamplingParams = field(init=False)
    intent: Intent = field(init=False)
    samples: list[Sample] = field(init=False)
    live: list[Sample] = field(init=False)
    scheduled: Request = field(init=False)
    admitted: float | None = None
    beams: Beams | None = None
    first_token: float | None = None
    finished: float | None = None
    num_cached_tokens: int | None = None
    explanation: Explanation | None = None
    num_preemptions: int = 0
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: torch.Tensor | None = None
    num_pooled: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    tier_notes: tuple[TierNote, ...] = ()

    def __post_init__(self) -> None:
        """Make its samples, and the scheduler's record of it."""
        spec = self.spec
        self.prompt_token_ids, self.params, self.intent = spec.prompt_token_ids, spec.params, spec.intent
        self.samples = spec.make_samples(self.params.n)
        self.live = list(self.samples)
        if self.params.num_beams > 1:
            beams = spec.make_samples(self.params.num_beams)
            self.beams = Beams(self.params, beams, spec.stop_ids, spec.max_tokens)
            self.live = beams
        self.scheduled = Request(
            self.number,
            len(self.prompt_token_ids),
            self.spec.max_tokens,
            self._load,
            num_sequences=len(self.live),
            priority=self.intent.priority,
            keys=spec.keys,
            max_hit_tokens=self._num_read,
            intent=NO_INTENT if self.intent is PLAIN else self.intent,
            replaces=None if self.intent.replaces is None else self.intent.replaces.scheduled,
            sequences=lambda: [self.tokens_of(sample) for sample in self.samples],
            runs_ahead=self.beams is None and not self.params.logits_processors,
            num_continued=len(self.intent.answered),
        )
        if self.intent.replaces is not None:  # else each turn of a conversation would keep all earlier turns in memory
            self.intent = replace(self.intent, replaces=None)
            self.spec = replace(spec, intent=self.intent)

    @property
    def is_finished(self) -> bool:
        """Whether all its answers have ended."""
        return self.finished is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why its first answer ended; None until all have ended."""
        return None if self.finished is None else self.samples[0].finish_reason or "length"

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all its answers."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are requested, and some are not computed yet."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    @property
    def needs_pooling(self) -> bool:
        """Whether hidden states of the prompt are to be pooled, and some are not computed yet."""
        return self.params.pooling is not None and self.num_pooled < len(self.prompt_token_ids)

    @property
    def _num_read(self) -> int | None:
        """Leading tokens whose hidden states were read; None: those of others are not needed, so they may be hit."""
        read = [len(self.prompt_logprobs)] if self.needs_prompt_logprobs else []
        if self.needs_pooling and self.params.pooling == "mean":
            read.append(self.num_pooled)
        return min(read, default=None)

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add log-probabilities of the prompt's next tokens."""
        self.prompt_logprobs += logprobs
        self.scheduled.max_hit_tokens = self._num_read

    def pool(self, hidden: torch.Tensor) -> None:
        """Add hidden states of the prompt's next tokens, ``[n, width]``; or of its last token alone."""
        added = hidden.double().sum(dim=0)
        self.pooled = added if self.pooled is None else self.pooled + added
        self.num_pooled = len(self.prompt_token_ids) if self.params.pooling == "last" else self.num_pooled + len(hidden)
        self.scheduled.max_hit_tokens = self._num_read

    @property
    def num_missing_tokens(self) -> int | None:
        """Tokens of the prompt that were not hit; None before its first admission."""
        return None if self.num_cached_tokens is None else len(self.prompt_token_ids) - self.num_cached_tokens

    def tokens_of(self, sample: Sample) -> Int32Array:
        """Return the prompt followed by the tokens of one answer: int32 ``[n]``. O(n)."""
        return np.concatenate([self.prompt_token_ids, np.array(sample.token_ids, np.int32)])

    def fork(
        self,
        n: int | None = None,
        *,
        at: int | None = None,
        params: SamplingParams | None = None,
        sample: int = 0,
        intent: Intent | None = None,
    ) -> "EngineRequest":
        """Add a request that continues this one: n answers that begin with the tokens of one of these.

        At the current end of a running request all blocks are shared, and copied only when a request writes into a
        shared one. At an earlier place the fork shares the blocks that are still there, and with windows or recurrent
        layers those before the last place where windows and states are kept. It computes the rest, which
        ``num_missing_tokens`` of the fork counts.

        Args:
            n: number of answers, equal ones if the most likely tokens are taken; None: that of params, or one.
            at: number of leading tokens of prompt and answer to begin with; None: all.
            params: parameters of the fork; None: those of this request, with the rest of its ``max_tokens``, and other
                noise.
            sample: index of the answer.
            intent: of the fork; None: this one's. With another tenant, salt, adapter or publish limit, the fork shares
                no rows' blocks, and hits only what the prefix cache grants it.

        Returns:
            A request like any other, whose prompt is the tokens that it begins with. It has ended, "rejected", if its
            tenant's limits leave too few blocks for it.

        Raises:
            RequestError: there is no such place or answer, n contradicts params, no tokens are left to generate, or
                :meth:`~pagedkv.engine.EngineCore.add` refuses the request.
        """
        return self.fork_by(self, n, at, params, sample, intent)

    def guess_by(self, lookup: PromptLookup) -> None:
        """Draft its next tokens by prompt lookup, unless it is a beam search or has foreign processors.

        Foreign processors could not take back refused drafts.
        """
        if self._may_guess:
            text = LookupText(self.prompt_token_ids)
            self.scheduled.propose = lambda most: lookup.propose(text.grown(self.live[0].token_ids), most)

    def guess_by_prediction(self, num_tokens: int) -> None:
        """Draft its next tokens from the intent's prediction, under the conditions of :meth:`guess_by`.

        Args:
            num_tokens: most drafts of a step.
        """
        if self._may_guess:
            text = PredictedText(self.intent.prediction)
            self.scheduled.propose = lambda most: text.propose(self.live[0].token_ids, min(most, num_tokens))

    def guess_by_model(self, num_tokens: int) -> None:
        """Let a draft model propose its next tokens within each step, under the conditions of :meth:`guess_by`.

        Args:
            num_tokens: most drafts of a step.
        """
        if self._may_guess:
            unknown = np.full(num_tokens, UNKNOWN_TOKEN, np.int32)
            self.scheduled.propose = lambda most: unknown[:most]

    @property
    def _may_guess(self) -> bool:
        return self.beams is None and not self.params.logits_processors

    def end(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End the answers that have not ended, for this reason, and with them the request."""
        for sample in self.samples:
            sample.finish_reason = sample.finish_reason or reason
        self.live = []
        self.finished = now
        self.error = error

    def output(self) -> RequestOutput:
        """Return its output so far. O(tokens)."""
        return RequestOutput(
            self.number,
            tuple(self.prompt_token_ids.tolist()),
            tuple(sample.completion() for sample in self.samples),
            num_cached_tokens=self.num_cached_tokens or 0,
            num_recomputed_tokens=self.scheduled.receipt.num_recomputed,
            num_preemptions=self.num_preemptions,
            first_token_seconds=self._seconds_to(self.first_token),
            total_seconds=self._seconds_to(self.finished),
            error=self.error,
            prompt_logprobs=None if self.params.prompt_logprobs is None else (None, *self.prompt_logprobs),
            queue_seconds=self._seconds_to(self.admitted),
            explanation=self.explanation,
            receipt=self._receipt(),
            num_drafted_tokens=self.num_drafted,
            num_accepted_tokens=self.num_accepted,
            num_leased_tokens=self.scheduled.num_leased_tokens,
            breakpoint_tokens=tuple(num_leased or 0 for num_leased in self.scheduled.leased_at),
            epochs=self.scheduled.epochs,
            num_loaded_tokens=self.num_loaded_tokens,
            tier_notes=self.tier_notes,
            pooled=self._pooled(),
        )

    def _pooled(self) -> tuple[float, ...] | None:
        if self.pooled is None or self.needs_pooling:
            return None
        num_summed = self.num_pooled if self.params.pooling == "mean" else 1
        return tuple((self.pooled / num_summed).tolist())

    def _receipt(self) -> Receipt:
        receipt = self.scheduled.receipt
        return replace(receipt, num_loaded=self.num_loaded_tokens) if self.num_loaded_tokens else receipt

    def _seconds_to(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.arrived

    def _load(self, num_generated: int) -> Int32Array:
        """Return the tokens to be computed. With 0 generated tokens kept, the answers start again from the prompt."""
        if num_generated == 0:
            if self.beams is not None:
                self.beams.begin_again()
                return self.prompt_token_ids
            for sample in self.live:
                sample.begin_again()
            return self.prompt_token_ids
        return self.tokens_of(self.live[0])[: len(self.prompt_token_ids) + num_generated]


def fork_prefix(request: EngineRequest, sample: int, at: int | None) -> Int32Array:
    """Give the tokens that a fork begins with: int32 ``[at]``. Raises RequestError for places that are not there."""
    index = as_count(sample, "sample", most=len(request.samples) - 1, error=RequestError)
    tokens = request.tokens_of(request.samples[index])
    return tokens[: len(tokens) if at is None else as_count(at, "at", least=1, most=len(tokens), error=RequestError)]


def fork_params(
    request: EngineRequest, n: int | None, params: SamplingParams | None, num_tokens: int
) -> SamplingParams:
    """Return the parameters of a fork with ``n`` answers that begins with ``num_tokens`` tokens.

    Raises:
        RequestError: ``n`` and ``params`` contradict each other, or no tokens are left to generate.
    """
    given_n = None if n is None else as_count(n, "n", least=1, error=RequestError)
    if params is None:
        return replace(_left_of(request, num_tokens), n=given_n or 1)
    if given_n is not None and params.n not in {1, given_n}:
        raise RequestError(f"fork(n={n}) contradicts its params, which ask for n={params.n}: say it in one place")
    return replace(params, n=given_n or params.n)


def _left_of(request: EngineRequest, num_tokens: int) -> SamplingParams:
    """Return parameters with the tokens that are left, and other noise. Raises RequestError if none are left."""
    num_generated = max(0, num_tokens - len(request.prompt_token_ids))
    num_left = request.spec.max_tokens - num_generated
    if num_left < 1:
        raise RequestError(
            f"request {request.number} has all of its {request.spec.max_tokens} tokens: fork it at an earlier place, "
            "or give params with another max_tokens"
        )
    return replace(
        request.params,
        max_tokens=num_left,
        min_tokens=max(0, request.params.min_tokens - num_generated),
        seed=None,
        prompt_logprobs=None,
        pooling=None,
    )
