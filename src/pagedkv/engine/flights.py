"""Flight: a step that was launched and is not finished; Finished: counts of finished steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.engine.answering import Sampling
from pagedkv.engine.sampled_rows import SampledRow
from pagedkv.scheduling import Batch

__all__ = ["Finished", "Flight"]


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was launched and is not finished.

    Args:
        batch: the step; rows: the rows to be sampled, in the batch's order.
        places: places of the rows that were sampled, without answers that had ended; None: all of them.
        sampling: the sampled tokens; None: no row was sampled.
    """

    batch: Batch
    rows: Sequence[SampledRow]
    places: list[int] | None = None
    sampling: Sampling | None = None


class Finished(NamedTuple):
    """Counts of finished steps: requests that ended, and drafts that were accepted."""

    num_requests: int = 0
    num_accepted: int = 0

    def plus(self, other: "Finished") -> "Finished":
        """Add the counts of another step."""
        return Finished(self.num_requests + other.num_requests, self.num_accepted + other.num_accepted)
