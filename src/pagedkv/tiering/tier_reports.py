"""Reports of tiers, for one request and in total: values for outputs, explanations and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pagedkv.tiers import StoreStatistics

__all__ = ["LoadUnderWay", "TierCause", "TierNote", "TierStatistics"]


class TierCause(StrEnum):
    """Why content of a tier was or was not loaded."""

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
    """Tokens of a prompt that a tier had, or could have had, and whether they were loaded.

    Args:
        tier: name of the tier.
        start, end: positions ``[start, end)``; both 0 if the tier was out of service and so was not looked up.
        cause: loaded, or why not.
        seconds: time that the request waited for them; 0.0 if it did not.
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
    """A load from a tier that is under way.

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
        num_loads: loads with entries of this tier.
        num_loaded_tokens: tokens loaded from it.
        num_hit_tokens: of these, tokens that were then hit by a request that had waited for them: the sum of
            ``RequestOutput.num_loaded_tokens`` of this medium over all requests.
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
        """Tokens loaded from it that no request has hit of those that waited for them."""
        return self.num_loaded_tokens - self.num_hit_tokens
