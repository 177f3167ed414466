"""The split of memory among the pools, from bytes to blocks; replays and devices are both sized by it.

Memory is split so that every pool has room for equally many sequences, running or cached, of the mean length of the
requests. Full attention keeps blocks for all tokens of a sequence. A window or chunk keeps the last one, which is all
that a cached prefix needs in order to hit (docs/decisions/0015). A recurrent group keeps the current state, the state
at the prompt's end, and those at intervals. Windows also have room for the tokens that one step computes before the
window slides.
"""

from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from pagedkv.contract.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.errors import ConfigurationError

__all__ = ["GIB", "blocks_that_fit"]

GIB: Final = 2**30
"""Bytes of a GiB."""
SPARE_BLOCKS: Final = 2
"""A window overlaps one block more than it fills, and the next token may need another."""
FEWEST_BLOCKS: Final = 2
STATES_BESIDE_INTERVALS: Final = 2
"""The current state, and the state at the prompt's end."""
MOST_OF_MEMORY: Final = 0.5
"""Largest share of all memory that windows may reserve for the tokens of a step."""


def blocks_that_fit(
    groups: Sequence[GroupSpec], block_nbytes: Mapping[str, int], nbytes: float, mean_tokens: float, step_tokens: int
) -> dict[str, int]:
    """Split memory among the pools.

    Args:
        groups: the groups, each in a pool of its own.
        block_nbytes: bytes of a block of each pool.
        nbytes: bytes of all pools together.
        mean_tokens: mean tokens of a request, prompt and output.
        step_tokens: most tokens that a step computes, or that are admitted at once.

    Returns:
        blocks of each pool, the null block included.

    Raises:
        ConfigurationError: a pool would have no block besides the null block.
    """
    token_nbytes = {group.pool: block_nbytes[group.pool] / group.block_size for group in groups}
    kept_nbytes = {group.pool: _kept_tokens(group, mean_tokens) * token_nbytes[group.pool] for group in groups}
    passing_nbytes = {
        group.pool: (step_tokens + group.block_size) * token_nbytes[group.pool] * _is_window(group) for group in groups
    }
    fits = min(1.0, MOST_OF_MEMORY * nbytes / (sum(passing_nbytes.values()) or 1))
    num_sequences = (nbytes - fits * sum(passing_nbytes.values())) / sum(kept_nbytes.values())
    num_blocks = {
        pool: int((num_sequences * kept_nbytes[pool] + fits * passing_nbytes[pool]) // block_nbytes[pool])
        for pool in kept_nbytes
    }
    if len(num_blocks) == 1:
        num_blocks = {pool: int(nbytes // block_nbytes[pool]) for pool in num_blocks}
    scarce = min(num_blocks, key=lambda pool: num_blocks[pool])
    if num_blocks[scarce] < FEWEST_BLOCKS:
        raise ConfigurationError(
            f"{nbytes / GIB:,.2f} GiB leave {num_blocks[scarce]} blocks of {block_nbytes[scarce]:,} bytes for pool "
            f"{scarce!r}, and one is the null block: give more memory, or smaller blocks"
        )
    return num_blocks


def _is_window(group: GroupSpec) -> bool:
    match group:
        case SlidingWindow() | ChunkedLocal():
            return True
        case FullAttention() | RecurrentState():
            return False
        case _:
            assert_never(group)


def _kept_tokens(group: GroupSpec, mean_tokens: float) -> float:
    """Count the tokens for which a sequence keeps blocks in a group, running or cached for a later prompt."""
    whole = max(1.0, mean_tokens)
    match group:
        case FullAttention():
            return whole
        case SlidingWindow():
            return min(whole, group.window + group.num_sink_tokens) + SPARE_BLOCKS * group.block_size
        case ChunkedLocal():
            return min(whole, group.chunk_size) + SPARE_BLOCKS * group.block_size
        case RecurrentState():
            return whole + (STATES_BESIDE_INTERVALS + group.num_draft_states) * group.block_size
        case _:
            assert_never(group)
