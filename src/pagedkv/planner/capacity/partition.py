"""Requests divided among tenants or windows of time, to count hits by part beside the total."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.contract.arrays import Int32Array, Int64Array

__all__ = ["Partition"]


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One division of the requests of a trace.

    Args:
        kind: "tenant" or "window".
        names: names of the parts.
        numbers: int32 ``[num_requests]``, the part of each request.
    """

    kind: str
    names: Sequence[str]
    numbers: Int32Array

    def sums(self, values: Int32Array | Int64Array) -> Int64Array:
        """Add up a value of each request, by part. int64 ``[parts]``; O(requests)."""
        sums = np.bincount(self.numbers, weights=values, minlength=len(self.names))
        return sums.astype(np.int64)  # the weighted sums are floats, and exact below 2**53

    def counts(self) -> Int64Array:
        """Count the requests of each part. int64 ``[parts]``."""
        return np.bincount(self.numbers, minlength=len(self.names)).astype(np.int64)
