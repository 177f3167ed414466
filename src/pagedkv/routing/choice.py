"""Choice: a router's decision with its reason and all its inputs, for the log, a response's header and the pages."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pagedkv.routing.replica_index import IndexState

__all__ = ["Candidate", "Choice", "RoutingReason"]


class RoutingReason(StrEnum):
    """Why a replica was chosen."""

    MOST_CACHED = "it has most of the prompt"
    NOT_CACHED = "no replica has any of the prompt, and it has the least to do"
    LEAST_LOADED = "it has the least to do"
    SHORTER_QUEUE = "another has more of the prompt, but its queue would take longer than computing the prompt here"
    BALANCE = "the replica of least cost has computed more than its share recently"
    ONLY = "it is the only one"
    ONLY_LEFT = "no other replica can take it now"
    UNAVAILABLE = "a replica with more of the prompt cannot take it now"
    IN_TURN = "it was its turn"


class Candidate(NamedTuple):
    """A replica's state when the router chose. A named tuple is made in 0.4 us, a frozen dataclass in 2.1.

    Args:
        name: the replica.
        state: how complete its index is.
        num_hit_tokens: tokens of the prompt that are cached there, or promised.
        num_promised_tokens: hit tokens that no event has confirmed yet.
        num_prefill_tokens: prompt tokens of outstanding requests that are still to be computed there.
        num_decoding: outstanding requests that have their first token.
        recent_tokens: recently computed tokens, weighted by age.
        cost: the cost that the router compared, in prompt tokens.
        is_over_share: whether it has recently computed more than its share.
        tier_tokens: further tokens of the prompt that it can load, by medium, the fastest first.
        credit: hit and loadable tokens, weighted by medium, which the cost counts as done.
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
    tier_tokens: tuple[tuple[str, int], ...] = ()
    credit: float = 0.0

    def __str__(self) -> str:
        promised = f", {self.num_promised_tokens:,} of them promised" if self.num_promised_tokens else ""
        state = "" if self.state is IndexState.EXACT else f", index {self.state}"
        tiers = "".join(f", {count:,} in {medium}" for medium, count in self.tier_tokens)
        over = ", over its share" if self.is_over_share else ""
        return (
            f"{self.name}: {self.num_hit_tokens:,} tokens cached{promised}{tiers}{state}; "
            f"{self.num_prefill_tokens:,} tokens queued, {self.num_decoding} decoding; cost {self.cost:,.0f}{over}"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision.

    Args:
        replica: the chosen replica.
        reason: why it was chosen.
        num_prompt_tokens: tokens of the request's prompt.
        candidates: all replicas that were compared, the chosen one first.
        passed_over: the others, by name, each with the reason why it was not compared, if the caller has named them.
    """

    replica: str
    reason: RoutingReason
    num_prompt_tokens: int
    candidates: tuple[Candidate, ...]
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def chosen(self) -> Candidate:
        """The chosen replica's state when the router chose."""
        return self.candidates[0]

    def explain(self) -> str:
        """Return the decision as text, with a line for each replica."""
        head = f"{self.num_prompt_tokens:,} tokens go to {self.replica}: {self.reason}"
        others = (f"  {name}: passed over, {reason}" for name, reason in self.passed_over)
        return "\n".join([head, *(f"  {candidate}" for candidate in self.candidates), *others])
