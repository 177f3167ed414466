"""Epochs in the simulated memory: every slot has a label of the weights that wrote it and of the oldest before it.

The rule, written from the promise alone: what a step computes is labelled ``(oldest, epoch)``. ``epoch`` is the one in
force when the step was planned; ``oldest`` is the oldest label of the position before, or that epoch at the beginning:
keys and values are computed from all that came before them. Copies and swaps carry labels along. A hit rests on nothing
older than ``max_epoch_lag`` epochs before the one in force when the sequence began.

What a failed step left, and the caller then declares computed, is in doubt: it may be of the failed step's weights or
of those in force. Its label is the weakest of both: the younger ``oldest``, the older ``epoch``.
"""

from collections.abc import Iterable
from typing import Final, TypeAlias

from tests.space.sequence_model import GroupRule

__all__ = ["NO_LABEL", "EpochLabels", "Label"]

Label: TypeAlias = tuple[int, int]
NO_LABEL: Final[Label] = (10**9, -1)


class EpochLabels:
    """The labels of all slots, by label of the pool, block and offset.

    Attributes:
        is_doubted: whether any label was ever in doubt, so that epochs cannot be compared exactly.
    """

    def __init__(self, groups: list[GroupRule]) -> None:
        """Start without labels."""
        self.groups = [group for group in groups if not group.stays_out]
        self._labels: dict[tuple[str, int], dict[int, Label]] = {}
        self.is_doubted = False
        self._coming: list[tuple[int, tuple[str, int, int], Label]] = []

    def at(self, pool: str, block: int, offset: int) -> Label:
        """The label of a slot."""
        return self._labels.get((pool, block), {}).get(offset, NO_LABEL)

    def write(self, pool: str, block: int, offset: int, label: Label) -> None:
        """Label a slot that was written."""
        self._labels.setdefault((pool, block), {})[offset] = label

    def bring(self, step_id: int, slot: tuple[str, int, int], label: Label) -> None:
        """Label a slot that the caller writes after a step, perhaps with other weights."""
        self._coming.append((step_id, slot, label))

    def doubt(self, slot: tuple[str, int, int], other: Label) -> None:
        """A slot may as well have another label than its own."""
        oldest, newest = self.at(*slot)
        self.is_doubted |= (oldest, newest) != other
        self.write(*slot, (max(oldest, other[0]), min(newest, other[1])))

    def arrive(self, first_step_id: int) -> None:
        """Write the labels of what comes after steps before this one."""
        while self._coming and self._coming[0][0] < first_step_id:
            _, slot, label = self._coming.pop(0)
            self.write(*slot, label)

    def move(self, moves: Iterable[tuple[tuple[str, int], tuple[str, int]]]) -> None:
        """Blocks are copied or swapped, all at once."""
        read = [(target, dict(self._labels.get(source, {}))) for source, target in moves]
        self._labels.update(read)

    def of(self, group: GroupRule, table: list[int], position: int, pool: str | None = None) -> Label:
        """The label of a position of a sequence in a group that holds it."""
        index, offset = group.slot(position)
        return self.at(pool or group.pool, table[index], offset)

    def oldest_before(self, tables: list[list[int]], starts: list[int], position: int) -> int:
        """Return the oldest epoch that a position continues; a large number at the beginning.

        Groups that compute the position before as well are left out.
        """
        oldest = NO_LABEL[0]
        for group in self.groups:
            if starts[group.index] < position:
                continue
            table = tables[group.index]
            index = (position - 1) // group.block_size
            if position > 0 and index < len(table) and table[index]:
                oldest = min(oldest, self.of(group, table, position - 1)[0])
        return oldest

    def compute(self, ranges: list[tuple[list[list[int]], list[int], int, int]], epoch: int) -> None:
        """A step computes positions ``[start, end)`` of sequences with these tables; some continue what others do.

        In each group it begins at a start of its own.
        """
        for tables, starts, start, end in sorted(ranges, key=lambda computed: computed[2]):
            oldest = min(epoch, self.oldest_before(tables, starts, start))
            for group in self.groups:
                for position in group.written(starts[group.index], end) if starts[group.index] < end else ():
                    index, offset = group.slot(position)
                    self.write(group.pool, tables[group.index][index], offset, (oldest, epoch))
