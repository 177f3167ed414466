"""What a caller can say about a request's content: the tenant that is charged, how long it is kept, who may hit it.

An intent changes no token. It reaches the block space with the request's blocks, and again when the request ends.
:class:`NO_INTENT` is the intent of a request without one.

Leases are given as durations. A caller does not have the clock of the space, and a lease begins when its content is
computed, or hit again, which no caller can date beforehand.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from pagedkv.memory.contract.arguments import as_count, as_number
from pagedkv.memory.contract.errors import RequestError

__all__ = ["LONGEST_LEASE_S", "NO_INTENT", "Breakpoint", "CacheIntent", "PublishLimit"]

PublishLimit: TypeAlias = Literal["all", "prompt", "none"]
"""What other requests may hit of a request: prompt and answer, its prompt, or nothing."""

MOST_BREAKPOINTS: Final = 4  # as many as the APIs of OpenAI and Anthropic take
LONGEST_LEASE_S: Final = 2.0**32


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Leading tokens of a prompt that are leased once they are computed.

    Args:
        num_tokens: how many; rounded down to where a later prompt can hit in all groups.
        keep_for_s: seconds from then on. Each hit of a request through all of these tokens begins them anew.

    Raises:
        RequestError: not at least 1 token, or no positive number of seconds.
    """

    num_tokens: int
    keep_for_s: float

    def __post_init__(self) -> None:
        """Check the values."""
        num_tokens = as_count(self.num_tokens, "num_tokens of a breakpoint", least=1, error=RequestError)
        object.__setattr__(self, "num_tokens", num_tokens)
        object.__setattr__(self, "keep_for_s", as_duration(self.keep_for_s, "keep_for_s of a breakpoint"))


@dataclass(frozen=True, slots=True)
class CacheIntent:
    """The part of an intent that the scheduler passes on to the block space.

    Args:
        tenant: the tenant that is charged for its blocks; None: the unnamed one.
        keep_for_s: seconds for which what it leaves is leased when it ends; None: no lease.
        breakpoints: at most 4 places of its prompt, whose tokens are leased when they are computed.
        retention: 1: what it leaves is evicted after all other unleased content; -1: before all other content.
        publish: what others may hit of it.

    Raises:
        RequestError: a value is out of range, or ``keep_for_s`` and ``retention`` are both given.
    """

    tenant: str | None = None
    keep_for_s: float | None = None
    breakpoints: tuple[Breakpoint, ...] = ()
    retention: int = 0
    publish: PublishLimit = "all"

    def __post_init__(self) -> None:
        """Check the values."""
        if self.tenant is not None and (not isinstance(self.tenant, str) or not self.tenant):
            raise RequestError(f"tenant must be a name, or None, got {self.tenant!r}")
        if self.keep_for_s is not None:
            object.__setattr__(self, "keep_for_s", as_duration(self.keep_for_s, "keep_for_s"))
        places = tuple(self.breakpoints) if isinstance(self.breakpoints, tuple | list) else (self.breakpoints,)
        if len(places) > MOST_BREAKPOINTS or not all(isinstance(place, Breakpoint) for place in places):
            raise RequestError(f"breakpoints must be at most {MOST_BREAKPOINTS} Breakpoints, got {self.breakpoints!r}")
        object.__setattr__(self, "breakpoints", places)
        retention = as_count(self.retention, "retention", least=-1, most=1, error=RequestError)
        object.__setattr__(self, "retention", retention)
        if self.keep_for_s is not None and retention:
            raise RequestError("keep_for_s and retention exclude each other: give one")
        if not isinstance(self.publish, str) or self.publish not in get_args(PublishLimit):
            raise RequestError(f"publish must be one of {', '.join(get_args(PublishLimit))}, got {self.publish!r}")


def as_duration(value: object, what: str) -> float:
    """Check the length of a lease. Raises RequestError."""
    seconds = as_number(value, what, RequestError)
    if not 0 < seconds <= LONGEST_LEASE_S:
        raise RequestError(f"{what} must be seconds, more than 0 and at most {LONGEST_LEASE_S:.0f}, got {value!r}")
    return seconds


NO_INTENT: Final = CacheIntent()
