"""Fingerprints of configurations, by which a device refuses plans of another space.

Public import path of :mod:`pagedkv.memory.contract.fingerprint`.
"""

from pagedkv.memory.contract.fingerprint import (
    FINGERPRINT_NBYTES,
    difference,
    fingerprint,
)

__all__ = [
    "FINGERPRINT_NBYTES",
    "difference",
    "fingerprint",
]
