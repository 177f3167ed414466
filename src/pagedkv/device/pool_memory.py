"""PoolMemory: the memory of one pool: its blocks on the device, and those of its host pool, for swapping.

It is plain bytes; :mod:`pagedkv.device.storage` views them for groups. In a block-major pool a block is
contiguous. In any other layout a block has several pieces on the device, but is contiguous on the host, where no kernel
reads it::

    device, block-major    | block 0       | block 1       | block 2 ...
    device, layer-major    | layer 0 of block 0 | of block 1 | ... | layer 1 of block 0 | of block 1 | ...
    host                   | block 0       | block 1       | block 2 ...
"""

import weakref
from typing import Final, final

import torch

from pagedkv.device.layout import Pieces
from pagedkv.device.pinned_pages import allocate_pages, pin, unpin
from pagedkv.device.reserved_memory import reserve
from pagedkv.device.tensors import require_pinned, require_tensor
from pagedkv.errors import StorageError, TensorError

__all__ = ["PoolMemory"]

ALIGNMENT: Final = 16
"""Bytes that a kernel moves at once; torch's allocations begin at a multiple of it."""


@final
class PoolMemory:
    """Blocks of one pool.

    Attributes:
        name: name of the pool.
        num_blocks, num_host_blocks: blocks on the device and on the host.
        block_nbytes: bytes of a block.
        pieces: the pieces of a block on the device.
        device_bytes: uint8 ``[num_blocks * block_nbytes]``; must not be accessed while asleep.
        host_bytes: uint8 ``[num_host_blocks * block_nbytes]``, pinned if the device is a GPU. If the caller passed it,
            it is not freed when the pool is closed.

    Raises:
        TensorError: the host memory has another type, shape or device, or is not pinned; nothing was allocated.
        ConfigurationError: there is not enough memory.
        DeviceUnavailableError: the driver of the GPU cannot reserve addresses.
    """

    def __init__(  # noqa: PLR0913 - sizes of a pool, by keywords
        self,
        name: str,
        *,
        num_blocks: int,
        num_host_blocks: int,
        block_nbytes: int,
        pieces: Pieces,
        device: torch.device,
        host_bytes: torch.Tensor | None = None,
    ) -> None:
        num_host_bytes, host_pool = num_host_blocks * block_nbytes, f"the host pool of {name!r}"
        if host_bytes is not None:
            _require_host_memory(host_bytes, host_pool, num_host_bytes, device)
        self.name = name
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_nbytes = block_nbytes
        self.pieces = pieces
        self.device = device
        self._memory = reserve(num_blocks * block_nbytes, f"pool {name!r}", device)
        self.device_bytes = self._memory.tensor()
        self._zero_null_block()
        self.host_bytes = allocate_pages(num_host_bytes, host_pool) if host_bytes is None else host_bytes
        self._unpin: weakref.finalize[..., PoolMemory] | None = None
        if device.type == "cuda" and num_host_blocks and host_bytes is None:
            pin(self.host_bytes)
            self._unpin = weakref.finalize(self, unpin, self.host_bytes)

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device while awake."""
        return self.num_blocks * self.block_nbytes

    @property
    def is_awake(self) -> bool:
        """Whether device memory is mapped."""
        return self._memory.is_mapped

    def sleep(self) -> None:
        """Release the device's memory. Tensors that view it must not be used until :meth:`wake`."""
        self._memory.unmap()

    def wake(self) -> None:
        """Map memory at the same addresses again; views, and graphs that use them, are valid again."""
        self._memory.map()
        self._zero_null_block()

    def close(self) -> None:
        """Release all memory for good."""
        if self.is_awake:
            self.sleep()
        if self._unpin is not None:
            self._unpin()
        self.host_bytes = torch.empty(0, dtype=torch.uint8)

    def require_awake(self) -> None:
        """Raise StorageError if the device memory is released."""
        if not self._memory.is_mapped:
            raise StorageError(f"pool {self.name!r} is asleep: wake the storage before plans are executed")

    def _zero_null_block(self) -> None:
        """Zero the null block, since padded rows of a batch read it."""
        for offset, size in zip(self.pieces.offsets, self.pieces.sizes, strict=True):
            self.device_bytes[offset : offset + size].zero_()


def _require_host_memory(memory: torch.Tensor, what: str, nbytes: int, device: torch.device) -> None:
    require_tensor(memory, what, dtype=torch.uint8, shape=(nbytes,), device=torch.device("cpu"))
    if not memory.is_contiguous():
        raise TensorError(f"{what} must be contiguous, got strides {memory.stride()}")
    if device.type == "cuda":
        require_pinned(memory, what)
