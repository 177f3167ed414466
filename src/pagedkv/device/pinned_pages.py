"""Pages of host memory that a GPU copies from and to: allocated whole, and pinned in place."""

import mmap

import torch

from pagedkv.device.reserved_memory import no_room
from pagedkv.errors import ConfigurationError

__all__ = ["allocate_pages", "pin", "unpin"]


def allocate_pages(nbytes: int, what: str) -> torch.Tensor:
    """Allocate whole pages of host memory, since pinned memory must not share pages with other allocations.

    Args:
        nbytes: number of bytes.
        what: name of the memory in messages.

    Raises:
        ConfigurationError: there is not enough memory.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    except (OSError, OverflowError) as problem:
        raise no_room(what, nbytes, torch.device("cpu")) from problem


def pin(memory: torch.Tensor) -> None:
    """Pin memory in place. Torch's own pinned allocations are rounded up to powers of two, which wastes up to half.

    Raises ConfigurationError.
    """
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        raise ConfigurationError(f"{memory.numel():,} bytes of host memory cannot be pinned: CUDA error {int(status)}")


def unpin(memory: torch.Tensor) -> None:
    """Undo :func:`pin`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
