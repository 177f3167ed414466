"""What a request asks for: how long it may become, where it ends, how many answers it wants."""

from dataclasses import dataclass

from pagedkv.arguments import as_count
from pagedkv.errors import RequestError

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when a request ends.

    Args:
        max_tokens: tokens to be generated at most, at least 1.
        min_tokens: tokens before which nothing ends a sequence.
        n: answers to one prompt, which share its blocks.
        stop_token_ids: tokens that end a sequence, beside the model's own; they are part of the answer.
        ignore_eos: let the model's own end tokens end nothing.
        temperature: 0: the most likely token. Others need a sampler that knows them.

    Raises:
        RequestError: a value is out of range, or two of them contradict each other.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        as_count(self.max_tokens, "max_tokens", least=1, error=RequestError)
        as_count(self.min_tokens, "min_tokens", error=RequestError)
        as_count(self.n, "n", least=1, error=RequestError)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})")
        if self.temperature < 0:
            raise RequestError(f"temperature must not be negative, got {self.temperature}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
