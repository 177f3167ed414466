"""Numbers on their way between host and device, without the host's waiting: from and to pinned memory."""

import torch

__all__ = ["fetched", "sent"]


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send numbers to a device; copies of pageable memory would wait for what the device has to do before."""
    if device.type != "cuda" or numbers.is_cuda:
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def fetched(numbers: torch.Tensor) -> torch.Tensor:
    """Begin to copy numbers to the host: they are there when an event behind this has come to pass."""
    return numbers.to("cpu", non_blocking=True)  # into pinned memory
