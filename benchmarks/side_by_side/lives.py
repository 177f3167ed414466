"""Lives: which space each of them has, and how many calls. All of it follows from the seed and the life's number.

The spaces are those that the state machine drives (:mod:`tests.space.mixes`): every mix in each of its six sizes, which
have every eviction policy between them. What those leave alike is varied here: how many rows and tokens, whether events
are kept and how many, whether windows are shed.
"""

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from pagedkv import SlidingWindow, SpaceConfig
from tests.space.mixes import MIXES, Mix

__all__ = ["FEW_EVENTS", "MOST_PROMPT", "Life", "lives"]

NUM_SIZES: Final = 6
NUM_SPACES: Final = len(MIXES) * NUM_SIZES
MOST_CALLS: Final = 500
"""Of one life: what differs late in a life is long to read."""
FEW_EVENTS: Final = 12
MORE_BLOCKS: Final = 100
MOST_PROMPT: Final = 32
"""Tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class Life:
    """One space, and how long it is driven.

    Args:
        seed: of the whole run; number: of the life in it.
        num_calls: how many calls it has, at least.
    """

    seed: int
    number: int
    num_calls: int

    @property
    def mix(self) -> Mix:
        """Its groups."""
        return MIXES[self.number % len(MIXES)]

    def random(self) -> Random:
        """Make its source of random numbers, anew at each call."""
        return Random(f"{self.seed}, {self.number}")

    def config(self, random: Random) -> SpaceConfig:
        """Draw the configuration of its space."""
        size = self.number // len(MIXES) % NUM_SIZES
        mix = self.mix.roomy if random.random() < 0.2 else self.mix
        config = mix.config(size)
        return replace(
            config,
            num_blocks=self._with_scarce_windows(config.blocks_by_pool(), random),
            max_sequences=random.choice((6, 6, 12)),
            max_tokens=random.choice((40, 40, 80)),
            events=config.events or random.random() < 0.5,
            max_events=random.choice((FEW_EVENTS, config.max_events)),
            shed_windows=random.random() < 0.8,
        )

    def _with_scarce_windows(self, num_blocks: dict[str, int], random: Random) -> dict[str, int]:
        """Where windows can be replayed, mostly have them evicted before full attention is: room for one prompt."""
        if not self.mix.replays or random.random() < 0.2:
            return num_blocks
        room = sum(-(-MOST_PROMPT // group.block_size) for group in self.mix.groups if isinstance(group, SlidingWindow))
        return {"device": num_blocks["device"] + MORE_BLOCKS, "windows": room + 4}


def lives(seed: int, num_calls: int) -> list[Life]:
    """Divide so many calls among lives: every space once at least, and as often as any other."""
    rounds = math.ceil(num_calls / (NUM_SPACES * MOST_CALLS))
    num_lives = rounds * NUM_SPACES
    return [Life(seed, number, math.ceil(num_calls / num_lives)) for number in range(num_lives)]
