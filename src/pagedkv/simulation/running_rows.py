"""The rows of all running sequences as arrays, for the meters; rebuilt only when a request starts or stops running."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.scheduling import Request

__all__ = ["RunningRows", "rows_of"]


@dataclass(frozen=True, slots=True, eq=False)
class RunningRows:
    """The running rows.

    Args:
        rows: int32 ``[sequences]``, grouped by request.
        num_rows: int32 ``[requests]``, sequences of each.
        num_final_tokens: tokens that all sequences will have at their end.
        num_power_tokens: the same, each rounded up to a power of two, as in a buddy allocator.
    """

    rows: Int32Array
    num_rows: Int32Array
    num_final_tokens: int
    num_power_tokens: int

    @property
    def has_branches(self) -> bool:
        """Whether a request has several sequences."""
        return len(self.rows) > len(self.num_rows)


def rows_of(running: Sequence[Request]) -> RunningRows:
    """Collect the rows of running requests."""
    return RunningRows(
        rows=np.array([row for request in running for row in request.rows], np.int32),
        num_rows=np.array([len(request.rows) for request in running], np.int32),
        num_final_tokens=sum(len(request.rows) * request.most_tokens for request in running),
        num_power_tokens=sum(len(request.rows) << (request.most_tokens - 1).bit_length() for request in running),
    )
