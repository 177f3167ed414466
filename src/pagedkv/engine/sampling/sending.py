"""Copies of tensors between host and device that the host does not wait for, from and to pinned memory."""

import torch

__all__ = ["fetched", "sent"]


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device. From pageable memory the host would wait until the device is done with earlier work."""
    if device.type != "cuda" or numbers.is_cuda:
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def fetched(numbers: torch.Tensor) -> torch.Tensor:
    """Begin to copy numbers to the host. The copy is complete once an event that is recorded after this call is."""
    return numbers.to("cpu", non_blocking=True)  # into pinned memory
