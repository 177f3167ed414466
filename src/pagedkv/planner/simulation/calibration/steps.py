"""MeasuredSteps: what each step computed, and how long it took. A value; knows no file and no model."""

from dataclasses import dataclass, field

import numpy as np

from pagedkv.memory.contract.arrays import Float64Array, Int64Array
from pagedkv.memory.contract.errors import ConfigurationError

__all__ = ["MeasuredSteps"]


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSteps:
    """Steps of an engine, in counts that :meth:`~pagedkv.planner.simulation.cost.CostModel.step_s` takes.

    Args:
        seconds: float64 ``[steps]``, how long each took; all positive.
        num_new_tokens: int64 ``[steps]``, tokens computed.
        num_attended_pairs: int64 ``[steps]``, or None if they were not counted; likewise the next two.
        num_context_tokens: see :meth:`~pagedkv.planner.simulation.cost.CostModel.step_s`.
        num_sequences: likewise.
        told_by: description of the source.
        notes: what a reader must know about them, one sentence each.

    Raises:
        ConfigurationError: arrays of different lengths.
    """

    seconds: Float64Array
    num_new_tokens: Int64Array
    num_attended_pairs: Int64Array | None = None
    num_context_tokens: Int64Array | None = None
    num_sequences: Int64Array | None = None
    told_by: str = ""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check that there is one number for each step."""
        for name in ("num_new_tokens", "num_attended_pairs", "num_context_tokens", "num_sequences"):
            counts = getattr(self, name)
            if counts is not None and len(counts) != len(self.seconds):
                raise ConfigurationError(f"{name} has {len(counts)} steps, seconds {len(self.seconds)}: give one each")

    def __len__(self) -> int:
        """Count the steps."""
        return len(self.seconds)

    def counts(self, name: str) -> Int64Array:
        """Give one of the counts; zeros if it was not counted."""
        counts: Int64Array | None = getattr(self, name)
        return np.zeros(len(self), np.int64) if counts is None else counts

    def chosen(self, places: Int64Array) -> "MeasuredSteps":
        """Give some of the steps, in the order of ``places``."""

        def of(counts: Int64Array | None) -> Int64Array | None:
            return None if counts is None else counts[places]

        return MeasuredSteps(
            self.seconds[places],
            self.num_new_tokens[places],
            of(self.num_attended_pairs),
            of(self.num_context_tokens),
            of(self.num_sequences),
            self.told_by,
            self.notes,
        )
