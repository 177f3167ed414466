"""What a scheduler is told: the limits of a step, and what becomes of a request that must give its blocks up."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from pagedkv.errors import ConfigurationError

__all__ = ["PreemptionKind", "SchedulingConfig"]

PreemptionKind: TypeAlias = Literal["recompute", "swap"]
"""What becomes of a request that must give its blocks up."""


FIRST_PROMISE: Final = 64


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """The limits of a step. The watermark, and the sizes of pools, are the block space's.

    Args:
        max_sequences: sequences that run at once, samples and beams counted one by one.
        max_batched_tokens: tokens that a step computes, decoded ones included.
        preemption: what becomes of a request that must give its blocks up.
        first_promise: tokens that a request, and all who run, can grow by when it returns from its first preemption;
            twice as many after each further one. See :mod:`~pagedkv.scheduling.promises`.
        most_drafts: guessed tokens that a sequence has in a step at most; 0: nobody is asked for guesses. See
            :mod:`~pagedkv.scheduling.drafting`.
        publishes_answers: what requests generate can be hit by others, as their prompts can. An engine says no where
            its model computes a token otherwise when it decodes it than in a prompt.

    Raises:
        ConfigurationError: a value is out of range, or two of them contradict each other.
    """

    max_sequences: int = 256
    max_batched_tokens: int = 8192
    preemption: PreemptionKind = "recompute"
    first_promise: int = FIRST_PROMISE
    most_drafts: int = 0
    publishes_answers: bool = True

    def __post_init__(self) -> None:
        """Check the values."""
        if self.max_sequences < 1:
            raise ConfigurationError(f"max_sequences (--max-sequences) must be at least 1, got {self.max_sequences}")
        if self.max_batched_tokens < self.max_sequences:
            raise ConfigurationError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_sequences "
                f"({self.max_sequences}), so that every sequence can decode in every step"
            )
        if self.first_promise < 1:
            raise ConfigurationError(f"first_promise must be at least 1, got {self.first_promise}")
        if self.most_drafts < 0:
            raise ConfigurationError(f"most_drafts must not be negative, got {self.most_drafts}")
        if self.preemption not in get_args(PreemptionKind):
            raise ConfigurationError(f"preemption must be recompute or swap, got {self.preemption!r}")
