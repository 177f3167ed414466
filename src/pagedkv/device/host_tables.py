"""What the device's block tables say, kept on the host: asked only while blocks are swapped beside the steps.

A plan is noted for the price of an append to a list; its entries are put into the tables when somebody asks, or when
many plans wait.
"""

from typing import Final, final

import numpy as np

from pagedkv.arrays import Int32Array
from pagedkv.plan import StepPlan

__all__ = ["HostTables"]

MOST_WAITING: Final = 256


@final
class HostTables:
    """Tables of all groups, by row.

    Args:
        widths: entries of a row of each group; block_sizes: tokens of an entry; max_rows: rows.
    """

    def __init__(self, widths: tuple[int, ...], block_sizes: tuple[int, ...], max_rows: int) -> None:
        self._tables: list[Int32Array] = [np.zeros((max_rows, width), np.int32) for width in widths]
        self._block_sizes = block_sizes
        self._waiting: list[StepPlan] = []

    def note(self, plan: StepPlan) -> None:
        """Note that a plan is carried out."""
        self._waiting.append(plan)
        if len(self._waiting) > MOST_WAITING:
            self._apply()

    def written_by(self, plan: StepPlan, group: int) -> Int32Array:
        """List the blocks of a group that a plan's forward pass writes, or may write where tokens are unknown.

        The plan must have been noted. Cost: O(ranges + blocks), and O(entries) of the plans that wait.
        """
        self._apply()
        ranges, size = plan.compute_in(group), self._block_sizes[group]
        num_unknown = 0 if plan.unknown is None else plan.unknown.counts
        first = np.maximum(ranges.starts - num_unknown, 0) // size
        counts = np.maximum((ranges.ends + size - 1) // size - first, 0)
        rows = np.repeat(ranges.rows, counts)
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        written: Int32Array = self._tables[group][rows, index]
        return written

    def _apply(self) -> None:
        for plan in self._waiting:
            for writes in plan.table_writes:
                rows = np.repeat(writes.rows, writes.counts)
                before = np.cumsum(writes.counts) - writes.counts
                index = np.arange(len(rows)) - np.repeat(before - writes.starts, writes.counts)
                self._tables[writes.group][rows, index] = writes.block_ids
        self._waiting.clear()
