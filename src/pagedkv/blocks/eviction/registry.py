"""The list of all eviction policies; code that offers or checks policies reads it here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pagedkv.blocks.eviction.adaptive import ADAPTIVE
from pagedkv.blocks.eviction.fifo import FIFO
from pagedkv.blocks.eviction.hazard.policy import HAZARD
from pagedkv.blocks.eviction.policy import LRU, EvictionPolicy
from pagedkv.blocks.eviction.priority import PRIORITY
from pagedkv.blocks.eviction.tlru import TLRU
from pagedkv.contract.space_config import DEFAULT_EVICTION
from pagedkv.errors import ConfigurationError

_ALL: Final = (
    LRU,
    ADAPTIVE,
    FIFO,
    HAZARD,
    PRIORITY,
    TLRU,
)
POLICIES: Final[Mapping[str, EvictionPolicy]] = MappingProxyType({policy.name: policy for policy in _ALL})
"""All policies by name, in the order in which results show them."""
DEFAULT: Final[EvictionPolicy] = POLICIES[DEFAULT_EVICTION]


def policy_named(name: str) -> EvictionPolicy:
    """Find a policy. Raises ConfigurationError with a list of all names. O(1)."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigurationError(f"eviction policy must be one of {tuple(POLICIES)}, got {name!r}")
    return POLICIES[name]


def require_listed(policy: EvictionPolicy) -> None:
    """Raise ConfigurationError for a policy that is not in the list. O(1)."""
    if POLICIES.get(policy.name) is not policy:
        raise ConfigurationError(
            f"eviction policy {policy.name!r} is not in the list of pool/eviction/registry.py: add it there"
        )
