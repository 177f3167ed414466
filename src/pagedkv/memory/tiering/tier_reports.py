"""What tiers did for a request, and for all of them: values, for outputs, explanations and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pagedkv.memory.tiers import StoreStatistics

__all__ = ["LoadUnderWay", "TierCause", "TierNote", "TierStatistics"]


class TierCause(StrEnum):
    """What became of content that a tier had."""

    LOADED = "loaded"
    FASTER = "computing was faster"
    TOO_SLOW = "too slow"
    CORRUPT = "corrupt"
    GONE = "gone"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    OUT_OF_SERVICE = "out of service"
    NO_BLOCKS = "no free blocks"
    GAVE_WAY = "gave way to running requests"


@dataclass(frozen=True, slots=True)
class TierNote:
    """Tokens of a prompt that a tier had, or that it could have had, and what became of them.

    Args:
        tier: name of the tier.
        start, end: positions ``[start, end)``; both 0 where the tier was out of service, so that it was not asked.
        cause: what became of them.
        seconds: how long the request waited for them; 0.0 if it did not.
    """

    tier: str
    start: int
    end: int
    cause: TierCause
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.end:
            return f"tier {self.tier}: {self.cause}"
        waited = f" after {self.seconds:.3g} s" if self.seconds else ""
        return f"tokens {self.start:,} to {self.end:,} were in tier {self.tier}: {self.cause}{waited}"


@dataclass(frozen=True, slots=True)
class LoadUnderWay:
    """What a tier is asked for now.

    Args:
        tier: name of the tier.
        start, end: positions ``[start, end)`` of the tokens.
        num_requests: requests that wait for them.
    """

    tier: str
    start: int
    end: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One tier at one moment; counts are since the engine was built.

    Args:
        name, medium: which tier.
        num_loads: loads that it took part in.
        num_loaded_tokens: tokens that it brought.
        num_hit_tokens: of these, tokens that the request hit which had waited for them. The sum over all requests of
            ``RequestOutput.num_loaded_tokens`` of this medium.
        not_loaded: tokens that it had and that were not loaded, by cause.
        num_offered_runs: entries that were offered to it.
        store: its store. New weights begin another store.
    """

    name: str
    medium: str
    num_loads: int
    num_loaded_tokens: int
    num_hit_tokens: int
    not_loaded: Mapping[TierCause, int]
    num_offered_runs: int
    store: StoreStatistics

    @property
    def num_unused_tokens(self) -> int:
        """Tokens that it brought and that no request which waited for them has hit."""
        return self.num_loaded_tokens - self.num_hit_tokens
