"""From a model and bytes to pools and blocks.

Memory is split so that every pool can hold as many tokens: a token takes a slot in each of them until a window has
passed it. But a window or chunk needs no more than what all sequences that run have in it, and as much again for
cached prefixes, of which a hit needs the last window alone; and room for one longest prompt, which is admitted as a
whole. What that leaves goes to full attention.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from pagedkv.errors import ConfigurationError
from pagedkv.models import ModelMemory
from pagedkv.models.memory import GIB
from pagedkv.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow

__all__ = ["block_nbytes_of", "blocks_that_fit", "groups_of"]

CHECKPOINT_INTERVAL: Final = 1024
"""Tokens between checkpoints of a recurrent state, at least: a state takes as much memory as hundreds of tokens."""
WINDOWS_PER_SEQUENCE: Final = 2
"""One that is live, and one that is cached."""
SPARE_BLOCKS: Final = 2
"""A window lies across one block more than it fills, and the next token may need another."""
FEWEST_BLOCKS: Final = 2


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


def blocks_that_fit(
    groups: Sequence[GroupSpec], block_nbytes: Mapping[str, int], nbytes: float, max_sequences: int, longest: int
) -> dict[str, int]:
    """Split memory among pools.

    Args:
        groups: the groups, each in a pool of its own.
        block_nbytes: bytes of a block of each pool.
        nbytes: bytes in all.
        max_sequences: sequences that run at once.
        longest: tokens of the longest prompt.

    Returns:
        blocks of each pool, the null block included.

    Raises:
        ConfigurationError: a pool would have no block besides the null block.
    """
    token_nbytes = {group.pool: block_nbytes[group.pool] / group.block_size for group in groups}
    num_tokens = dict.fromkeys(token_nbytes, nbytes / sum(token_nbytes.values()))
    for group in groups:
        most = _most_tokens(group, max_sequences)
        if most is not None:
            num_tokens[group.pool] = min(num_tokens[group.pool], max(most, longest + SPARE_BLOCKS * group.block_size))
    whole = [group.pool for group in groups if isinstance(group, FullAttention)]
    taken = sum(num_tokens[pool] * token_nbytes[pool] for pool in num_tokens if pool not in whole)
    num_tokens |= dict.fromkeys(whole, (nbytes - taken) / sum(token_nbytes[pool] for pool in whole)) if whole else {}
    num_blocks = {group.pool: int(num_tokens[group.pool] // group.block_size) for group in groups}
    scarce = min(num_blocks, key=lambda pool: num_blocks[pool])
    if num_blocks[scarce] < FEWEST_BLOCKS:
        raise ConfigurationError(
            f"{nbytes / GIB:,.2f} GiB leave {num_blocks[scarce]} blocks of {block_nbytes[scarce]:,} bytes for pool "
            f"{scarce!r}, and one is the null block: give more memory, or smaller blocks"
        )
    return num_blocks


def _most_tokens(group: GroupSpec, max_sequences: int) -> int | None:
    """Tokens beyond which a pool serves nobody; None where more always cache more."""
    match group:
        case SlidingWindow():
            span = group.window + group.num_sink_tokens
        case ChunkedLocal():
            span = group.chunk_size
        case _:
            return None
    return WINDOWS_PER_SEQUENCE * max_sequences * (span + SPARE_BLOCKS * group.block_size)
