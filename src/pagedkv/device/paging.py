"""Pages: the blocks of an attention kernel whose block size divides the manager's.

A kernel needs ``keys[page]`` to be ``page_size`` consecutive tokens, and the address of a page to be its number times
one stride. In a block-major pool the next part of a block is one stride away, but the next block is many strides away::

    block 0                                  block 1
    | layer 0            | layer 1         | | layer 0 ...
    | page 0 | page 1    | ...               | page 6 | page 7       here 2 pages per block, and 6 strides from block
                                                                     to block

So a page's number is ``block * block_step + part * part_step``, and the numbers in between belong to other layers. The
kernel gets a tensor with a first extent larger than the number of its pages; all of them view the same memory.
"""

from dataclasses import dataclass
from math import gcd

from pagedkv.errors import ConfigurationError

__all__ = ["PageNumbers", "number_pages"]


@dataclass(frozen=True, slots=True)
class PageNumbers:
    """The numbering of pages.

    Args:
        page_size: tokens of a page.
        per_block: pages of a block.
        block_step: difference of the numbers of the first pages of consecutive blocks.
        part_step: difference of the numbers of consecutive pages of one block.
        stride: elements from page number n to n + 1.
    """

    page_size: int
    per_block: int
    block_step: int
    part_step: int
    stride: int

    def extent(self, num_blocks: int) -> int:
        """Return the last page's number plus 1."""
        return (num_blocks - 1) * self.block_step + (self.per_block - 1) * self.part_step + 1


def number_pages(block_size: int, page_size: int, block_stride: int, token_stride: int) -> PageNumbers:
    """Number the pages of one tensor.

    Args:
        block_size: tokens of a block.
        page_size: tokens of a page.
        block_stride, token_stride: elements from a block, and from a token, to the next one.

    Raises:
        ConfigurationError: the block size is not a multiple of the page size.
    """
    if page_size < 1 or block_size % page_size:
        raise ConfigurationError(f"blocks of {block_size} tokens cannot be divided into pages of {page_size}")
    per_block = block_size // page_size
    if per_block == 1:
        return PageNumbers(page_size, 1, 1, 1, block_stride)
    stride = gcd(block_stride, page_size * token_stride)
    return PageNumbers(page_size, per_block, block_stride // stride, page_size * token_stride // stride, stride)
