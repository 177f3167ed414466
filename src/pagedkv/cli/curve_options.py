"""Options for the cache sizes and the tiers of a curve.

Options for the cache sizes of a curve: blocks of one pool, or GiB of a model.

Options for tiers below the cache of a curve: sizes of host memory and of a disk, each combination a curve.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Final, cast

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.sizes import parse_gib_list, parse_size
from pagedkv.contract.budget import blocks_that_fit
from pagedkv.contract.spec import keeps_whole_prefix
from pagedkv.errors import ConfigurationError
from pagedkv.models import ModelMemory, read_model
from pagedkv.models.memory import GIB
from pagedkv.models.sizing import block_nbytes_of, groups_of
from pagedkv.planner.capacity.model_curve import MOST_TOKENS_A_STEP, CachedModel, CachePoint
from pagedkv.planner.capacity.references import BlockReferences
from pagedkv.planner.capacity.tier_hits import CurveTier, TierCurve, device_hits_of, measure_tiers
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.tiers.simulated_tiers import TOKEN_NBYTES
from pagedkv.tiers import Admission

__all__ = [
    "NO_TIERS",
    "CacheSizes",
    "CurveTierOptions",
    "SizedModel",
    "TiersBelow",
    "below_of",
    "parse_capacities",
    "token_nbytes_of",
]
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


TIERS: Final = "Tiers"
MOST_CURVES: Final = 16


@dataclass(frozen=True, slots=True)
class CurveTierOptions:
    """The options, as typed."""

    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...",
            help="Host memory that keeps blocks below the cache: 64GiB,256GiB, a curve each; loads take no time.",
            rich_help_panel=TIERS,
        ),
    ] = None
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...",
            help="Disk that keeps blocks below the cache: 0,1TB, a curve each.",
            rich_help_panel=TIERS,
        ),
    ] = None
    admission: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="always: tiers store all blocks (default); second-offer: blocks that are offered twice.",
            rich_help_panel=TIERS,
        ),
    ] = None

    def settings(self) -> list[tuple[CurveTier, ...]]:
        """Return the tiers of each curve, host memory first; none without these options.

        Raises:
            ConfigurationError: a size is none, too many combinations, or an admission without a tier.
        """
        sizes = [
            list(_sizes(text, option)) for text, option in ((self.host_memory, "--host-memory"), (self.disk, "--disk"))
        ]
        admission = cast("Admission", self.admission or "always")
        settings = [
            tuple(
                CurveTier(medium, nbytes, admission)
                for medium, nbytes in zip(("host", "disk"), both, strict=True)
                if nbytes
            )
            for both in product(*sizes)
        ]
        settings = [tiers for tiers in settings if tiers]
        if self.admission is not None and not settings:
            raise ConfigurationError("--admission is for tiers: give --host-memory or --disk")
        if len(settings) > MOST_CURVES:
            raise ConfigurationError(f"{len(settings)} curves of tiers are more than {MOST_CURVES}: give shorter lists")
        return settings


def token_nbytes_of(sized: SizedModel | None) -> int:
    """Return the bytes of a token: of the model, or of that of the default cost model.

    Raises:
        ConfigurationError: the model has windows or states.
    """
    if sized is None:
        return TOKEN_NBYTES
    groups = groups_of(sized.model, sized.block_size)
    if not all(map(keeps_whole_prefix, groups)):
        raise ConfigurationError(
            f"a curve with tiers needs a model whose layers all keep whole prefixes: {sized.model.name} has windows or "
            "states. pagedkv replay has tiers for such models"
        )
    return sized.model.token_nbytes


@dataclass(frozen=True, slots=True)
class TiersBelow:
    """Tiers below a cache.

    Args:
        settings: the tiers of each curve.
        token_nbytes: bytes of a token.
        sizes_gib: sizes of the cache; empty: they are given in blocks.
        is_of_model: whether a token's bytes are those of a named model.
    """

    settings: Sequence[tuple[CurveTier, ...]] = ()
    token_nbytes: int = 0
    sizes_gib: Sequence[float] = ()
    is_of_model: bool = False

    def capacities(self, references: BlockReferences) -> list[int] | None:
        """Return the blocks of the trace that fit each size; None without sizes.

        Raises:
            ConfigurationError: a block does not fit.
        """
        if not self.sizes_gib:
            return None
        nbytes = self._block_nbytes(references)
        if min(self.sizes_gib) * GIB < nbytes:
            raise ConfigurationError(f"a block of the trace has {nbytes:,} bytes: --memory must hold at least one")
        return [int(gib * GIB) // nbytes for gib in self.sizes_gib]

    def measured(
        self,
        references: BlockReferences,
        policies: Sequence[str],
        capacities: Sequence[int],
        show: Callable[[int], None],
    ) -> tuple[TierCurve, ...]:
        """Measure the curve of each setting; call ``show`` with the number of finished ones."""
        if not self.settings:
            return ()
        device_hits = device_hits_of(references, policies, capacities)
        curves = []
        for tiers in self.settings:
            curves.append(measure_tiers(references, device_hits, tiers, self._block_nbytes(references)))
            show(len(curves))
        return tuple(curves)

    def _block_nbytes(self, references: BlockReferences) -> int:
        return max(1, references.block_size) * self.token_nbytes


NO_TIERS: Final = TiersBelow()


def below_of(config: ServingConfig) -> TiersBelow:
    """Return the tiers of a simulation for a curve; none where its groups have windows or states."""
    specs = config.group_specs
    tiers = tuple(CurveTier(tier.medium, tier.nbytes, tier.admission) for tier in config.tiers if tier.nbytes)
    if not tiers or not all(map(keeps_whole_prefix, specs)):
        return NO_TIERS
    nbytes = sum(block // spec.block_size for block, spec in zip(config.entry_block_nbytes, specs, strict=True))
    return TiersBelow([tiers], nbytes)


def _sizes(text: str | None, option: str) -> Iterator[int]:
    """Yield the sizes of a list, each once; 0 where there is none."""
    texts = ["0"] if text is None else text.split(",")
    yield from dict.fromkeys(parse_size(each.strip(), option) for each in texts)
