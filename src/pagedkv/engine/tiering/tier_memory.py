"""Host memory of an engine's tiers, and the copies between it and the device's blocks.

On a CPU tiers use plain memory of the process. On a GPU all of it is pinned, allocated at the start: what a host tier
keeps, and staging memory, which other tiers read to and into which blocks are copied before a tier stores them.
"""

from collections.abc import Sequence
from typing import Final

from pagedkv.device import KVStorage, PinnedArena
from pagedkv.engine.tiering.block_bytes import CpuBlockBytes
from pagedkv.engine.tiering.gpu_block_bytes import GpuBlockBytes
from pagedkv.tiering import BlockBytes
from pagedkv.tiers import HostMemory, Tier

__all__ = ["block_bytes_with_staging", "open_tier_memory"]

STAGED_NBYTES: Final = 2**30
STAGED_ENTRIES: Final = 16
"""Staging memory has room for so many entries at least."""
SPARE: Final = 32
"""A host tier has a 32nd more memory than its cap, for entries that were evicted while they are read."""
SPARE_ENTRIES: Final = 8


def open_tier_memory(
    specs: Sequence[Tier], storage: KVStorage, entry_nbytes: int
) -> tuple[BlockBytes, list[HostMemory | None]]:
    """Open the copies of an engine's blocks, and for each tier the memory that it is to use; None: plain memory.

    Args:
        specs: the tiers; storage: the engine's; entry_nbytes: about the bytes of an entry.

    Raises:
        ConfigurationError: there is not so much memory, or it cannot be pinned.
    """
    if storage.device.type != "cuda":
        return CpuBlockBytes(storage), [None] * len(specs)
    staging = _new_staging(max(STAGED_NBYTES, STAGED_ENTRIES * entry_nbytes))
    arenas = [
        PinnedArena(
            spec.host_nbytes + spec.host_nbytes // SPARE + SPARE_ENTRIES * entry_nbytes,
            f"the pinned memory of tier {spec.name}",
            alignment=64,
        )
        if spec.host_nbytes
        else staging
        for spec in specs
    ]
    return GpuBlockBytes(storage, arenas, staging), list(arenas)


def block_bytes_with_staging(storage: KVStorage, staging_nbytes: int) -> BlockBytes:
    """Open copies of blocks that need no tier, with staging memory of so many bytes on a GPU."""
    if storage.device.type != "cuda":
        return CpuBlockBytes(storage)
    return GpuBlockBytes(storage, [], _new_staging(staging_nbytes))


def _new_staging(nbytes: int) -> PinnedArena:
    return PinnedArena(nbytes, "the pinned staging memory of tiers")
