"""Kills: the times at which replicas are killed, and the delay until new ones replace them.

A replica is killed between two steps: at its time, or at the end of the step that runs then. The router notices it
after a delay, and after all messages that the replica had sent, as when a connection breaks. The requests are routed
again. After ``restart_s`` a new replica joins under the old name, with a new lifetime and an empty cache.
"""

from dataclasses import dataclass
from random import Random

from pagedkv.contract.arguments import as_count, as_number
from pagedkv.errors import ConfigurationError

__all__ = ["Kills"]


@dataclass(frozen=True, slots=True)
class Kills:
    """A schedule of kills.

    Args:
        at: pairs of seconds and the name of a replica; None instead of a name: a running replica, at random.
        restart_s: seconds until a new replica joins, after the router has noticed the kill.
        seed: determines which replicas are killed at random.

    Raises:
        ConfigurationError: a time is negative.

    >>> Kills(((3.0, "r1"), (5.0, None)), restart_s=2.0).at
    ((3.0, 'r1'), (5.0, None))
    """

    at: tuple[tuple[float, str | None], ...] = ()
    restart_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            any(as_number(at_s, "the time of a kill") < 0 for at_s, _ in self.at)
            or as_number(self.restart_s, "restart_s") < 0
        ):
            raise ConfigurationError(f"times of kills and restart_s must be 0 or more, got {self.at}, {self.restart_s}")

    @classmethod
    def at_random(cls, number: int, mean_s: float, *, restart_s: float = 1.0, seed: int = 0) -> "Kills":
        """Draw ``number`` kills, ``mean_s`` seconds apart in the mean, each independent of all others.

        Raises ConfigurationError: a number is negative, or ``mean_s`` is not above 0.
        """
        as_count(number, "the number of kills")
        if as_number(mean_s, "mean_s") <= 0:
            raise ConfigurationError(f"mean_s must be above 0, got {mean_s}")
        random, at_s, times = Random(seed), 0.0, []  # noqa: S311 - of a simulation
        for _ in range(number):
            at_s += random.expovariate(1 / mean_s)
            times.append((at_s, None))
        return cls(tuple(times), restart_s, seed)
