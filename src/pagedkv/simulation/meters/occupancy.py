"""Blocks live, cached and free: their peaks, and their means over time."""

from dataclasses import dataclass, field

__all__ = ["Level", "Occupancy"]


@dataclass(slots=True)
class Level:
    """A quantity over time.

    Args:
        peak: its largest value.
        weighted_sum: sum of value times weight; the weight is seconds, or 1 a step.
    """

    peak: int = 0
    weighted_sum: float = 0.0

    def hold(self, value: int, duration_s: float) -> None:
        """Add a duration with this value."""
        self.peak = max(self.peak, value)
        self.weighted_sum += value * duration_s

    def as_dict(self, total_s: float) -> dict[str, object]:
        """Return its mean over all seconds, and its peak."""
        return {"mean": self.weighted_sum / total_s if total_s else 0.0, "peak": self.peak}


@dataclass(slots=True)
class Occupancy:
    """The blocks of one pool: live (in tables), cached, and free without content."""

    live: Level = field(default_factory=Level)
    cached: Level = field(default_factory=Level)
    free: Level = field(default_factory=Level)

    def hold(self, num_live: int, num_cached: int, num_free: int, duration_s: float) -> None:
        """Add a duration with these numbers of blocks."""
        self.live.hold(num_live, duration_s)
        self.cached.hold(num_cached, duration_s)
        self.free.hold(num_free, duration_s)

    def as_dict(self, total_s: float) -> dict[str, object]:
        """Return the three levels for JSON."""
        return {
            "num_live": self.live.as_dict(total_s),
            "num_cached": self.cached.as_dict(total_s),
            "num_free": self.free.as_dict(total_s),
        }
