"""The configuration of a scheduler: the limits of a step, and the kind of preemption."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from pagedkv.contract.arguments import as_count, as_flag
from pagedkv.errors import ConfigurationError

__all__ = ["PreemptionKind", "SchedulingConfig", "require_preemption"]

PreemptionKind: TypeAlias = Literal["recompute", "swap"]
"""What happens to the blocks of a preempted request: freed and computed again, or swapped to the host."""


FIRST_PROMISE: Final = 64


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """The limits of a step. Watermark and pool sizes are in the block space's configuration.

    Args:
        max_sequences: most sequences that run at once; samples and beams count one by one.
        max_batched_tokens: most tokens that a step computes, decoded ones included.
        preemption: whether a preempted request's blocks are freed or swapped out.
        first_promise: tokens for which blocks are reserved when a request returns from its first preemption, for it and
            for each running request; twice as many after each further preemption. See
            :mod:`~pagedkv.scheduling.promises`.
        most_drafts: most drafts of a sequence in a step; 0: no drafts. See :mod:`~pagedkv.scheduling.drafting`.
        publishes_answers: whether other requests can hit generated tokens, besides those of prompts. False for a model
            that computes a token differently in decoding than in a prompt.
        overlap: whether a sequence may decode a token that a batch in flight still samples, as an unknown token. False:
            such a sequence is not scheduled until that batch is finished.

    Raises:
        ConfigurationError: a value is out of range, or two of them contradict each other.
    """

    max_sequences: int = 256
    max_batched_tokens: int = 8192
    preemption: PreemptionKind = "recompute"
    first_promise: int = FIRST_PROMISE
    most_drafts: int = 0
    publishes_answers: bool = True
    overlap: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        as_count(self.max_sequences, "max_sequences", least=1)
        as_count(self.max_batched_tokens, "max_batched_tokens", least=1)
        if self.max_batched_tokens < self.max_sequences:
            raise ConfigurationError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_sequences "
                f"({self.max_sequences}), so that every sequence can decode in every step"
            )
        as_count(self.first_promise, "first_promise", least=1)
        as_count(self.most_drafts, "most_drafts")
        as_flag(self.publishes_answers, "publishes_answers")
        as_flag(self.overlap, "overlap")
        require_preemption(self.preemption)


def require_preemption(preemption: object) -> None:
    """Raise ConfigurationError for anything but a kind of preemption."""
    if not isinstance(preemption, str) or preemption not in get_args(PreemptionKind):
        raise ConfigurationError(f"preemption must be recompute or swap, got {preemption!r}")
