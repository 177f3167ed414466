"""Which features and observers of its own a space has, and in which order they act.

Tenants come first, since blocks are charged when they are taken. A plan is dated before states are named in it. Hits
are lengthened by kept states, then inside blocks, then by replays. Other features are independent of each other.
"""

from pagedkv.space.drafting import DraftFeature
from pagedkv.space.epochs import EpochFeature
from pagedkv.space.explaining import ExplanationBook
from pagedkv.space.feature import SpaceFeature
from pagedkv.space.leasing import LeaseFeature
from pagedkv.space.partial_hits import PartialHitFeature, TailFeature
from pagedkv.space.receipts import ReceiptBook
from pagedkv.space.replaying import ReplayFeature
from pagedkv.space.state import SpaceState
from pagedkv.space.states import CheckpointFeature
from pagedkv.space.tenants import TenantFeature
from pagedkv.space.windows import WindowFeature

__all__ = ["features_of", "observers_of"]


def features_of(state: SpaceState) -> tuple[SpaceFeature, ...]:
    """Make the features that a space's configuration needs."""
    features: list[SpaceFeature] = []
    if state.config.tenants is not None:
        features.append(TenantFeature(state))
    if state.config.counts_epochs:
        features.append(EpochFeature(state))
    if state.config.leases:
        features.append(LeaseFeature(state))
    if not all(group.keeps_whole_prefix for group in state.groups):
        features.append(WindowFeature(state))
    states = CheckpointFeature(state) if state.state_groups else None
    if states is not None:
        features.append(states)
    if state.config.min_partial_hit and state.config.prefix_caching:
        features.append(PartialHitFeature(state, states.checkpoints if states else None))
    if states is not None or state.config.min_partial_hit:
        features.append(TailFeature(state))
    if state.is_recurrent:
        features.append(DraftFeature(state))
    if state.replaying_groups:
        features.append(ReplayFeature(state))
    return tuple(features)


def observers_of(state: SpaceState) -> tuple[ReceiptBook | None, ExplanationBook | None]:
    """Make the observers that a space's configuration needs: its receipts and its recorded explanations."""
    config = state.config
    return ReceiptBook(state) if config.receipts else None, ExplanationBook(state) if config.explain else None
