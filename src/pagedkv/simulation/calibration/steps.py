"""MeasuredSteps: the work of each measured step, and its seconds."""

from dataclasses import dataclass, field

import numpy as np

from pagedkv.contract.arrays import Float64Array, Int64Array
from pagedkv.errors import ConfigurationError

__all__ = ["MeasuredSteps"]


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSteps:
    """Steps of an engine, in the counts of :meth:`~pagedkv.simulation.cost.CostModel.step_s`.

    Args:
        seconds: float64 ``[steps]``, duration of each; all positive.
        num_new_tokens: int64 ``[steps]``, tokens computed.
        num_attended_pairs: int64 ``[steps]``, pairs of queries and keys; None: not counted.
        num_context_tokens: see :meth:`~pagedkv.simulation.cost.CostModel.step_s`.
        num_sequences: sequences with tokens, likewise.
        source: the kind of file from which the steps come, for users.
        notes: warnings about the steps, one sentence each.

    Raises:
        ConfigurationError: the arrays differ in length.
    """

    seconds: Float64Array
    num_new_tokens: Int64Array
    num_attended_pairs: Int64Array | None = None
    num_context_tokens: Int64Array | None = None
    num_sequences: Int64Array | None = None
    source: str = ""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check that there is one number for each step."""
        for name in ("num_new_tokens", "num_attended_pairs", "num_context_tokens", "num_sequences"):
            counts = getattr(self, name)
            if counts is not None and len(counts) != len(self.seconds):
                raise ConfigurationError(f"{name} has {len(counts)} steps, seconds {len(self.seconds)}: give one each")

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.seconds)

    def counts(self, name: str) -> Int64Array:
        """Return one of the counts; zeros if it was not counted."""
        counts: Int64Array | None = getattr(self, name)
        return np.zeros(len(self), np.int64) if counts is None else counts

    def chosen(self, places: Int64Array) -> "MeasuredSteps":
        """Return some of the steps, in the order of ``places``."""

        def of(counts: Int64Array | None) -> Int64Array | None:
            return None if counts is None else counts[places]

        return MeasuredSteps(
            self.seconds[places],
            self.num_new_tokens[places],
            of(self.num_attended_pairs),
            of(self.num_context_tokens),
            of(self.num_sequences),
            self.source,
            self.notes,
        )
