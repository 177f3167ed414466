"""Flight: a step that was launched and is not finished, and what finishing it changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.memory.scheduling import Batch
from pagedkv.serving.engine.answering import Sampling
from pagedkv.serving.engine.sampled_rows import SampledRow

__all__ = ["Finished", "Flight"]


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was launched and is not finished.

    Args:
        batch: the step; rows: those that it samples, in the batch's order.
        places: which of the rows were sampled, since others ended before; None: all of them.
        sampling: what was drawn; None: nothing was to be sampled.
    """

    batch: Batch
    rows: Sequence[SampledRow]
    places: list[int] | None = None
    sampling: Sampling | None = None


class Finished(NamedTuple):
    """What finished steps changed: requests that ended, and drafts that were right."""

    num_requests: int = 0
    num_accepted: int = 0

    def plus(self, other: "Finished") -> "Finished":
        """Add what another step changed."""
        return Finished(self.num_requests + other.num_requests, self.num_accepted + other.num_accepted)
