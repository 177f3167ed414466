"""HostTables: a copy of the device's block tables on the host, used only while swaps run concurrently with steps.

Recording a plan appends it to a list. Its entries are written into the tables when they are needed, or when many plans
are recorded.
"""

from typing import Final, final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.device.space_tables import SpaceTables

__all__ = ["HostTables"]

MOST_WAITING: Final = 256


@final
class HostTables:
    """All tables, by row.

    Args:
        tables: the tables of the space.
        max_rows: number of rows.
    """

    def __init__(self, tables: SpaceTables, max_rows: int) -> None:
        widths = (*tables.widths, *(num_slots for _, num_slots in tables.slots_of.values()))
        self._tables: list[Int32Array] = [np.zeros((max_rows, width), np.int32) for width in widths]
        self._block_sizes = tables.block_sizes
        self._slots_of = {group: table for group, (table, _) in tables.slots_of.items()}
        self._waiting: list[StepPlan] = []

    def note(self, plan: StepPlan) -> None:
        """Record a plan that is executed."""
        self._waiting.append(plan)
        if len(self._waiting) > MOST_WAITING:
            self._apply()

    def written_by(self, plan: StepPlan, group: int) -> Int32Array:
        """List the blocks of a group that a plan's forward pass writes, or may write if tokens are unknown.

        The plan must be recorded. Cost: O(ranges + blocks), and O(entries) of the plans not yet written to the tables.
        """
        self._apply()
        ranges, size = plan.compute_in(group), self._block_sizes[group]
        num_unknown = 0 if plan.unknown is None else plan.unknown.counts
        first = np.maximum(ranges.starts - num_unknown, 0) // size
        counts = np.maximum((ranges.ends + size - 1) // size - first, 0)
        rows = np.repeat(ranges.rows, counts)
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        written: Int32Array = self._tables[group][rows, index]
        if group in self._slots_of and plan.draft_states is not None:
            written = np.concatenate([written, self._tables[self._slots_of[group]][ranges.rows].ravel()])
        return written

    def _apply(self) -> None:
        for plan in self._waiting:
            for writes in plan.table_writes:
                rows = np.repeat(writes.rows, writes.counts)
                before = np.cumsum(writes.counts) - writes.counts
                index = np.arange(len(rows)) - np.repeat(before - writes.starts, writes.counts)
                self._tables[writes.group][rows, index] = writes.block_ids
        self._waiting.clear()
