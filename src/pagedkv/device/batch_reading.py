"""How kernels read a group's batch: in pages of their own size, as lists of pages, or a state at a time.

Plain tensor operations, a handful a group: none of them asks the device for a number.
"""

import torch

from pagedkv.device.paging import PageNumbers

__all__ = ["page_list", "page_table", "state_blocks"]


def page_table(blocks: torch.Tensor, numbers: PageNumbers) -> torch.Tensor:
    """Number the pages of some rows of a table.

    Args:
        blocks: int32 ``[places, width]``; numbers: how pages are numbered.

    Returns:
        int32 ``[places, width * pages a block]``.
    """
    parts = torch.arange(numbers.per_block, dtype=torch.int32, device=blocks.device) * numbers.part_step
    return (blocks[:, :, None] * numbers.block_step + parts).flatten(1)


def page_list(
    table: torch.Tensor, lengths: torch.Tensor, max_pages: int, numbers: PageNumbers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """List the pages that each place fills, one place behind the other (CSR).

    Args:
        table: int32 ``[at least places, width]``; lengths: int32 ``[places]``, tokens of each.
        max_pages: of all places at most; numbers: how pages are numbered.

    Returns:
        indptr int32 ``[places + 1]``, indices int32 ``[max_pages]`` (0 behind the pages), last_page_len int32
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


def state_blocks(
    table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell the block that each place reads its state from, and the one that holds it at the end of its range.

    Args:
        table: int32 ``[places, width]``; starts, ends: int32 ``[places]``; block_size: tokens of an entry.

    Returns:
        int32 ``[places]`` each; the null block to read where a sequence begins.
    """
    read = table.gather(1, ((starts.long() - 1).clamp(min=0) // block_size)[:, None])[:, 0]
    written = table.gather(1, ((ends.long() - 1).clamp(min=0) // block_size)[:, None])[:, 0]
    return torch.where(starts > 0, read, 0), torch.where(ends > 0, written, 0)
