"""What callers get: records of steps, and outputs of requests.

A :class:`StepRecord` has the counts and times of one step; its fields are stable from version to version. A
:class:`RequestOutput` has a :class:`Completion` for each of the request's answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pagedkv.contract.answers import Explanation
from pagedkv.engine.sampling import TokenLogprobs
from pagedkv.space import Receipt
from pagedkv.tiers.served import TierNote


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, for live views, planners and inspectors.

    Args:
        step_id: number of the step.
        num_decoded: sequences that computed one token each, drafts aside; num_prefilled: tokens of prompts that were
            computed.
        num_sampled: tokens that were sampled.
        num_admitted, num_resumed: requests that began to run: from the queue, and swapped in.
        num_swapped_out, num_recomputed: requests that were preempted, by kind.
        num_finished, num_rejected: requests that ended.
        num_hit_tokens: tokens of admitted prompts that need not be computed.
        num_running, num_waiting, num_swapped: requests after the step.
        num_used_blocks, num_blocks: of all pools, null blocks left out; used: those of running sequences.
        schedule_seconds, forward_seconds, sample_seconds, finish_seconds: time of each part of the step.
        num_drafted: drafts that were computed; num_accepted: those that were accepted.
        failure: why the step failed and was aborted; None if it did not. A failed step has computed and sampled
            nothing, and the requests that it admitted wait again.

    If steps overlap, num_finished and num_accepted are those of the step before, which the same call finished.
    """

    step_id: int
    num_decoded: int
    num_prefilled: int
    num_sampled: int
    num_admitted: int
    num_resumed: int
    num_swapped_out: int
    num_recomputed: int
    num_finished: int
    num_rejected: int
    num_hit_tokens: int
    num_running: int
    num_waiting: int
    num_swapped: int
    num_used_blocks: int
    num_blocks: int
    schedule_seconds: float
    forward_seconds: float
    sample_seconds: float
    finish_seconds: float
    num_drafted: int = 0
    num_accepted: int = 0
    failure: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that were computed."""
        return self.num_decoded + self.num_prefilled + self.num_drafted


FinishReason: TypeAlias = Literal["stop", "length", "aborted", "rejected", "deadline", "failed"]
"""Why an answer ended: "stop" by a stop rule, "length" by its limit, "aborted" by its caller, "rejected" for lack of
blocks, "deadline" by its deadline, "failed" by an error of the request, of a step and its retry, or of the device."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Args:
        index: its place among the request's answers.
        token_ids: the generated tokens, with those that ended it.
        finish_reason: see :data:`FinishReason`; None while it has not ended.
        text: the text of the tokens, without an end token, and cut before a stop text; None without a tokenizer.
        stop: the token id or the text that ended it; None if it ended otherwise.
        logprobs: of each token; None if they were not requested.
        score: its score in a beam search; None if there is none.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    text: str | None = None
    stop: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers of a request, with its counts and times.

    Args:
        number: its place in the order of arrival.
        prompt_token_ids: its prompt.
        completions: its answers.
        num_cached_tokens: tokens of the prompt that were hit at its first admission.
        num_recomputed_tokens: tokens that were computed again after preemption.
        num_preemptions: times that it was preempted.
        first_token_seconds, total_seconds: from its arrival to its first token, and to its end.
        error: why it failed or was rejected.
        prompt_logprobs: of each token of the prompt, with None for the first; None if they were not requested.
        pooled: the mean of the prompt's hidden states, or that of its last token, as the model's head gets them;
            None if it was not requested, or is not computed yet.
        queue_seconds: from its arrival to its first admission.
        explanation: why no more of its prompt was hit at its first admission; None if it was not admitted.
        receipt: tokens and blocks that it used in the block space, summed over its sequences and admissions; complete
            once it has ended.
        num_drafted_tokens: drafts computed for it; num_accepted_tokens: those that were accepted.
        num_leased_tokens: leading tokens of prompt and answer that were leased when it ended, of the answer with the
            most; 0 without ``keep_for_s``, or if the lease was refused.
        breakpoint_tokens: for each breakpoint of its intent, in order, the leading tokens leased there; 0 until they
            are computed, or if the lease was refused.
        epochs: the oldest and the newest epoch of the weights that computed its blocks; None before its blocks are
            freed, or if epochs are not counted.
        num_loaded_tokens: tokens of its hits that tiers brought for it, by medium ("host", "folder", "redis",
            "object"); the other hits were in device memory.
        tier_notes: ranges of its prompt that tiers had, with why they were loaded or not; ``str`` of each is one line.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    first_token_seconds: float | None
    total_seconds: float | None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    queue_seconds: float | None = None
    explanation: Explanation | None = None
    receipt: Receipt = field(default_factory=Receipt)
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_leased_tokens: int = 0
    breakpoint_tokens: tuple[int, ...] = ()
    epochs: tuple[int, int] | None = None
    num_loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    tier_notes: tuple[TierNote, ...] = ()
    pooled: tuple[float, ...] | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first answer."""
        return self.completions[0].token_ids

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that steps computed for it, including those computed again."""
        return self.receipt.num_computed

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that its answers share by forks, instead of computing them."""
        return self.receipt.num_forked
