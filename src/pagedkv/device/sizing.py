"""Computes how many blocks fit into a device's free memory, for given groups and shapes of their blocks."""

from collections.abc import Sequence
from typing import Final, get_args

import torch

from pagedkv.contract.arguments import as_count, as_number
from pagedkv.contract.space_config import blocks_that_fit
from pagedkv.contract.spec import GroupSpec, keeps_state
from pagedkv.device.shapes import GroupShape, StateShape
from pagedkv.device.tensors import as_device
from pagedkv.errors import ConfigurationError, DeviceUnavailableError

__all__ = ["block_nbytes_of", "free_nbytes", "num_blocks_that_fit", "pair_groups"]

MOST_NBYTES: Final = 2**63 - 1


def pair_groups(groups: Sequence[GroupSpec], shapes: Sequence[GroupShape]) -> tuple[tuple[GroupSpec, GroupShape], ...]:
    """Pair each group with its shape.

    Raises:
        ConfigurationError: not as many shapes as groups, or a state's shape for tokens, or the other way round.
    """
    for what, given, kinds in (("groups", groups, get_args(GroupSpec)), ("shapes", shapes, get_args(GroupShape))):
        if not isinstance(given, Sequence) or not all(isinstance(each, kinds) for each in given):
            raise ConfigurationError(f"{what} must be a sequence of pagedkv's {what}, got {given!r}")
    if len(groups) != len(shapes):
        raise ConfigurationError(f"{len(groups)} groups need as many shapes, got {len(shapes)}")
    for index, (group, shape) in enumerate(zip(groups, shapes, strict=True)):
        if keeps_state(group) != isinstance(shape, StateShape):
            raise ConfigurationError(f"group {index} is {group!r}, but its shape is a {type(shape).__name__}")
    return tuple(zip(groups, shapes, strict=True))


def block_nbytes_of(groups: Sequence[GroupSpec], shapes: Sequence[GroupShape]) -> dict[str, int]:
    """Return the bytes of a block of each pool.

    Raises:
        ConfigurationError: groups that share a pool, with blocks of different bytes.
    """
    nbytes: dict[str, int] = {}
    for index, (group, shape) in enumerate(pair_groups(groups, shapes)):
        mine = shape.block_nbytes(group.block_size)
        if nbytes.setdefault(group.pool, mine) != mine:
            raise ConfigurationError(
                f"a block of group {index} has {mine:,} bytes, but pool {group.pool!r} has blocks of "
                f"{nbytes[group.pool]:,}: give the group a pool of its own, or another block size"
            )
    return nbytes


def free_nbytes(device: "torch.device | str", fraction: float = 0.9) -> int:
    """Return a fraction of a GPU's memory that is free now. Call it after the model was loaded and run once.

    Raises:
        ConfigurationError: the fraction is not in (0, 1].
        DeviceUnavailableError: there is no such GPU, or the device is a CPU, for which free memory is not meaningful.
    """
    if not 0 < as_number(fraction, "the fraction of free memory") <= 1:
        raise ConfigurationError(f"the fraction of free memory must be in (0, 1], got {fraction!r}")
    where = as_device(device)
    if where.type != "cuda":
        raise DeviceUnavailableError("free memory is measured on a GPU alone: for a CPU, give the number of bytes")
    free, _ = torch.cuda.mem_get_info(where)
    return int(free * fraction)


def num_blocks_that_fit(
    groups: Sequence[GroupSpec], shapes: Sequence[GroupShape], nbytes: int, *, mean_tokens: float, step_tokens: int
) -> dict[str, int]:
    """Split bytes among the pools, as ``pagedkv replay --model`` does.

    Args:
        groups: the groups, each in a pool of its own, as from :mod:`pagedkv.models`.
        shapes: the shapes of their blocks.
        nbytes: bytes of all pools together, as from :func:`free_nbytes`.
        mean_tokens: mean tokens of a request, prompt and output.
        step_tokens: most tokens that a step computes, or that are admitted at once.

    Returns:
        blocks of each pool, the null block included: ``SpaceConfig.num_blocks``.

    Raises:
        ConfigurationError: a pool would have no block besides the null block, two groups share a pool, or the shapes
            do not fit the groups.
    """
    block_nbytes = block_nbytes_of(groups, shapes)
    if len(block_nbytes) < len(groups):
        raise ConfigurationError(
            f"{len(groups)} groups share {len(block_nbytes)} pools, so the blocks of each cannot be computed: give "
            "each group a pool of its own, or give the numbers of blocks"
        )
    all_nbytes, most_new = as_count(nbytes, "nbytes", most=MOST_NBYTES), as_count(step_tokens, "step_tokens")
    mean = as_number(mean_tokens, "mean_tokens")
    if mean <= 0:
        raise ConfigurationError(f"mean_tokens must be positive, got {mean_tokens!r}")
    return blocks_that_fit(groups, block_nbytes, all_nbytes, mean, most_new)
