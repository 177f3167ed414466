"""Options for tiers below the cache of a curve: sizes of host memory and of a disk, each combination a curve."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Final, cast

import typer

from pagedkv.cli.cache_sizes import SizedModel
from pagedkv.cli.sizes import parse_size
from pagedkv.contract.spec import keeps_whole_prefix
from pagedkv.errors import ConfigurationError
from pagedkv.models.memory import GIB
from pagedkv.models.sizing import groups_of
from pagedkv.planner.capacity.references import BlockReferences
from pagedkv.planner.capacity.tier_hits import CurveTier, TierCurve, device_hits_of, measure_tiers
from pagedkv.simulation import ServingConfig
from pagedkv.simulation.tiers.config import TOKEN_NBYTES
from pagedkv.tiers import Admission

__all__ = ["NO_TIERS", "CurveTierOptions", "TiersBelow", "below_of", "token_nbytes_of"]

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
