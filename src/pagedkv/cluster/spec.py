"""ReplicaSpec: model, engine and limits of each replica of a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, get_args

from pagedkv.contract.arguments import as_choice
from pagedkv.contract.space_config import TenantLimits
from pagedkv.engine import EngineConfig
from pagedkv.server.config import Inspector

__all__ = ["RESCAN_S", "ReplicaSpec"]

RESCAN_S: Final = 30.0
"""Seconds between two scans of a shared tier. A scan of 100,000 files took 0.6 s of one core (2 % of it); a
conversation that comes back sooner is usually routed to the replica that has it."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Model, engine and limits of each replica.

    Args:
        model: a folder or a name; None: the model of the demonstration.
        dtype: type of the model's weights.
        engine: memory and limits of each replica.
        tenants: limits of tenants, by name; None: tenants are not distinguished.
        max_waiting: most requests that wait in each replica.
        tool_parser: name of the parser of calls.
        host: address at which each replica publishes its events.
        draft_model: a folder or a name of the model that guesses tokens; None: there is none.
        device: for the models' weights and blocks; auto: a GPU where the replica has one.
        inspector: what each replica shows in the inspector; ``texts``: its blocks, and their texts.

    Raises:
        ConfigurationError: an unknown inspector.
    """

    model: str | None
    dtype: str
    engine: EngineConfig
    tenants: Mapping[str, TenantLimits] | None = None
    max_waiting: int = 1024
    tool_parser: str = "auto"
    host: str = "127.0.0.1"
    draft_model: str | None = None
    device: str = "auto"
    inspector: Inspector = "off"

    def __post_init__(self) -> None:
        """Check the inspector's name."""
        as_choice(self.inspector, get_args(Inspector), "inspector")

    @property
    def own_engine(self) -> EngineConfig:
        """The engine of one replica: it records events, and finds what other replicas store in shared tiers."""
        tiers = tuple(
            replace(tier, rescan_s=RESCAN_S) if tier.is_shared and tier.rescan_s is None else tier
            for tier in self.engine.tiers
        )
        return replace(self.engine, events=True, tiers=tiers)
