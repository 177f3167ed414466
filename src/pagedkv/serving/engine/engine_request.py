"""EngineRequest: a request with its tokens, from its arrival to its output.

Beside the scheduler's :class:`~pagedkv.memory.scheduling.Request`, which knows counts and rows, this knows tokens: the
prompt, and what was generated for each of its samples. The tokens of a request that starts over after a preemption are
asked from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, final

import numpy as np

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.miss_causes import Explanation
from pagedkv.memory.scheduling import NO_INTENT, UNKNOWN_TOKEN, Request
from pagedkv.serving.engine.beams import Beams
from pagedkv.serving.engine.intent import PLAIN, Intent
from pagedkv.serving.engine.outputs import FinishReason, RequestOutput
from pagedkv.serving.engine.prediction import PredictedText
from pagedkv.serving.engine.prompt_lookup import LookupText, PromptLookup
from pagedkv.serving.engine.sample import Decode, Sample
from pagedkv.serving.engine.sampling import SampledSequence, SamplingParams, TokenLogprobs
from pagedkv.serving.engine.tiering import TierNote

__all__ = ["EngineRequest", "Wish"]


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
        """Let another request go on from this one."""


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """What is asked for, complete: what the parameters left open is said.

    Args:
        prompt_token_ids: int32 ``[n]``.
        params: what it asks for, bad words as token ids.
        max_tokens: tokens of an answer at most.
        stop_ids: tokens that end an answer, the model's own among them where they count.
        end_ids: the model's own end tokens.
        seed: where its noise comes from if the parameters do not say.
        vocab_size: columns of the logits.
        decode: gives the text of token ids; None without a tokenizer.
        intent: what its caller says beside that.
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
        """Make answers, or beams, with nothing but what another engine has generated.

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
        wish: what it asks for.
        arrived: when it came, by the engine's clock, in seconds.
        fork_by: how its engine forks it.
        samples: its answers; live: those that go on, in the order of its rows.
        beams: the search that answers it, if it is one: ``live`` are its beams then.
        scheduled: its part in the schedule.
        admitted: when it first got blocks; first_token: when the first token was known; finished: when all answers had
            ended.
        num_cached_tokens: tokens of the prompt that were hit when it was first admitted.
        explanation: why no more of them were.
        num_preemptions: how often it had to give its blocks up.
        error: why it failed or was rejected.
        prompt_logprobs: of the prompt's tokens behind the first, as far as they are told.
        num_drafted: guessed tokens that were computed for it; num_accepted: those that were right.
        num_loaded_tokens, tier_notes: what tiers did for it, as in its output.

    Raises:
        RequestError: what is asked for contradicts the model's vocabulary, or needs a tokenizer.
    """

    number: int
    wish: Wish
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
        """Make its samples, and its part in the schedule."""
        wish = self.wish
        self.samples = wish.make_samples(self.params.n)
        self.live = list(self.samples)
        if self.params.num_beams > 1:
            beams = wish.make_samples(self.params.num_beams)
            self.beams = Beams(self.params, beams, wish.stop_ids, wish.max_tokens)
            self.live = beams
        self.scheduled = Request(
            self.number,
            len(self.prompt_token_ids),
            self.wish.max_tokens,
            self._load,
            num_sequences=len(self.live),
            priority=self.intent.priority,
            keys=self.intent.keys,
            max_hit_tokens=0 if self.wants_prompt_logprobs else None,
            intent=NO_INTENT if self.intent is PLAIN else self.intent,
            replaces=None if self.intent.replaces is None else self.intent.replaces.scheduled,
            sequences=lambda: [self.tokens_of(sample) for sample in self.samples],
            runs_ahead=self.beams is None and not self.params.logits_processors,
            num_continued=len(self.intent.answered),
        )
        if self.intent.replaces is not None:  # else each turn of a conversation would keep all turns before it
            self.wish = replace(wish, intent=replace(self.intent, replaces=None))

    @property
    def prompt_token_ids(self) -> Int32Array:
        """The prompt: int32 ``[n]``."""
        return self.wish.prompt_token_ids

    @property
    def params(self) -> SamplingParams:
        """What it asks for."""
        return self.wish.params

    @property
    def intent(self) -> Intent:
        """What its caller says beside that; a request that it replaces is named only until this one is made."""
        return self.wish.intent

    @property
    def is_finished(self) -> bool:
        """Whether all its answers have ended."""
        return self.finished is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are asked for, and not all told."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    @property
    def num_missing_tokens(self) -> int | None:
        """Tokens of the prompt that were not there and are to be computed; None while it waits."""
        return None if self.num_cached_tokens is None else len(self.prompt_token_ids) - self.num_cached_tokens

    def tokens_of(self, sample: Sample) -> Int32Array:
        """Give the prompt and what was generated for one of its answers: int32. O(n)."""
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
        """Let another request go on from here: n answers that begin with the tokens of one of these.

        At the current end, while this request runs, all blocks are shared and nothing is copied before one of them
        writes. Elsewhere the fork takes what is still there, in models with windows or recurrent layers up to the
        longest place where these survive, and computes the rest: ``num_missing_tokens`` of the fork tells how many.

        Args:
            n: answers, the same ones where the most likely tokens are taken; None: as params say, or one.
            at: tokens of prompt and answer to begin with; None: all.
            params: what the fork asks for; None: as this request, with the tokens that are left to it, and noise of
                its own.
            sample: which answer.
            intent: of the fork; None: this one's. With another tenant, salt or publish limit it shares no blocks by
                forking, and hits what it may hit.

        Returns:
            A request like any other; its prompt are the tokens that it begins with. It has ended, "rejected", if its
            tenant's limits leave too few blocks for it.

        Raises:
            RequestError: a place or an answer that is not there, n that params contradict, nothing left to generate,
                or what
                :meth:`~pagedkv.serving.engine.EngineCore.add` refuses.
        """
        return self.fork_by(self, n, at, params, sample, intent)

    def guess_by(self, lookup: PromptLookup) -> None:
        """Let the tokens that follow be guessed, where each token is all that decides on the next.

        Not with foreign processors, which a guess would have to be taken back from, and not in a beam search.
        """
        if self._may_guess:
            text = LookupText(self.prompt_token_ids)
            self.scheduled.propose = lambda most: lookup.propose(text.grown(self.live[0].token_ids), most)

    def guess_by_prediction(self, num_tokens: int) -> None:
        """Let the tokens that follow be guessed from the intent's prediction, as :meth:`guess_by` does.

        Args:
            num_tokens: guesses in a step at most.
        """
        if self._may_guess:
            text = PredictedText(self.intent.prediction)
            self.scheduled.propose = lambda most: text.propose(self.live[0].token_ids, min(most, num_tokens))

    def guess_by_model(self, num_tokens: int) -> None:
        """Let a draft model guess the tokens that follow, in the step that computes them, as :meth:`guess_by` does.

        Args:
            num_tokens: guesses in a step at most.
        """
        if self._may_guess:
            unknown = np.full(num_tokens, UNKNOWN_TOKEN, np.int32)
            self.scheduled.propose = lambda most: unknown[:most]

    @property
    def _may_guess(self) -> bool:
        return self.beams is None and not self.params.logits_processors

    def end(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """End all that goes on."""
        for sample in self.samples:
            sample.finish_reason = sample.finish_reason or reason
        self.live = []
        self.finished = now
        self.error = error

    def output(self) -> RequestOutput:
        """Tell how far it has come."""
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
            receipt=self.scheduled.receipt,
            num_drafted_tokens=self.num_drafted,
            num_accepted_tokens=self.num_accepted,
            num_leased_tokens=self.scheduled.num_leased_tokens,
            breakpoint_tokens=tuple(num_leased or 0 for num_leased in self.scheduled.leased_at),
            epochs=self.scheduled.epochs,
            num_loaded_tokens=self.num_loaded_tokens,
            tier_notes=self.tier_notes,
        )

    def _seconds_to(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.arrived

    def _load(self, num_generated: int) -> Int32Array:
        """Give what is to be computed; with several answers, these begin again."""
        if num_generated == 0:
            if self.beams is not None:
                self.beams.begin_again()
                return self.prompt_token_ids
            for sample in self.live:
                sample.begin_again()
            return self.prompt_token_ids
        return self.tokens_of(self.live[0])[: len(self.prompt_token_ids) + num_generated]
