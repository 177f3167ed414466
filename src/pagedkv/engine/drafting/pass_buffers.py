"""PassBuffers: the metadata of a draft model's passes, at fixed addresses, so that graphs can read it.

A pass has some rows of a step, and some of their tokens. These rows come first, and padding follows them::

    places    | row 1 | row 4 | row 5 |   -   |   -   |      ranges of the others are empty
    tokens    |   t   |   t   |   t   |   0 ...              slots of the others are -1: they are written nowhere
"""

from typing import Final, final

import numpy as np
import torch

from pagedkv.attention import GroupMetadata, StepMetadata
from pagedkv.contract.arrays import Int64Array
from pagedkv.device import BlockTables
from pagedkv.engine.drafting.passes import DraftPass
from pagedkv.engine.sampling.sending import sent

__all__ = ["PassBuffers"]

NO_SLOT: Final = -1


@final
class PassBuffers:
    """Tables, ranges and slots of one pass, in the groups of the draft model.

    Args:
        tables: block tables of all groups.
        first_group: the first group of the draft model; its groups are the last ones.
        max_places: most rows of a pass; max_tokens: most tokens of a pass that these buffers hold.

    Memory: a block table of ``max_places`` rows a group.
    """

    def __init__(self, tables: BlockTables, first_group: int, *, max_places: int, max_tokens: int) -> None:
        inputs = tables.inputs_of_all(max_places, max_tokens)
        self._of_step = StepMetadata.of(inputs, is_padded=True)
        self._first_group = first_group
        mine = self._of_step.groups[first_group:]
        self._tables = [torch.zeros_like(group.block_tables) for group in mine]
        self._slots = [torch.full_like(group.slot_mapping, NO_SLOT) for group in mine]
        first = mine[0]
        self._starts = torch.zeros_like(first.starts)
        self._ends = torch.zeros_like(first.seq_lens)
        self._offsets = torch.zeros_like(first.query_start_loc)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a pass that these buffers hold."""
        return self._of_step.num_tokens

    def metadata_of(self, num_tokens: int) -> StepMetadata:
        """Return the metadata of the pass that :meth:`put` copied last, padded to ``num_tokens`` tokens."""
        mine = [
            GroupMetadata(table, self._starts, self._ends, self._offsets, slots[:num_tokens])
            for table, slots in zip(self._tables, self._slots, strict=True)
        ]
        return StepMetadata(
            (*self._of_step.groups[: self._first_group], *mine), self._of_step.num_places, num_tokens, is_padded=True
        )

    def put(self, each: DraftPass, step: StepMetadata) -> None:
        """Copy a pass's part of a step's metadata into the buffers. The host does not wait.

        Cost: O(rows of the pass x width of a table + ``max_places`` + ``max_tokens``) on the device.
        """
        num_rows, num_tokens = len(each.places), len(each.tokens)
        columns = [each.places, each.tokens, *self._padded_ranges(each)]
        there = sent(torch.from_numpy(np.concatenate(columns)), self._tables[0].device)
        places, tokens, *ranges = torch.split(there, [len(column) for column in columns])
        for buffer, values in zip((self._starts, self._ends, self._offsets), ranges, strict=True):
            buffer.copy_(values)
        for table, slots, group in zip(self._tables, self._slots, step.groups[self._first_group :], strict=True):
            torch.index_select(group.block_tables, 0, places, out=table[:num_rows])
            slots.fill_(NO_SLOT)
            torch.index_select(group.slot_mapping, 0, tokens, out=slots[:num_tokens])

    def _padded_ranges(self, each: DraftPass) -> list[Int64Array]:
        """List the starts, ends and token offsets of all places; places after those of the pass have empty ranges."""
        num_places, num_rows = self._of_step.num_places, len(each.places)
        starts, ends = np.zeros(num_places, np.int64), np.zeros(num_places, np.int64)
        starts[:num_rows], ends[:num_rows] = each.starts, each.ends
        return [starts, ends, np.append(0, np.cumsum(ends - starts))]
