"""A router's decision, with all that it rests on: for the log, for an answer's header and for an inspector."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pagedkv.memory.routing.replica_index import IndexState

__all__ = ["Candidate", "Choice", "RoutingReason"]


class RoutingReason(StrEnum):
    """Why a replica was chosen."""

    MOST_CACHED = "it has most of the prompt"
    NOT_CACHED = "no replica has any of the prompt, and it has the least to do"
    LEAST_LOADED = "it has the least to do"
    SHORTER_QUEUE = "another has more of the prompt, and so much more to do that computing here is sooner"
    BALANCE = "a cheaper one has computed more than its share of late"
    ONLY = "it is the only one"
    IN_TURN = "it was its turn"


class Candidate(NamedTuple):
    """A replica as the router saw it. A named tuple, made in 0.4 us where a frozen dataclass takes 2.1.

    Args:
        name: the replica; state: how complete its index is.
        num_hit_tokens: tokens of the prompt that it has cached, or is promised to have.
        num_promised_tokens: those of them that no event has confirmed.
        num_prefill_tokens: tokens of prompts that it has to compute already; num_decoding: requests that decode there.
        recent_tokens: tokens computed of late.
        cost: what the router weighed, in tokens of prompts.
        is_over_share: whether it has computed more than its share of late.
    """

    name: str
    state: IndexState
    num_hit_tokens: int
    num_promised_tokens: int
    num_prefill_tokens: int
    num_decoding: int
    recent_tokens: float
    cost: float
    is_over_share: bool = False

    def __str__(self) -> str:
        promised = f", {self.num_promised_tokens:,} of them promised" if self.num_promised_tokens else ""
        state = "" if self.state is IndexState.EXACT else f", index {self.state}"
        over = ", over its share" if self.is_over_share else ""
        return (
            f"{self.name}: {self.num_hit_tokens:,} tokens cached{promised}{state}; {self.num_prefill_tokens:,} tokens "
            f"queued, {self.num_decoding} decoding; cost {self.cost:,.0f}{over}"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision.

    Args:
        replica: the chosen one; reason: why.
        num_prompt_tokens: of the request.
        candidates: all that were looked at, the chosen one first.
    """

    replica: str
    reason: RoutingReason
    num_prompt_tokens: int
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        """The chosen replica, as the router saw it."""
        return self.candidates[0]

    def explain(self) -> str:
        """Return the decision as text, a line a candidate."""
        head = f"{self.num_prompt_tokens:,} tokens go to {self.replica}: {self.reason}"
        return "\n".join([head, *(f"  {candidate}" for candidate in self.candidates)])
