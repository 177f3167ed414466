"""EngineRequest: a request with its tokens, from its arrival to its output.

The scheduler's :class:`~pagedkv.scheduling.Request` has counts and rows. This has the tokens: the prompt, and
those generated for each of its samples. The scheduler reads them from here when a preempted request is computed again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.miss_causes import Explanation
from pagedkv.contract.receipt import Receipt
from pagedkv.engine.beams import Beams
from pagedkv.engine.intent import PLAIN, Intent
from pagedkv.engine.outputs import FinishReason, RequestOutput
from pagedkv.engine.prediction import PredictedText
from pagedkv.engine.prompt_lookup import LookupText, PromptLookup
from pagedkv.engine.sample import Decode, Sample
from pagedkv.engine.sampling import SampledSequence, SamplingParams, TokenLogprobs
from pagedkv.scheduling import NO_INTENT, UNKNOWN_TOKEN, Request
from pagedkv.tiers.served import TierNote

__all__ = ["EngineRequest", "RequestSpec"]


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
        intent: hints about caching and scheduling.
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
        num_drafted: drafts that were computed for it; num_accepted: those that were accepted.
        num_loaded_tokens, tier_notes: loads from tiers, as in its output.

    Raises:
        RequestError: the parameters name tokens outside of the vocabulary, or need a tokenizer.
    """

    number: int
    spec: RequestSpec
    arrived: float
    fork_by: Forker
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
    num_drafted: int = 0
    num_accepted: int = 0
    num_loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    tier_notes: tuple[TierNote, ...] = ()

    def __post_init__(self) -> None:
        """Make its samples, and the scheduler's record of it."""
        spec = self.spec
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
            keys=self.intent.keys,
            max_hit_tokens=0 if self.needs_prompt_logprobs else None,
            intent=NO_INTENT if self.intent is PLAIN else self.intent,
            replaces=None if self.intent.replaces is None else self.intent.replaces.scheduled,
            sequences=lambda: [self.tokens_of(sample) for sample in self.samples],
            runs_ahead=self.beams is None and not self.params.logits_processors,
            num_continued=len(self.intent.answered),
        )
        if self.intent.replaces is not None:  # else each turn of a conversation would keep all earlier turns in memory
            self.spec = replace(spec, intent=replace(self.intent, replaces=None))

    @property
    def prompt_token_ids(self) -> Int32Array:
        """The prompt: int32 ``[n]``."""
        return self.spec.prompt_token_ids

    @property
    def params(self) -> SamplingParams:
        """Its parameters."""
        return self.spec.params

    @property
    def intent(self) -> Intent:
        """Its hints; ``replaces`` is None once the request has been made."""
        return self.spec.intent

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
            intent: of the fork; None: this one's. With another tenant, salt or publish limit, the fork shares no rows'
                blocks, and hits only what the prefix cache grants it.

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
        )

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
