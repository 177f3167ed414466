"""RequestsUnderWay: the requests of a replay from arrival to end, for live views: hits, their ends, preemptions."""

from collections.abc import ValuesView
from dataclasses import dataclass, replace
from typing import Final, final

from pagedkv.contract.answers import Explanation, Miss
from pagedkv.scheduling import Batch, Progress, Request
from pagedkv.space import BlockSpace, ObservedSpace, PrefixHit, SpaceObserver
from pagedkv.tiers.served import TierNote

SERVED: Final = "length"
REJECTED: Final = "rejected"


@final
@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """A request of a replay.

    Args:
        scheduled: the scheduler's record of it.
        num_sequences: its samples or beams.
        num_cached_tokens: tokens of its prompt that hit at its first admission; None before it.
        explanation: why no more of them hit, with all misses of its prompt; None before its first admission.
        finish_reason: "length" if it was served, "rejected" if it cannot be; None before its end.
    """

    scheduled: Request
    num_sequences: int
    num_cached_tokens: int | None = None
    explanation: Explanation | None = None
    finish_reason: str | None = None

    @property
    def number(self) -> int:
        """Its number."""
        return self.scheduled.number

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""
        return self.scheduled.num_preemptions

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all its answers."""
        num_each = self.scheduled.max_new_tokens if self.finish_reason == SERVED else self.scheduled.num_generated
        return num_each * self.num_sequences

    @property
    def tier_notes(self) -> tuple[TierNote, ...]:
        """Nothing: a replay counts by tier, not by request."""
        return ()


@final
class RequestsUnderWay(SpaceObserver):
    """Records the requests of one replay.

    Args:
        space: the replay's block space, which records explanations. It is observed from now on.
    """

    def __init__(self, space: BlockSpace) -> None:
        self._space = space
        self._requests: dict[Request, ReplayedRequest] = {}
        self._misses: list[tuple[Miss, ...]] = []
        space.observe(self)

    @property
    def requests(self) -> ValuesView[ReplayedRequest]:
        """The requests that wait or run, in the order of arrival."""
        return self._requests.values()

    # Moments of the space

    def begin(self, space: ObservedSpace) -> None:
        """Ask this view of the space."""
        self._observed = space

    def admitting(self, row: int, hit: PrefixHit) -> None:  # noqa: ARG002 - as in SpaceObserver
        """Record why a prompt's tokens do not hit, before blocks are evicted for it."""
        self._misses.append(self._observed.misses(hit))

    # Moments of the replay

    def arrived(self, request: Request) -> ReplayedRequest:
        """Record a request, and return its record."""
        made = self._requests[request] = ReplayedRequest(request, request.num_sequences)
        return made

    def rejected(self, request: Request) -> None:
        """Record that a request cannot be served."""
        self._requests.pop(request).finish_reason = REJECTED

    def scheduled(self, batch: Batch) -> None:
        """Record the hits of first admissions, and rejections."""
        misses, self._misses = self._misses, []
        for admission, own_misses in zip(batch.admitted, misses, strict=True):
            request = self._requests[admission.request]
            if request.num_cached_tokens is None:
                request.num_cached_tokens = admission.num_hit_tokens
                recorded = self._space.explanation(admission.request.rows[0])
                request.explanation = replace(recorded, misses=own_misses)
        for rejected in batch.rejected:
            self.rejected(rejected)

    def progressed(self, progress: Progress) -> None:
        """Record requests that were served."""
        for request in progress.finished:
            self._requests.pop(request).finish_reason = SERVED
