"""Bounds: the definition of a good answer. Goodput counts good answers alone (DistServe, OSDI 2024, section 2)."""

from dataclasses import dataclass
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.simulation.cost import CostModel

__all__ = ["Bounds"]

LONGEST_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The definition of a good answer.

    Args:
        ttft_s: most seconds from arrival to the first token; None: no bound.
        tpot_s: most seconds a token after the first one, as the mean of an answer; None: no bound.

    Raises:
        ConfigurationError: a bound is not positive, or longer than a day.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        """Check that each bound is possible by itself."""
        for name, seconds in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if seconds is not None and not 0 < seconds <= LONGEST_S:
                raise ConfigurationError(f"`{name}` must be over 0 and at most {LONGEST_S:,.0f} seconds, got {seconds}")

    def require_possible(self, name: str, costs: CostModel) -> None:
        """Refuse bounds that even a single request on an idle machine would exceed.

        Raises:
            ConfigurationError: a bound is too tight; the message has the seconds that the request takes.
        """
        least_s = costs.step_s(1, 1, 1, 1)
        for bound, seconds, what in (
            ("ttft_s", self.ttft_s, "the first token"),
            ("tpot_s", self.tpot_s, "each further token"),
        ):
            if seconds is not None and seconds < least_s:
                raise ConfigurationError(
                    f"`{bound}={seconds:g}` cannot be met: by the cost model {name} {what} takes at least "
                    f"{least_s:.4g} seconds, on an idle machine. Give a longer bound, or faster hardware"
                )

    @property
    def are_given(self) -> bool:
        """Whether there is any bound."""
        return self.ttft_s is not None or self.tpot_s is not None

    def as_dict(self) -> dict[str, float | None]:
        """Return the bounds for JSON."""
        return {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s}
