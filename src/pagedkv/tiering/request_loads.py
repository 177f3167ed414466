"""RequestLoads: the loads from tiers for one request, as notes and as tokens of its hits."""

from dataclasses import dataclass, field

from pagedkv.tiering.served_tier import ServedTier
from pagedkv.tiering.tier_reports import TierNote
from pagedkv.tiers import RunChain

__all__ = ["RequestLoads"]


@dataclass(slots=True, eq=False)
class RequestLoads:
    """The loads from tiers for one request so far.

    Args:
        chain: its runs.
        num_waits: loads that it waited for since its last admission.
        notes: a note for each range of tokens that tiers had: loaded, or why not.
        brought: tiers with the positions ``[start, end)`` that loads brought for it since its last admission.
        admitted_with: tiers with their tokens of the hit of its last admission.
        num_hit_tokens: tokens of its hits that tiers brought for it, by medium.
        num_hit_before: tokens of its hits before its last admission, by its receipt.
    """

    chain: RunChain
    num_waits: int = 0
    notes: list[TierNote] = field(default_factory=list)
    brought: list[tuple[ServedTier, int, int]] = field(default_factory=list)
    admitted_with: list[tuple[ServedTier, int]] = field(default_factory=list)
    num_hit_tokens: dict[str, int] = field(default_factory=dict)
    num_hit_before: int = 0

    def admitted(self, num_hit_tokens: int) -> None:
        """Note the tokens of the request's hit that each tier brought for it, and reset the counts of loads.

        Each token counts once. A later load begins where the hit on the device ended, so what earlier loads brought
        from there on had been evicted again.
        """
        self.admitted_with, limit = [], num_hit_tokens
        for tier, start, end in reversed(self.brought):
            if min(end, limit) > start:
                self.admitted_with.append((tier, min(end, limit) - start))
            limit = min(limit, start)
        self.admitted_with.reverse()
        self.brought.clear()
        self.num_waits = 0

    def computed(self) -> None:
        """Count the hit of the last admission, once a step that relies on it has been acknowledged."""
        for tier, count in self.admitted_with:
            tier.num_hit_tokens += count
            self.num_hit_tokens[tier.medium] = self.num_hit_tokens.get(tier.medium, 0) + count
        self.admitted_with.clear()
