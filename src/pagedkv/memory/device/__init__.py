"""The body: memory, block tables and copies on a device, and an executor that carries out the core's plans there.

Sees plans and the words of :mod:`pagedkv.memory.contract.spec`, nothing of how they come about. Needs torch (``pip
install 'pagedkv[torch]'``). On a GPU its kernels are Triton's; on a CPU plain torch with the same signatures, against
which the others are tested.
"""

from pagedkv.memory.contract.extras import needing

with needing("torch", "pagedkv.device"):
    import torch  # noqa: F401 - first of all, so that its absence is told in our words

from pagedkv.memory.device.block_tables import BlockTables
from pagedkv.memory.device.executor import PlanExecutor
from pagedkv.memory.device.shapes import GroupShape, KeyValueShape, LatentShape, StateShape, StateTensor
from pagedkv.memory.device.sizing import block_nbytes_of, free_nbytes, num_blocks_that_fit
from pagedkv.memory.device.step_inputs import StepInputs
from pagedkv.memory.device.storage import KernelPages, KVStorage
from pagedkv.memory.device.transfers import CopyTicket, Transfers

__all__ = [
    "BlockTables",
    "CopyTicket",
    "GroupShape",
    "KVStorage",
    "KernelPages",
    "KeyValueShape",
    "LatentShape",
    "PlanExecutor",
    "StateShape",
    "StateTensor",
    "StepInputs",
    "Transfers",
    "block_nbytes_of",
    "free_nbytes",
    "num_blocks_that_fit",
]
