"""Sizes, numbers and names in the user's notation, and whether their bookkeeping fits this machine.

All sizes follow one rule: a unit is written (16GiB, 500MB), and a number alone is GiB; 0 is no size, or no tier where
one may be left out. Where GiB would be absurd (a body of a request, bytes a second) a number alone is refused. Shares
are written with %.
"""

import os
import re
from typing import Final

from pagedkv.contract.space_config import SpaceConfig
from pagedkv.errors import ConfigurationError
from pagedkv.models.memory import GIB
from pagedkv.tiers import parse_nbytes

__all__ = [
    "MEMORY",
    "parse_blocks",
    "parse_gib",
    "parse_gib_list",
    "parse_gpu",
    "parse_share",
    "parse_size",
    "parse_size_with_unit",
    "require_memory",
]

MEMORY: Final = "--memory"
MOST_GIB: Final = 2**20
"""A million GiB: more than any machine has, and small enough for counters."""
SHARE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%")
NO_UNIT: Final = re.compile(r"\s*[\d.]+\s*")

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


def parse_size(text: str, option: str) -> int:
    """Parse bytes; 0: there is none.

    Raises:
        ConfigurationError: it is no size.

    >>> (
    ...     parse_size("64", "--host-memory") == parse_size("64GiB", "--host-memory") == 64 * 2**30,
    ...     parse_size("0", "--disk"),
    ... )
    (True, 0)
    """
    return 0 if text.strip() == "0" else parse_nbytes(text, option)


def parse_size_with_unit(text: str, option: str) -> int:
    """Parse bytes of a quantity that is never some GiB by default; a number alone is refused.

    Raises:
        ConfigurationError: it is no size, or has no unit.

    >>> parse_size_with_unit("32MiB", "--max-body")
    33554432
    """
    if NO_UNIT.fullmatch(text):
        raise ConfigurationError(f"{option} {text} has no unit: write {text}MB, {text}GB, or another unit of bytes")
    return parse_nbytes(text, option)


def parse_gib(text: str, option: str = MEMORY) -> float:
    """Parse a size in GiB, over 0.

    Raises:
        ConfigurationError: it is no size, 0, or beyond a million GiB.

    >>> parse_gib("16"), parse_gib("512MiB")
    (16.0, 0.5)
    """
    gib = parse_size(text, option) / GIB
    if not 0 < gib <= MOST_GIB:
        raise ConfigurationError(f"{option} must be over 0 and at most {MOST_GIB:,} GiB, got {text.strip()}")
    return gib


def parse_gib_list(text: str, option: str = MEMORY) -> list[float]:
    """Parse sizes in GiB separated by commas; return them ascending, without repetitions.

    Raises:
        ConfigurationError: one is no size, 0, or beyond a million GiB.

    >>> parse_gib_list("8, 512MiB, 8")
    [0.5, 8.0]
    """
    return sorted({parse_gib(each, option) for each in text.split(",")})


def parse_share(text: str, option: str) -> float:
    """Parse a share: with %, or 0.

    Raises:
        ConfigurationError: it is none.

    >>> parse_share("1%", "--watermark")
    0.01
    """
    found = SHARE.fullmatch(text.strip())
    share = 0.0 if text.strip() == "0" else 1.0 if found is None else float(found[1]) / 100
    if share >= 1:
        raise ConfigurationError(f"{option} must be a share below 100%, written with %, such as 1%; got {text!r:.60}")
    return share


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
