"""Numbers and names in the user's notation (blocks by pool, GPUs), and whether their bookkeeping fits this machine."""

import os
from typing import Final

from pagedkv.contract.errors import ConfigurationError
from pagedkv.contract.space_config import SpaceConfig
from pagedkv.models.memory import GIB

__all__ = ["parse_blocks", "parse_gpu", "require_memory"]

RECORD_NBYTES: Final = 100  # bookkeeping of a block without its tokens, rounded up
TOKEN_NBYTES: Final = 4
ENTRY_NBYTES: Final = 4


def parse_blocks(text: str) -> int | dict[str, int]:
    """Parse a number of blocks, or one for each pool.

    Raises:
        ConfigurationError: the text is neither, or a pool is named twice.

    >>> parse_blocks("1000"), parse_blocks("full=1000,window_1024=200")
    (1000, {'full': 1000, 'window_1024': 200})
    """
    try:
        if "=" not in text:
            return int(text)
        pairs = [(pool.strip(), int(count)) for pool, count in (part.split("=") for part in text.split(","))]
    except ValueError as error:
        raise ConfigurationError(
            f"--num-blocks must be a whole number, or one for each pool as in full=1000,window_1024=200; got {text!r}"
        ) from error
    if len(dict(pairs)) < len(pairs):
        raise ConfigurationError(f"--num-blocks names a pool twice: {text!r}")
    return dict(pairs)


def parse_gpu(text: str) -> tuple[int, str]:
    """Parse a number and a kind of GPU.

    >>> parse_gpu("8xh100"), parse_gpu("l4")
    ((8, 'h100'), (1, 'l4'))
    """
    number, cross, name = text.partition("x")
    return (int(number), name) if cross and number.isdecimal() else (1, text)


def require_memory(config: SpaceConfig) -> None:
    """Refuse a block space whose bookkeeping exceeds the memory of this machine.

    Raises:
        ConfigurationError: it exceeds the memory; the message has the numbers.
    """
    blocks = config.blocks_by_pool()
    block_size = max(group.block_size for group in config.groups)
    pools_nbytes = sum(blocks.values()) * (RECORD_NBYTES + TOKEN_NBYTES * block_size)
    widths = sum(-(-config.max_tokens // group.block_size) for group in config.groups)
    tables_nbytes = ENTRY_NBYTES * config.max_sequences * widths
    physical_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if pools_nbytes + tables_nbytes > physical_nbytes:
        raise ConfigurationError(
            f"the bookkeeping of {sum(blocks.values()):,} blocks takes up to {pools_nbytes / GIB:,.1f} GiB, the tables "
            f"of {config.max_sequences:,} sequences {tables_nbytes / GIB:,.1f} GiB, and this machine has "
            f"{physical_nbytes / GIB:,.1f} GiB: lower --num-blocks, --block-size or --max-sequences"
        )
