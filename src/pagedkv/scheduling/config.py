"""What callers set: SchedulingConfig, the limits of a step; CacheIntent, the wishes for the content of a request.

An intent changes no token. It says which tenant is charged, how long content is kept, and what others may hit. The
scheduler passes it to the block space with the request's blocks, and again when the request ends. A request without an
intent has :data:`NO_INTENT`.

Leases are durations, not times: a caller does not have the clock of the space, and a lease begins when its content is
computed, or hit again, at a time that is not known in advance.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from pagedkv.contract.arguments import as_count, as_flag, as_number
from pagedkv.errors import ConfigurationError, RequestError

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
            :mod:`~pagedkv.scheduling.admitting`.
        most_drafts: most drafts of a sequence in a step; 0: no drafts. See :mod:`~pagedkv.scheduling.growing`.
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
