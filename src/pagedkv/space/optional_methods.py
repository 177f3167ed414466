"""The public methods of all features, as one base class of a block space."""

from pagedkv.space.epoch_methods import EpochMethods
from pagedkv.space.explanation_methods import ExplanationMethods
from pagedkv.space.lease_methods import LeaseMethods
from pagedkv.space.tenant_methods import TenantMethods

__all__ = ["OptionalMethods"]


class OptionalMethods(ExplanationMethods, LeaseMethods, TenantMethods, EpochMethods):
    """What features offer beside the operations in which they take part."""
