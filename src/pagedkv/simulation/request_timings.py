"""Times of each request under way, and the tokens that it must compute again, for the meters."""

from dataclasses import dataclass

from pagedkv.scheduling import Batch, Request

__all__ = ["RequestTiming", "RequestTimings"]


@dataclass(slots=True)
class RequestTiming:
    """One request.

    Args:
        arrival_s: time of arrival on the virtual clock.
        is_admitted: whether it was admitted before.
        has_first_token: whether its prompt was computed before.
        most_computed: most computed tokens of one of its sequences at a preemption by recompute.
    """

    arrival_s: float
    is_admitted: bool = False
    has_first_token: bool = False
    most_computed: int = 0


class RequestTimings:
    """The requests under way."""

    def __init__(self) -> None:
        self._of: dict[Request, RequestTiming] = {}
        self._recomputing: dict[Request, int] = {}

    def begin(self, request: Request, arrival_s: float) -> None:
        """Add a request."""
        self._of[request] = RequestTiming(arrival_s)

    def end(self, request: Request) -> RequestTiming:
        """Remove a request, and return its timing."""
        self._recomputing.pop(request, None)
        return self._of.pop(request)

    def __getitem__(self, request: Request) -> RequestTiming:
        """Return the timing of a request under way."""
        return self._of[request]

    def preempted(self, request: Request, num_computed_tokens: int) -> None:
        """Record that the computed tokens of a request are lost."""
        timing = self._of[request]
        timing.most_computed = max(timing.most_computed, num_computed_tokens)
        self._recomputing[request] = timing.most_computed

    def num_recomputed_tokens(self, batch: Batch) -> int:
        """Count the tokens of an unfinished batch that were computed before a preemption."""
        if not self._recomputing:
            return 0
        num_tokens = sum(
            max(0, min(chunk.stop, self._of[chunk.request].most_computed) - chunk.start) for chunk in batch.prefilling
        )
        for request, most_computed in self._recomputing.items():
            decodes = request.decoding is not None and request.decoding is batch.decoding
            if decodes and most_computed >= request.num_prompt_tokens + request.num_generated:
                num_tokens += request.num_sequences
        return num_tokens
