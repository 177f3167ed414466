"""What a caller gets: an output for each request, a completion for each of its answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pagedkv.memory.contract.miss_causes import Explanation
from pagedkv.memory.space import Receipt
from pagedkv.serving.engine.sampling import TokenLogprobs
from pagedkv.serving.engine.tiering import TierNote

__all__ = ["Completion", "FinishReason", "RequestOutput"]

FinishReason: TypeAlias = Literal["stop", "length", "aborted", "rejected", "deadline", "failed"]
"""Why an answer ended: by itself, by its length, by its caller, for want of blocks, by its deadline, or by an error of
its own, of a step that failed twice, or of the device."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Args:
        index: its place among the request's answers.
        token_ids: what was generated, the tokens that ended it included.
        finish_reason: see :data:`FinishReason`; None while it goes on.
        text: the same as text, where there is a tokenizer: without the token that ended it, cut before a stop text.
        stop: the token id or the text that ended it; None where it ended otherwise.
        logprobs: of each token, where they were asked for.
        score: by which a beam search ranks it; None where there is none.
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
    """What became of a request.

    Args:
        number: its place in the order of arrival.
        prompt_token_ids: its prompt.
        completions: its answers.
        num_cached_tokens: tokens of the prompt that were hit when it was first admitted.
        num_recomputed_tokens: tokens that were computed again after preemption.
        num_preemptions: how often it had to give its blocks up.
        first_token_seconds, total_seconds: from its arrival to its first token, and to its end.
        error: why it failed or was rejected.
        prompt_logprobs: where they were asked for, of each token of the prompt; None of the first one, before which
            nothing stands.
        queue_seconds: from its arrival to its first block.
        explanation: why no more of its prompt was hit, as it was then; None where it was not admitted.
        receipt: what it took in the block space: of all of its sequences and lives, complete once it has ended.
        num_drafted_tokens: tokens that were guessed and computed for it; num_accepted_tokens: those that were right.
        num_leased_tokens: leading tokens of prompt and answer that were leased when it ended, of the answer with the
            most; 0 without ``keep_for_s``, or if the lease was refused.
        breakpoint_tokens: for each breakpoint of its intent, in order, the leading tokens leased there; 0 until they
            are computed, or if the lease was refused.
        epochs: the oldest and the newest epoch of the weights that contributed to what it held; None before it gives
            its blocks back, or if epochs are not counted.
        num_loaded_tokens: tokens of its hits that tiers brought for it, by medium ("host", "folder", "redis",
            "object"); the other hits were in device memory.
        tier_notes: what became of what tiers had of its prompt, in order: ``str`` of each is one line.
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

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first answer."""
        return self.completions[0].token_ids

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that steps computed for it, those that were computed again among them."""
        return self.receipt.num_computed

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that its answers got by forks, and did not have to compute."""
        return self.receipt.num_forked
