"""Kernels that are launched while the previous one still runs, and wait on the device for its results.

This is programmatic dependent launch, from Hopper on. It saves most of the time between two kernels of a graph, which
is more than a microsecond.
"""

from functools import lru_cache
from typing import Final

import torch

HOPPER: Final = (9, 0)


def launch_options(*, overlaps: bool) -> dict[str, bool]:
    """Return the options of a launch that may begin before the previous kernel has ended."""
    return {"launch_pdl": True} if overlaps else {}


@lru_cache
def may_overlap(device: torch.device) -> bool:
    """Return whether a device can delay a kernel until the previous one has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER
