"""PacketRing: pinned buffers that the host fills and a GPU reads, each protected by an event.

A buffer is rewritten only when its event shows that the kernel that read it has ended. The GPU counts its packets
itself (``clock``), so a captured graph needs no argument to locate the next packet. Hence the host must launch each
packet exactly once, before it stages the next one.
"""

from typing import final

import numpy as np
import torch

from pagedkv.contract.arrays import Int32Array
from pagedkv.device.tensors import require_pinned
from pagedkv.errors import StepError

__all__ = ["PacketRing"]


@final
class PacketRing:
    """Buffers for packets from the host to a device.

    Args:
        buffers: int32 ``[num_buffers, words]``, in pinned memory if the device is a GPU.
        device: the device that reads them.

    Attributes:
        num_words: words of a buffer.

    Raises:
        TensorError: the device is a GPU, and the buffers are not pinned.
    """

    def __init__(self, buffers: torch.Tensor, device: torch.device) -> None:
        if device.type == "cuda":
            require_pinned(buffers, "the ring of packets")
        self.num_words = buffers.shape[1]
        self._views = [buffer.numpy() for buffer in buffers]
        self._stream_of = device if device.type == "cuda" else None
        self._events: list[torch.cuda.Event | None] = [None] * len(buffers)
        self._num_staged = 0
        self._num_fenced = 0

    @property
    def is_staged(self) -> bool:
        """Whether a packet is staged and not launched."""
        return self._num_staged > self._num_fenced

    def stage(self, words: Int32Array) -> None:
        """Write a packet to the next buffer, once the device has read the buffer's earlier packet.

        Raises:
            StepError: the previous packet was not launched, or not fenced.

        Cost: O(words). While the device has not read the packets of any buffer, the host waits.
        """
        if self.is_staged:
            raise StepError("a packet is already staged: launch and fence it before the next one")
        place = self._num_staged % len(self._views)
        event = self._events[place]
        if event is not None:
            event.synchronize()
        np.copyto(self._views[place][: len(words)], words)
        self._num_staged += 1

    def fence(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Record that the launch of the staged packet is in a stream; None: in the current one.

        Raises:
            StepError: nothing is staged.
        """
        if not self.is_staged:
            raise StepError("there is no staged packet to fence: stage and launch one first")
        if self._stream_of is not None:
            place = self._num_fenced % len(self._views)
            event = self._events[place] or torch.cuda.Event()
            event.record(stream or torch.cuda.current_stream(self._stream_of))
            self._events[place] = event
        self._num_fenced += 1
