"""The device side: memory, block tables and copies on a device, and an executor of the core's plans.

It depends on plans and on :mod:`pagedkv.contract.spec`, but not on the code that makes plans. Needs torch (``pip
install 'pagedkv[torch]'``). Kernels for GPUs are written in Triton. Kernels for CPUs are plain torch with the same
signatures, and the reference in tests of the Triton kernels.
"""

from pagedkv.contract.extras import needing

with needing("torch", "pagedkv.device"):
    import torch  # noqa: F401 - imported first, so that a missing torch raises our MissingExtraError

from pagedkv.device.block_tables import BlockTables, StepInputs
from pagedkv.device.executor import PlanExecutor, is_device_failure
from pagedkv.device.kernels.inputs import Draws, Filters
from pagedkv.device.kernels.selection import kernels_for
from pagedkv.device.memory import PinnedArena
from pagedkv.device.shapes import (
    FP8_TYPES,
    Companion,
    GroupShape,
    KeyValueShape,
    LatentShape,
    StateShape,
    StateTensor,
    block_nbytes_of,
    free_nbytes,
    num_blocks_that_fit,
)
from pagedkv.device.storage import KernelPages, KVStorage, runs_of_pools
from pagedkv.device.transfers import CopyTicket, Transfers, copy_batch

__all__ = [
    "FP8_TYPES",
    "BlockTables",
    "Companion",
    "CopyTicket",
    "Draws",
    "Filters",
    "GroupShape",
    "KVStorage",
    "KernelPages",
    "KeyValueShape",
    "LatentShape",
    "PinnedArena",
    "PlanExecutor",
    "StateShape",
    "StateTensor",
    "StepInputs",
    "Transfers",
    "block_nbytes_of",
    "copy_batch",
    "free_nbytes",
    "is_device_failure",
    "kernels_for",
    "num_blocks_that_fit",
    "runs_of_pools",
]
