"""The device side: memory, block tables, and execution of plans. Public import path of :mod:`pagedkv.memory.device`."""

from pagedkv.memory.device import (
    BlockTables,
    CopyTicket,
    GroupShape,
    KernelPages,
    KeyValueShape,
    KVStorage,
    LatentShape,
    PlanExecutor,
    StateShape,
    StateTensor,
    StepInputs,
    Transfers,
    block_nbytes_of,
    free_nbytes,
    num_blocks_that_fit,
)

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
