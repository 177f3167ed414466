"""Kernels that are put on the device while the one before still runs, and wait there for its results.

Programmatic dependent launch, from Hopper on: of the time between two kernels of a graph, more than a microsecond, most
is saved.
"""

from functools import lru_cache
from typing import Final

import torch

__all__ = ["launch_options", "may_overlap"]

HOPPER: Final = (9, 0)


def launch_options(*, overlaps: bool) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel before it is over."""
    return {"launch_pdl": True} if overlaps else {}


@lru_cache
def may_overlap(device: torch.device) -> bool:
    """Tell whether a device can hold a kernel back until the one before is over."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER
