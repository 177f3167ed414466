"""What the inspector looks at: an engine, or a replay, which is an engine without a model.

Both have requests that one scheduler runs, and a block space. :class:`~pagedkv.engine.EngineCore` and
:class:`~pagedkv.engine.EngineRequest` have these attributes.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pagedkv.contract.answers import Explanation
from pagedkv.scheduling import Request
from pagedkv.space import BlockSpace
from pagedkv.tiers.served import LoadUnderWay, TierNote, TierStatistics

__all__ = ["BetweenSteps", "InspectedRequest", "MissedTokens", "ReplayState", "Subject"]

T = TypeVar("T")


class InspectedRequest(Protocol):
    """A request from its arrival to its end."""

    @property
    def number(self) -> int:
        """Its number, which no other request has."""
        ...

    @property
    def scheduled(self) -> Request:
        """The scheduler's record of it."""
        ...

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of its prompt that hit at its first admission; None before it."""
        ...

    @property
    def explanation(self) -> Explanation | None:
        """Why no more of them hit; None before its first admission, and for forks."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""
        ...

    @property
    def tier_notes(self) -> Sequence[TierNote]:
        """What became of what tiers had for it."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, one of ``history.STATES``; None before its end."""
        ...

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated for all its answers."""
        ...


class Subject(Protocol):
    """An engine, or a replay."""

    @property
    def requests(self) -> Collection[InspectedRequest]:
        """Requests that wait or run, in the order of arrival."""
        ...

    @property
    def space(self) -> BlockSpace:
        """The block space."""
        ...

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        """Take a snapshot of each tier."""
        ...

    def tier_loads(self) -> tuple[LoadUnderWay, ...]:
        """Return the loads from tiers that are under way."""
        ...


class BetweenSteps(Protocol):
    """Runs work of an event loop in the thread that runs the steps, between two of them."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run work there, and return what it returned. Raises EngineError where no step will follow."""
        ...


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Prompt tokens that did not hit.

    Args:
        cause: a kind of causes, in the report's words.
        num_tokens: how many.
    """

    cause: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReplayState:
    """A replay at one moment; the counts are those of its report.

    Args:
        speed: seconds of the trace for each second of this machine; None: as many as it can.
        is_paused: whether its time stands still.
        is_over: whether all requests have been served.
        num_requests, num_finished, num_rejected: requests that have arrived, that were served, and that cannot be.
        num_prompt_tokens, num_hit_tokens: of requests at their first admission.
        missed: their tokens that did not hit, by kind of cause.
    """

    speed: float | None
    is_paused: bool
    is_over: bool
    num_requests: int
    num_finished: int
    num_rejected: int
    num_prompt_tokens: int
    num_hit_tokens: int
    missed: tuple[MissedTokens, ...]
