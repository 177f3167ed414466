"""The options of the commands that run an engine."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pagedkv.cli import options as opt
from pagedkv.cli.sizes import parse_blocks, parse_gib
from pagedkv.contract.arguments import as_choice
from pagedkv.contract.extras import needing
from pagedkv.contract.space_config import DEFAULT_EVICTION, EVICTION_POLICIES
from pagedkv.errors import ConfigurationError
from pagedkv.models.memory import GIB
from pagedkv.tiers import ObjectBody, RedisBody, Tier, parse_tier

if TYPE_CHECKING:
    from pagedkv.engine import EngineConfig

__all__ = ["EngineOptions"]

DEFAULT_MEMORY: Final = "512MiB"
OWN_PACKAGES: Final = MappingProxyType({RedisBody.medium: "redis", ObjectBody.medium: "obstore"})
"""Packages that tiers of a medium need beside that of checks."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options, as typed."""

    memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Memory for keys and values: 8, 8GiB.", rich_help_panel=opt.MEMORY),
    ] = DEFAULT_MEMORY
    num_blocks: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Blocks of each pool, or pool by pool: full=1000,window_1024=200. Default: what --memory holds.",
            rich_help_panel=opt.MEMORY,
        ),
    ] = None
    block_size: opt.BlockSize = 16
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens of the longest sequence. Default: the model's.", rich_help_panel=opt.MEMORY
        ),
    ] = None
    max_sequences: opt.MaxSequences = 64
    max_batched_tokens: opt.MaxBatchedTokens = 2048
    eviction: opt.EvictionName = DEFAULT_EVICTION
    lookup: Annotated[
        int,
        typer.Option(
            "--lookup",
            metavar="N",
            help="Guess up to N tokens a step from repetitions in the prompt and the answer; answers stay the same.",
        ),
    ] = 0
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID",
            help="A smaller model of the same vocabulary that guesses tokens; answers stay the same.",
        ),
    ] = None
    draft_tokens: Annotated[
        int, typer.Option("--draft-tokens", metavar="N", help="Tokens that --draft-model guesses a step. Default: 4.")
    ] = 0
    overlap: opt.Overlap = False
    accept_differences: Annotated[
        bool,
        typer.Option(
            "--accept-differences",
            help="Go on where the self-test finds other answers than the model's own: they may be wrong.",
        ),
    ] = False
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            metavar="TIER",
            help="Keep cached blocks beside the device: host:16GiB, folder:PATH:200GiB, redis://HOST:PORT/DB, "
            "s3://BUCKET/PATH; may be given again, the fastest first.",
            rich_help_panel=opt.MEMORY,
        ),
    ] = None

    tier_rescan: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds between scans of --tier for entries of other processes; 0: never. "
            "Default: 30 with --replicas, else never.",
            rich_help_panel=opt.MEMORY,
        ),
    ] = None

    def require_valid(self) -> None:
        """Refuse what can be known to be wrong before torch is imported. Raises as :meth:`config`."""
        if self.draft_tokens and self.draft_model is None:
            raise ConfigurationError("--draft-tokens needs --draft-model: the model that guesses them")
        parse_gib(self.memory)
        if self.num_blocks is not None:
            parse_blocks(self.num_blocks)
        as_choice(self.eviction, EVICTION_POLICIES, "--eviction")
        self._tiers()

    def config(self) -> "EngineConfig":
        """Configure an engine.

        Raises:
            ConfigurationError: an option is out of range.
            MissingExtraError: torch, transformers, or a package of the tiers is not installed.
        """
        from pagedkv.engine import EngineConfig, PromptLookup  # noqa: PLC0415 - other commands need no torch
        from pagedkv.engine.drafter import DEFAULT_DRAFT_TOKENS  # noqa: PLC0415 - as above

        return EngineConfig(
            block_size=self.block_size,
            kv_nbytes=int(parse_gib(self.memory) * GIB),
            num_blocks=None if self.num_blocks is None else parse_blocks(self.num_blocks),
            max_sequences=self.max_sequences,
            max_batched_tokens=self.max_batched_tokens,
            max_tokens=self.max_length,
            eviction=self.eviction,
            speculation=PromptLookup(self.lookup) if self.lookup else None,
            num_draft_tokens=0 if self.draft_model is None else self.draft_tokens or DEFAULT_DRAFT_TOKENS,
            overlap=self.overlap,
            accept_differences=self.accept_differences,
            tiers=self._tiers(),
        )

    def _tiers(self) -> tuple[Tier, ...]:
        """Return the tiers. Raises ConfigurationError, MissingExtraError."""
        tiers = tuple(map(parse_tier, self.tier or ()))
        _require_packages(tiers)
        if self.tier_rescan is None:
            return tiers
        if not any(each.is_shared for each in tiers):
            raise ConfigurationError("--tier-rescan needs a --tier that other processes may share, such as folder:...")
        return tuple(replace(each, rescan_s=self.tier_rescan) if each.is_shared else each for each in tiers)


def _require_packages(tiers: Iterable[Tier]) -> None:
    """Import what the tiers need, before a model is loaded. Raises MissingExtraError."""
    for tier in tiers:
        with needing("tiers", "--tier"):
            import_module("xxhash")
            if tier.medium in OWN_PACKAGES:
                import_module(OWN_PACKAGES[tier.medium])
