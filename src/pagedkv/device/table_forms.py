"""The forms of block tables that kernels read: pages of a kernel's block size, lists of pages, blocks of states.

They are a few tensor operations per group; none of them reads a number back from the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagedkv.contract.space_config import SpaceConfig
from pagedkv.contract.spec import keeps_state
from pagedkv.device.shapes import PageNumbers
from pagedkv.device.table_arrays import SpaceTables


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
