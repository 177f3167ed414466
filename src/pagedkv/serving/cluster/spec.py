"""ReplicaSpec: model, engine and limits of each replica of a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from pagedkv.memory.contract.arguments import as_choice
from pagedkv.memory.contract.space_config import TenantLimits
from pagedkv.serving.engine import EngineConfig

__all__ = ["Inspector", "ReplicaSpec"]

Inspector: TypeAlias = Literal["off", "blocks", "texts"]


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
