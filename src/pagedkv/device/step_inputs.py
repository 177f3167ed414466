"""The inputs of a step's attention kernels: views of arrays with fixed addresses, whose content changes each step.

A group's batch has the forms that kernels read: pages of a kernel's block size, lists of pages, blocks of states. They
are a few tensor operations per group; none of them reads a number back from the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagedkv.contract.arguments import as_count
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import StepId, keeps_state
from pagedkv.device.shapes import PageNumbers
from pagedkv.device.table_arrays import BLOCK_SIZE, SpaceTables, TableArrays
from pagedkv.device.tensors import require_numbers, require_tensor
from pagedkv.errors import ConfigurationError, TensorError


@dataclass(frozen=True, slots=True, eq=False)
class StateTable:
    """The states of a recurrent group, by place of the batch.

    Args:
        blocks: int32 ``[places, width]``.
        block_size: tokens of an entry.
        slots: int32 ``[places, num_draft_states]``: the second table; None if every state is advanced in place.
    """

    blocks: torch.Tensor
    block_size: int
    slots: torch.Tensor | None

    def block_after(self, places: torch.Tensor, positions: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Return the blocks of the states after some positions, which must not be negative.

        Args:
            places: int64 ``[n]``; positions: int64 ``[n]``.
            firsts: int32 ``[n]``: the first position of each place with a state in a slot.
        """
        index = (positions // self.block_size).clamp(max=self.blocks.shape[1] - 1)
        block = self.blocks[places, index]
        if self.slots is None:
            return block
        return torch.where(positions < firsts, block, self.slots[places, positions % self.slots.shape[1]])


def state_tables(config: SpaceConfig, tables: SpaceTables, views: Sequence[torch.Tensor]) -> dict[int, StateTable]:
    """Return the states of each recurrent group.

    Args:
        config: the space's configuration; tables: its tables.
        views: the tables by place of the batch, second tables included.
    """
    slots = {group: views[number] for group, (number, *_) in tables.slots_of.items()}
    return {
        group: StateTable(views[group], tables.block_sizes[group], slots.get(group))
        for group, spec in enumerate(config.groups)
        if keeps_state(spec)
    }


def page_table(blocks: torch.Tensor, numbers: PageNumbers) -> torch.Tensor:
    """Return the page numbers of some rows of a table.

    Args:
        blocks: int32 ``[places, width]``.
        numbers: the numbering of pages.

    Returns:
        int32 ``[places, width * numbers.per_block]``.
    """
    parts = torch.arange(numbers.per_block, dtype=torch.int32, device=blocks.device) * numbers.part_step
    return (blocks[:, :, None] * numbers.block_step + parts).flatten(1)


def page_list(
    table: torch.Tensor, lengths: torch.Tensor, max_pages: int, numbers: PageNumbers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """List the pages with tokens of each place, place after place (CSR).

    Args:
        table: int32 ``[at least places, width]``.
        lengths: int32 ``[places]``, tokens of each place.
        max_pages: most pages of all places.
        numbers: the numbering of pages.

    Returns:
        indptr int32 ``[places + 1]``, indices int32 ``[max_pages]`` (0 after the pages), last_page_len int32
        ``[places]``.
    """
    size, num_places, device = numbers.page_size, len(lengths), table.device
    counts = (lengths + size - 1) // size
    indptr = torch.zeros(num_places + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    page = torch.arange(max_pages, dtype=torch.int32, device=device)
    place = torch.searchsorted(indptr[1:], page, right=True).clamp(max=max(0, num_places - 1))
    which = page - indptr[place]
    block = table[place, (which // numbers.per_block).clamp(max=table.shape[1] - 1).long()]
    number = block * numbers.block_step + which % numbers.per_block * numbers.part_step
    indices = torch.where(page < indptr[-1], number, 0).to(torch.int32)
    return indptr, indices, torch.where(lengths > 0, (lengths - 1) % size + 1, 0).to(torch.int32)


class StateRanges(NamedTuple):
    """The ranges that a step computes in a recurrent group: int32 ``[places]`` each.

    Args:
        starts, ends: the range of each place.
        firsts: the first position of each place with a state in a slot.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    firsts: torch.Tensor


def state_blocks(table: StateTable, ranges: StateRanges) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block from which each place reads its state, and the block of its state at the end of its range.

    Returns:
        int32 ``[places]`` each; the null block is read at the beginning of a sequence.
    """
    starts, ends, firsts = ranges
    places = torch.arange(len(starts), device=starts.device)
    read, written = (table.block_after(places, (at.long() - 1).clamp(min=0), firsts) for at in (starts, ends))
    return torch.where(starts > 0, read, 0), torch.where(ends > 0, written, 0)


def state_writes(table: StateTable, ranges: StateRanges, offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return, for each position of the batch, the block to which the state after it is written.

    Args:
        offsets: int32 ``[places + 1]``, positions before each place.
        num_tokens: length of the result.

    Returns:
        int32 ``[num_tokens]``; the null block for states that are not kept, and after the positions.
    """
    starts, ends, firsts = ranges
    flat = torch.arange(num_tokens, device=starts.device)
    if len(starts) == 0:
        return flat.int() * 0
    place = torch.searchsorted(offsets[1:], flat, right=True, out_int32=False).clamp(max=len(starts) - 1)
    position = starts[place] + flat - offsets[place]
    first, end = firsts[place], ends[place]
    is_boundary = (position + 1) % table.block_size == 0
    is_kept = (position >= first) | is_boundary | (position + 1 == torch.minimum(first, end))
    block = table.block_after(place, position.clamp(min=0), first)
    return torch.where(is_kept & (flat < offsets[-1]), block, 0)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StepInputs:
    """Tables, slots and ranges of one step.

    A *place* is a row's rank among the rows that the step computes. The flat order has the positions of these rows one
    after another, place by place::

        place           0         1               2
        rows            4         7               9             numbers of the space
        flat order    | 12      | 0  1  2  3    | 8  9  |       positions
                        0         1  1  1  1      2  2          places

    Views are made on demand, since each takes two microseconds and a graph needs none.

    Args:
        step_id: the step.
        num_rows: used places of the batch.
        num_tokens: positions, including those refused later.
    """

    step_id: StepId
    num_rows: int
    num_tokens: int
    _arrays: TableArrays
    _batch_tables: tuple[torch.Tensor, ...]
    _state_tables: Mapping[int, StateTable]

    def __repr__(self) -> str:
        """Show only the sizes, since all steps share the arrays."""
        sizes = f"{self.num_rows} rows, {self.num_tokens} tokens, {len(self._batch_tables)} block tables"
        return f"StepInputs(step {self.step_id}: {sizes})"

    @property
    def rows(self) -> torch.Tensor:
        """The space's row at each place: int32 ``[num_rows]``."""
        return self._arrays.held_rows[0, : self.num_rows]

    def places(self, group: int = 0) -> torch.Tensor:
        """Return the place of each token in the flat order, then -1: int64 ``[max_batched_tokens]``.

        Args:
            group: the group that defines the order. The order differs between groups if a window is replayed, or if a
                group is outside prefix caching.

        Cost: O(max_batched_tokens x log rows), a few tensor operations. Raises ConfigurationError for an unknown group.
        """
        index = self._index_of(group)
        tokens = torch.arange(self._arrays.slots.shape[1], device=self._arrays.slots.device)
        places = torch.searchsorted(self.query_start_loc[index, 1:].long(), tokens, right=True)
        return torch.where(places < self.num_rows, places, -1)

    def positions(self, group: int = 0) -> torch.Tensor:
        """Return each token's position in its sequence, in the flat order, then -1: int64 ``[max_batched_tokens]``.

        Rotary embeddings use the first ``num_tokens`` entries. Refused tokens are accounted for on the device.
        Arguments, cost and errors are as of :meth:`places`.
        """
        index = self._index_of(group)
        places = self.places(index)
        if not self.num_rows:
            return places
        tokens = torch.arange(len(places), device=places.device)
        within = tokens - self.query_start_loc[index, places.clamp(min=0)]
        return torch.where(places >= 0, self.starts[index, places.clamp(min=0)] + within, -1)

    def _index_of(self, group: int) -> int:
        return as_count(group, "group", most=len(self._batch_tables) - 1)

    @property
    def block_tables(self) -> tuple[torch.Tensor, ...]:
        """For each group int32 ``[num_rows, width]``: block ids by place.

        Entries before a window, and after a row's last token, are null blocks, reserved blocks, or former entries:
        valid ids of blocks that other rows may use now. Kernels read up to ``seq_lens``. For kernels that read whole
        rows, and mask afterwards, use :meth:`padded_block_table`.
        """
        return tuple(table[: self.num_rows] for table in self._batch_tables)

    def padded_block_table(self, group: int) -> torch.Tensor:
        """Copy a group's block table, with null blocks after each row's last token: int32 ``[num_rows, width]``.

        It refers to no stale block, so masked products with weight zero are zero, not NaN. Cost: O(rows x width).
        Raises ConfigurationError for an unknown group.
        """
        index = self._index_of(group)
        table = self._batch_tables[index][: self.num_rows]
        num_tokens = torch.arange(table.shape[1], device=table.device) * self._arrays.geometry[index, BLOCK_SIZE]
        return torch.where(num_tokens < self.seq_lens[index][:, None], table, 0)

    @property
    def slot_mappings(self) -> torch.Tensor:
        """Slot of each position in the flat order, then -1: int64 ``[groups, max_batched_tokens]``."""
        return self._arrays.slots[: len(self._batch_tables)]

    @property
    def starts(self) -> torch.Tensor:
        """First position of each place: int32 ``[groups, num_rows]``."""
        return self._arrays.starts[: len(self._batch_tables), : self.num_rows]

    @property
    def seq_lens(self) -> torch.Tensor:
        """End of each place's positions, which is its length: int32 ``[groups, num_rows]``."""
        return self._arrays.seq_lens[: len(self._batch_tables), : self.num_rows]

    @property
    def query_start_loc(self) -> torch.Tensor:
        """Positions before each place in the flat order: int32 ``[groups, num_rows + 1]``."""
        return self._arrays.offsets[: len(self._batch_tables), : self.num_rows + 1]

    def state_blocks(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block from which each place reads a recurrent group's state, and the block of its final state.

        The final state is that at the end of the place's range. Draft states, and tokens refused by then, are accounted
        for on the device.

        Returns:
            int32 ``[num_rows]`` each; a place starting at 0 reads the null block.

        Raises:
            ConfigurationError: the group keeps no states.
        """
        table, ranges = self._states(group)
        return state_blocks(table, ranges)

    def state_writes(self, group: int) -> torch.Tensor:
        """Return, for each position in the flat order, the block to which the state after it is written.

        States of every draft, of every checkpoint, and of the last other position are written, so that one kernel can
        write them all.

        Returns:
            int32 ``[max_batched_tokens]``; the null block, to which no state is written, for other positions and after
            the last.

        Raises:
            ConfigurationError: the group keeps no states.
        """
        table, ranges = self._states(group)
        return state_writes(table, ranges, self.query_start_loc[group], self._arrays.slots.shape[1])

    def states_behind(self, group: int, places: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the blocks of the states after some positions, for steps that are computed in parts.

        Args:
            group: a group with states.
            places: int64 ``[n]``, places of the batch.
            positions: int64 ``[n]``, -1 before a sequence's first. Of the positions before a place's range, and of
                those in it that are not drafts, only the last one and checkpoints are allowed, since only their states
                are stored.

        Returns:
            int32 ``[n]``; the null block before a sequence's first.

        Raises:
            ConfigurationError: the group keeps no states. TensorError: tensors of another type, shape or device.
        """
        table, ranges = self._states(group)
        device = self._arrays.places.device
        for what, tensor in (("places", places), ("positions", positions)):
            require_tensor(tensor, what, dtype=torch.int64, shape=(None,), device=device)
        require_numbers(places, "places", self.num_rows)
        if len(places) != len(positions):
            raise TensorError(f"{len(places)} places need as many positions, got {len(positions)}")
        block = table.block_after(places, positions.clamp(min=0), ranges.firsts[places])
        return torch.where(positions >= 0, block, 0)

    def _states(self, group: int) -> tuple[StateTable, StateRanges]:
        if as_count(group, "group") not in self._state_tables:
            raise ConfigurationError(
                f"group {group} has no states: groups with states are {sorted(self._state_tables)}"
            )
        firsts = self._arrays.firsts[: self.num_rows]
        return self._state_tables[group], StateRanges(self.starts[group], self.seq_lens[group], firsts)
