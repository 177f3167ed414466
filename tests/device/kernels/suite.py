"""Where Triton's kernels run in a test: on a GPU, or in the interpreter, to be chosen before Triton is imported."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

__all__ = ["IS_INTERPRETED", "KERNEL_DEVICE", "byte_poison", "needs_kernels", "same_bytes"]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DEVICE = torch.device("cpu") if IS_INTERPRETED or not torch.cuda.is_available() else torch.device("cuda", 0)

needs_kernels = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(),
    reason="kernels need a GPU, or TRITON_INTERPRET=1: test_interpreted.py runs them so",
)


def byte_poison(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Make a tensor of random bytes, NaN among them: what a kernel leaves alone must be these bytes still."""
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return octets.view(dtype)[..., 0]


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bit by bit: NaN equals itself, and an eight-bit NaN is not the largest number."""
    octets = [tensor.cpu().contiguous().view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*octets)


@contextmanager
def unharmed(tensor: torch.Tensor) -> Iterator[None]:
    """Assert that a tensor has the same bytes afterwards."""
    before = tensor.clone()
    yield
    assert same_bytes(tensor, before)
