"""The rows of all running sequences as arrays, for the meters: made anew only when somebody comes or goes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.core.blocks import Int32Array
from pagedkv.replay.serving.job import Job

__all__ = ["RunningRows", "rows_of"]


@dataclass(frozen=True, slots=True, eq=False)
class RunningRows:
    """Who runs.

    Args:
        rows: int32 ``[sequences]``, request by request.
        num_rows: int32 ``[requests]``, sequences of each.
        num_final_tokens: tokens that all sequences will have in the end.
        num_power_tokens: the same, each rounded up to a power of two, as a buddy allocator does.
    """

    rows: Int32Array
    num_rows: Int32Array
    num_final_tokens: int
    num_power_tokens: int

    @property
    def has_branches(self) -> bool:
        """Whether a request has several sequences."""
        return len(self.rows) > len(self.num_rows)


def rows_of(running: Sequence[Job]) -> RunningRows:
    """Collect the rows of running jobs."""
    return RunningRows(
        rows=np.array([row for job in running for row in job.rows], np.int32),
        num_rows=np.array([len(job.rows) for job in running], np.int32),
        num_final_tokens=sum(len(job.rows) * job.final_length for job in running),
        num_power_tokens=sum(len(job.rows) << (job.final_length - 1).bit_length() for job in running),
    )
