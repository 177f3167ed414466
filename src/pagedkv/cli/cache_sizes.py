"""Options for the cache sizes of a curve: blocks of one pool, or GiB of a model."""

from dataclasses import dataclass
from typing import Annotated, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.sizes import parse_gib_list
from pagedkv.contract.budget import blocks_that_fit
from pagedkv.contract.spec import keeps_whole_prefix
from pagedkv.errors import ConfigurationError
from pagedkv.models import ModelMemory, read_model
from pagedkv.models.memory import GIB
from pagedkv.models.sizing import block_nbytes_of, groups_of
from pagedkv.planner.capacity.model_curve import CachedModel, CachePoint
from pagedkv.planner.capacity.space_hits import MOST_TOKENS_A_STEP

__all__ = ["CacheSizes", "SizedModel", "parse_capacities"]

TYPICAL_TOKENS: Final = 2048
"""Tokens of a request, for checking before the trace is read whether memory can be split at all."""


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model and sizes of its cache, not yet split among its pools.

    Args:
        model: memory of the model.
        block_size: tokens of a block.
        sizes_gib: the sizes, ascending; empty: the default ones of a cache.
    """

    model: ModelMemory
    block_size: int
    sizes_gib: tuple[float, ...]

    def split(self, mean_tokens: float) -> CachedModel:
        """Split each size among the model's pools, for requests of ``mean_tokens``.

        Raises:
            ConfigurationError: the block size is not positive, or a size is too small.
        """
        groups, nbytes = groups_of(self.model, self.block_size), block_nbytes_of(self.model, self.block_size)
        points = [
            CachePoint(gib, blocks_that_fit(groups, nbytes, gib * GIB, mean_tokens, MOST_TOKENS_A_STEP))
            for gib in self.sizes_gib
        ]
        return CachedModel(self.model.name, groups, points)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The options, as typed."""

    capacities: Annotated[
        str | None,
        typer.Option(
            metavar="C,C,...",
            help="Blocks of the cache. Default: ten in geometric progression, from the longest prompt's blocks, or "
            "half of the ideal hits if that takes fewer, to the number of distinct blocks.",
        ),
    ] = None
    model: opt.ModelName = None
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,SIZE,...",
            help="Memory of the model's KV cache, instead of --capacities. Default: ten sizes, as of --capacities.",
            rich_help_panel=opt.MEMORY,
        ),
    ] = None
    block_size: Annotated[
        int, typer.Option(metavar="B", help="Tokens a block, of the model and of texts.", rich_help_panel=opt.MEMORY)
    ] = 16
    kv_dtype: opt.KvDtype = None

    def of_one_pool(self) -> list[int] | None:
        """Parse the capacities; None if none are given. Raises ConfigurationError as :func:`parse_capacities`."""
        return None if self.capacities is None else parse_capacities(self.capacities)

    def of_model(self) -> SizedModel | None:
        """Read the model and the sizes, which are split among its pools as in a replay; None if no model is named.

        Raises:
            ConfigurationError: options contradict one another; a size is no number, not positive or too small; the
                model is unknown.
        """
        if self.model is None:
            if self.memory is not None or self.kv_dtype is not None:
                raise ConfigurationError("--memory and --kv-dtype need a model: give --model")
            return None
        if self.capacities is not None:
            raise ConfigurationError("--capacities counts blocks of one pool: with --model give --memory instead")
        sizes_gib = () if self.memory is None else tuple(parse_gib_list(self.memory))
        sized = SizedModel(read_model(self.model, self.kv_dtype), self.block_size, sizes_gib)
        if not sizes_gib and not all(map(keeps_whole_prefix, groups_of(sized.model, self.block_size))):
            raise ConfigurationError(
                f"{sized.model.name} has windows or states, and is measured at given sizes: name them, as in "
                "--memory 8,16,32"
            )
        sized.split(TYPICAL_TOKENS)
        return sized


def parse_capacities(text: str) -> list[int]:
    """Parse capacities separated by commas.

    Raises:
        ConfigurationError: one is not a whole number, or not positive.

    >>> parse_capacities("1000, 200")
    [1000, 200]
    """
    try:
        capacities = [int(capacity) for capacity in text.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"--capacities must be whole numbers separated by commas, got {text!r}") from error
    if min(capacities) < 1:
        raise ConfigurationError(f"--capacities must be at least 1 block, got {min(capacities)}")
    return capacities
