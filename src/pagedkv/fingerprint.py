"""By which a device knows the plans of its space. A door: the room is :mod:`pagedkv.memory.contract.fingerprint`."""

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
