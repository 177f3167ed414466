"""Checks the tensors that callers pass, before any kernel is launched.

A kernel computes addresses from shapes and strides, so a wrong tensor must be detected before. The checks do not depend
on the use of the tensors.
"""

from collections.abc import Sequence

import torch

from pagedkv.errors import DeviceUnavailableError, TensorError


def as_device(device: "torch.device | str | int") -> torch.device:
    """Return a device with its index.

    Raises:
        DeviceUnavailableError: no such device, or one of a kind that is not supported.
    """
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as problem:
        raise DeviceUnavailableError(f"there is no device {device!r}: give 'cpu', 'cuda' or 'cuda:0'") from problem
    if named.type == "cpu":
        return torch.device("cpu")
    if named.type != "cuda":
        raise DeviceUnavailableError(f"{named} is not supported: give 'cpu', 'cuda' or 'cuda:0'")
    num_devices = torch.cuda.device_count()
    index = named.index if named.index is not None else (torch.cuda.current_device() if num_devices else 0)
    if index >= num_devices:
        raise DeviceUnavailableError(f"{named} is not available: torch sees {num_devices} CUDA devices")
    return torch.device("cuda", index)


def require_tensor(
    tensor: object,
    what: str,
    *,
    dtype: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device,
) -> torch.Tensor:
    """Check a tensor and return it.

    Args:
        what: its name in messages.
        dtype: the allowed type or types.
        shape: its extents; None allows any.
        device: the device on which it must be.

    Raises:
        TensorError: it is not a tensor, or has another type, shape or device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{what} must be a tensor, got {type(tensor).__name__}")
    require_device(tensor, what, device)
    taken = [dtype] if isinstance(dtype, torch.dtype) else list(dtype)
    if tensor.dtype not in taken:
        raise TensorError(f"{what} must be of {' or '.join(map(str, taken))}, got {tensor.dtype}")
    fits = len(tensor.shape) == len(shape) and all(
        wanted is None or wanted == given for wanted, given in zip(shape, tensor.shape, strict=False)
    )
    if not fits:
        wanted_shape = ["any" if wanted is None else wanted for wanted in shape]
        raise TensorError(f"{what} must have the shape {wanted_shape}, got {list(tensor.shape)}")
    return tensor


def require_device(tensor: torch.Tensor, what: str, device: torch.device) -> None:
    """Raise TensorError for a tensor on another device."""
    if tensor.device != device:
        raise TensorError(f"{what} must be on {device}, got one on {tensor.device}")


def require_pinned(tensor: torch.Tensor, what: str) -> None:
    """Raise TensorError for host memory that a GPU cannot copy from asynchronously."""
    if tensor.device.type != "cpu" or not tensor.is_pinned():
        where = f"one on {tensor.device}" if tensor.device.type != "cpu" else "memory that the system may move"
        raise TensorError(f"{what} must be in pinned host memory, got {where}: allocate it with pin_memory=True")


def require_numbers(tensor: torch.Tensor, what: str, stop: int) -> None:
    """Raise TensorError for numbers outside ``[0, stop)``, if they are on a CPU; on a GPU nothing is checked."""
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return
    least, most = int(tensor.min()), int(tensor.max())
    if least < 0 or most >= stop:
        raise TensorError(f"{what} must be from 0 to {stop - 1}, got {least} to {most}")


def require_slots(slots: torch.Tensor, what: str, num_slots: int) -> None:
    """Raise TensorError for slots outside the pool, except -1. Reads the tensor, so on a GPU the host waits."""
    if slots.numel() == 0:
        return
    least, most = int(slots.min()), int(slots.max())
    if least < -1 or most >= num_slots:
        worst = least if least < -1 else most
        raise TensorError(f"{what} has slot {worst}, but there are {num_slots:,} slots (-1: none)")
