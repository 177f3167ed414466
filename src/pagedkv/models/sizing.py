"""Groups of a model, and the bytes of a block in each pool."""

from typing import Final

from pagedkv.contract.spec import GroupSpec, RecurrentState
from pagedkv.models import ModelMemory
from pagedkv.models.layer_rules import is_state

__all__ = ["block_nbytes_of", "groups_of"]

CHECKPOINT_INTERVAL: Final = 1024
"""Least tokens between checkpoints of a recurrent state, since a state takes as much memory as hundreds of tokens."""


def groups_of(model: ModelMemory, block_size: int) -> tuple[GroupSpec, ...]:
    """Return the groups of a model. States are kept every 1,024 tokens, or every block if that is more.

    Raises:
        ConfigurationError: the block size is not positive.
    """
    interval = -(-CHECKPOINT_INTERVAL // max(1, block_size)) * block_size
    return tuple(
        RecurrentState(interval, pool=group.name) if is_state(group.kind) else group.spec(block_size)
        for group in model.groups
    )


def block_nbytes_of(model: ModelMemory, block_size: int) -> dict[str, int]:
    """Return the bytes of a block of each pool."""
    return {group.name: group.block_nbytes(block_size) for group in model.groups}
