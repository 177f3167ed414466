"""CacheIntent: a caller's wishes for a request's content: the charged tenant, how long it is kept, what others may hit.

An intent changes no token. The scheduler passes it to the block space with the request's blocks, and again when the
request ends. A request without an intent has :data:`NO_INTENT`.

Leases are durations, not times: a caller does not have the clock of the space, and a lease begins when its content is
computed, or hit again, at a time that is not known in advance.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from pagedkv.contract.arguments import as_count, as_number
from pagedkv.errors import RequestError

__all__ = ["LONGEST_LEASE_S", "NO_INTENT", "Breakpoint", "CacheIntent", "PublishLimit"]

PublishLimit: TypeAlias = Literal["all", "prompt", "none"]
"""Which tokens of a request others may hit: prompt and answer, the prompt alone, or none."""

MOST_BREAKPOINTS: Final = 4  # the limit of OpenAI's and Anthropic's APIs
LONGEST_LEASE_S: Final = 2.0**32


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Leading tokens of a prompt that are leased once they are computed.

    Args:
        num_tokens: number of tokens; rounded down to where a later prompt can hit in all groups.
        keep_for_s: duration of the lease in seconds. Each hit that includes all these tokens renews it.

    Raises:
        RequestError: ``num_tokens`` is below 1, or ``keep_for_s`` is not positive.
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
        tenant: the tenant that is charged for its blocks; None: the unnamed tenant.
        keep_for_s: seconds for which its content is leased when it ends; None: no lease.
        breakpoints: at most 4 places in its prompt, up to which tokens are leased when they are computed.
        retention: 1: its content is evicted after all other unleased content; -1: before all other content.
        publish: which of its tokens others may hit.

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
