"""From a model and bytes to pools and blocks.

Every pool gets the same number of blocks: a token takes a slot in each of them, as long as no window has passed it. Who
wants to give less to a window says so pool by pool.
"""

from collections.abc import Mapping
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.replay.model import ModelMemory
from pagedkv.spec import GroupSpec, RecurrentState

__all__ = ["block_nbytes_of", "blocks_that_fit", "groups_of"]

CHECKPOINT_INTERVAL: Final = 1024
"""Tokens between checkpoints of a recurrent state, at least: a state takes as much memory as hundreds of tokens."""


def groups_of(model: ModelMemory, block_size: int) -> tuple[GroupSpec, ...]:
    """Give the groups of a model; states are kept every 1,024 tokens, or every block if that is more.

    Raises:
        ConfigurationError: the block size is not positive.
    """
    interval = -(-CHECKPOINT_INTERVAL // max(1, block_size)) * block_size
    return tuple(
        RecurrentState(interval, pool=group.name) if group.kind == "recurrent" else group.spec(block_size)
        for group in model.groups
    )


def block_nbytes_of(model: ModelMemory, block_size: int) -> dict[str, int]:
    """Give the bytes of a block of each pool."""
    return {group.name: group.block_nbytes(block_size) for group in model.groups}


def blocks_that_fit(block_nbytes: Mapping[str, int], nbytes: float) -> int:
    """Count the blocks, the null block included, that each pool can have of so many bytes.

    Raises:
        ConfigurationError: there is no room for one block besides the null block.
    """
    num_blocks = int(nbytes // sum(block_nbytes.values()))
    if num_blocks <= 1:
        raise ConfigurationError(
            f"{nbytes / 2**30:,.2f} GiB hold {num_blocks} blocks of {sum(block_nbytes.values()):,} bytes, "
            "and one is the null block: give more memory, or smaller blocks"
        )
    return num_blocks
