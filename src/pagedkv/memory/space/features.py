"""Which features a space has, and in which order they act.

Tenants come first, since blocks are charged when they are taken; the other features are independent of each other.
"""

from pagedkv.memory.space.epochs import EpochFeature
from pagedkv.memory.space.feature import SpaceFeature
from pagedkv.memory.space.retaining import RetentionFeature
from pagedkv.memory.space.state import SpaceState
from pagedkv.memory.space.tenants import TenantFeature

__all__ = ["features_of"]


def features_of(state: SpaceState) -> tuple[SpaceFeature, ...]:
    """Make the features that a space's configuration needs."""
    features: list[SpaceFeature] = []
    if state.tenant_names:
        features.append(TenantFeature(state))
    if state.config.counts_epochs:
        features.append(EpochFeature(state))
    if state.shedding_groups:
        features.append(RetentionFeature(state))
    return tuple(features)
