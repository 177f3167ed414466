"""What tiers did for one request: its notes, and the tokens of its hits that they brought."""

from dataclasses import dataclass, field

from pagedkv.memory.tiering.served_tier import ServedTier
from pagedkv.memory.tiering.tier_reports import TierNote
from pagedkv.memory.tiers import RunChain

__all__ = ["RequestLoads"]


@dataclass(slots=True, eq=False)
class RequestLoads:
    """What tiers did for one request so far.

    Args:
        chain: its runs.
        num_asks: how often it waited since it was admitted last.
        notes: what became of what tiers had.
        brought: tokens that loads brought for it, by tier, since it was admitted last: positions.
        admitted_with: of the hit with which it was admitted last, tokens by the tier that brought them.
        num_hit_tokens: tokens of its hits that tiers brought for it, by medium.
        num_hit_before: tokens of the hits of its earlier lives, by its receipt.
    """

    chain: RunChain
    num_waits: int = 0
    notes: list[TierNote] = field(default_factory=list)
    brought: list[tuple[ServedTier, int, int]] = field(default_factory=list)
    admitted_with: list[tuple[ServedTier, int]] = field(default_factory=list)
    num_hit_tokens: dict[str, int] = field(default_factory=dict)
    num_hit_before: int = 0

    def admitted(self, num_hit_tokens: int) -> None:
        """Note how many tokens of the request's hit tiers have brought for it, and begin anew."""
        used = [(tier, min(end, num_hit_tokens) - start) for tier, start, end in self.brought]
        self.admitted_with = [(tier, count) for tier, count in used if count > 0]
        self.brought.clear()
        self.num_waits = 0

    def computed(self) -> None:
        """Count the hit with which the request was admitted last, once, since a step behind it was acknowledged."""
        for tier, count in self.admitted_with:
            tier.num_hit_tokens += count
            self.num_hit_tokens[tier.medium] = self.num_hit_tokens.get(tier.medium, 0) + count
        self.admitted_with.clear()
