"""RankGroup: the processes that one model is split over, and the messages that rank 0 sends to the others.

There are two groups of torch.distributed. One sums the results of layers, by NCCL on GPUs and by gloo elsewhere. The
other sends steps, by gloo, and has a timeout of a year, since rank 0 may have nothing to compute for long. A process
that dies closes its sockets, so that the next call of every other rank fails. Where a rank waits for its GPU, which
waits for a lost rank, its :class:`PeerWatch` ends NCCL's kernels, and :meth:`RankGroup.require_all` raises the error
before their results are used.
"""

import atexit
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final, Self, final

import numpy as np
import torch
from torch import distributed

from pagedkv.memory.contract.arguments import as_count
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.errors import ConfigurationError, RankLostError
from pagedkv.memory.contract.plan import StepPlan
from pagedkv.memory.tiering import Rows
from pagedkv.serving.engine.flat_batch import FlatBatch
from pagedkv.serving.engine.ranks.peer_watch import PeerWatch, connect_to_first, connect_to_others

__all__ = ["RankGroup", "SentCopy", "SentStep"]

IDLE: Final = timedelta(days=365)
LAYER: Final = timedelta(seconds=60)
INLINE_NBYTES: Final = 2**14
"""Messages up to this size, as those of decode steps, are one broadcast."""
_HEADER: Final = struct.Struct("<qq")
REMEDY: Final = "Start all ranks again: docs/ranks.md"


class _Kind(IntEnum):
    STEP = 1
    END = 2
    COPY = 3


@final
class SentStep:
    """A step as the other ranks receive it: its plan and its tokens."""

    __slots__ = ("batch", "plan")

    def __init__(self, plan: StepPlan, batch: FlatBatch) -> None:
        self.plan = plan
        self.batch = batch


@dataclass(frozen=True, slots=True, eq=False)
class SentCopy:
    """A copy of blocks between rank 0 and other ranks, whose rows are sent after it.

    Args:
        group: whose blocks; block_ids: int32 ``[n]``.
        ranks: which ranks send their blocks to rank 0, or get theirs from it; each calls :meth:`RankGroup.send_rows` or
            :meth:`RankGroup.receive_rows` next.
        is_write: whether blocks are written; otherwise they are read.
    """

    group: int
    block_ids: Int32Array
    ranks: tuple[int, ...]
    is_write: bool


@final
class RankGroup:
    """The ranks of one model. Each process makes one, with the same address and size.

    Args:
        rank: number of this process, from 0; size: number of processes.
        address: HOST:PORT where rank 0 listens, and to which the other ranks connect.
        device: where this rank's model is: "cpu", a GPU as "cuda:1", or "cuda": one GPU of this host for each rank, in
            their order. It becomes the process's current GPU.
        layer_timeout: a rank that does not take part in a layer's sum within this time, or whose process does not
            answer for it, is lost.

    Attributes:
        device: this rank's device.
        lifetime: changes when the loops of the other ranks end, or a rank is lost.

    Raises:
        ConfigurationError: ``rank`` is not below ``size``, there is no such GPU, or the ranks do not connect.
    """

    def __init__(
        self, rank: int, size: int, address: str, *, device: str = "cpu", layer_timeout: timedelta = LAYER
    ) -> None:
        as_count(size, "size", least=1)
        self.rank = as_count(rank, "rank", most=size - 1)
        self.size = size
        self.lifetime = 0
        self._before_end: list[weakref.WeakMethod[Callable[[], object]]] = []
        self.device = _device_of(device, rank)
        is_gpu = self.device.type == "cuda"
        try:
            distributed.init_process_group(
                "nccl" if is_gpu else "gloo",
                init_method=f"tcp://{address}",
                rank=rank,
                world_size=size,
                timeout=layer_timeout,
                device_id=self.device if is_gpu else None,
            )
            self._layers = distributed.group.WORLD
            self._steps = distributed.new_group(backend="gloo", timeout=IDLE)
            seconds = layer_timeout.total_seconds()
            self._watch = PeerWatch(self._connected(address, seconds), seconds, self._end_layers)
            atexit.register(self._end_layers)  # also after an error: otherwise the end of Python waits for NCCL
        except (RuntimeError, ValueError, OSError) as problem:
            raise ConfigurationError(
                f"rank {rank} of {size} cannot connect to the other ranks at {address}: {problem}"
            ) from None

    @classmethod
    def from_environment(cls, *, device: str = "cpu") -> Self:
        """Make the group from the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

        On "cuda" a rank has the GPU with the number LOCAL_RANK, or without this variable, that of its rank.

        Raises ConfigurationError: a variable is missing, and for the reasons of the class.
        """
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ConfigurationError(
                f"environment variables are not set: {', '.join(missing)}. Start the ranks by torchrun"
            )
        rank, size, host, port = (os.environ[name] for name in names)
        if device == "cuda" and "LOCAL_RANK" in os.environ:
            device = f"cuda:{os.environ['LOCAL_RANK']}"
        return cls(int(rank), int(size), f"{host}:{port}", device=device)

    @property
    def is_first(self) -> bool:
        """Whether this rank plans and samples."""
        return self.rank == 0

    def before_end(self, action: Callable[[], object]) -> None:
        """Call a method before the sums of layers end: NCCL waits for graphs that have its kernels to be dropped.

        The method's object is not kept alive.
        """
        self._before_end.append(weakref.WeakMethod(action))

    def require_all(self) -> None:
        """Raise RankLostError if a rank is lost: what this rank's GPU has computed since may be wrong."""
        with self._as_lost("a step"):
            pass

    def agree(self, finding: bool) -> bool:  # noqa: FBT001 - what each rank found
        """Return whether all ranks found so; all of them ask at the same point of a step. Raises RankLostError."""
        with self._as_lost("a step"):
            found = torch.tensor([int(finding)])
            distributed.all_reduce(found, distributed.ReduceOp.MIN, group=self._steps)
        return bool(found.item())

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place, within a layer. Raises RankLostError: a rank is lost."""
        with self._as_lost("a layer"):
            distributed.all_reduce(tensor)

    def send(self, plan: StepPlan, batch: FlatBatch) -> None:
        """Send a step to the other ranks, before rank 0 runs it. Raises RankLostError."""
        self._broadcast(_Kind.STEP, pickle.dumps((plan.buffer.tobytes(), _parts_of(batch)), pickle.HIGHEST_PROTOCOL))

    def send_copy(self, copy: SentCopy) -> None:
        """Send the copy that rank 0 does next with some of the other ranks. Raises RankLostError."""
        parts = (copy.group, copy.block_ids, copy.ranks, copy.is_write)
        self._broadcast(_Kind.COPY, pickle.dumps(parts, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> SentStep | SentCopy | None:
        """Wait for the next step or copy and return it; None at the end. Raises RankLostError: rank 0 is lost."""
        first = np.empty(_HEADER.size + INLINE_NBYTES, np.uint8)
        with self._as_lost("a step"):
            distributed.broadcast(torch.from_numpy(first), 0, group=self._steps)
            kind, nbytes = _HEADER.unpack_from(first.data)
            if kind == _Kind.END:
                return None
            rest = np.empty(max(0, nbytes - INLINE_NBYTES), np.uint8)
            if len(rest):
                distributed.broadcast(torch.from_numpy(rest), 0, group=self._steps)
        payload = first[_HEADER.size : _HEADER.size + nbytes].tobytes() + rest.tobytes()
        sent = pickle.loads(payload)  # noqa: S301 - from rank 0 of the same engine
        if kind == _Kind.COPY:
            group, block_ids, ranks, is_write = sent
            return SentCopy(group, block_ids, ranks, is_write=is_write)
        buffer, parts = sent
        return SentStep(StepPlan.from_buffer(buffer), FlatBatch(**parts))

    def send_rows(self, rank: int, rows: Rows) -> None:
        """Send rows to a rank, uint8 ``[n, nbytes]``, which receives them next. Raises RankLostError."""
        with self._as_lost("a copy of blocks"):
            distributed.send(torch.from_numpy(np.ascontiguousarray(rows)), rank, group=self._steps)

    def receive_rows(self, rank: int, shape: tuple[int, int]) -> Rows:
        """Wait for rows of this shape from a rank. Raises RankLostError."""
        rows = np.empty(shape, np.uint8)
        with self._as_lost("a copy of blocks"):
            distributed.recv(torch.from_numpy(rows), rank, group=self._steps)
        return rows

    def end(self) -> None:
        """On rank 0, end the loops of the other ranks. The group stays open, for another engine of the same ranks."""
        if self.is_first:
            self.lifetime += 1
            self._broadcast(_Kind.END, b"")

    def close(self) -> None:
        """End the loops of the other ranks, as :meth:`end` does, and leave the group. May be called again.

        Graphs of steps cannot be replayed afterwards.
        """
        if not distributed.is_initialized():
            return
        with suppress(RankLostError):  # a lost rank has ended already
            self.end()
        self._watch.close()
        if self.device.type == "cuda" and self._watch.loss is None:
            torch.cuda.synchronize(self.device)
            self._end_layers()
        atexit.unregister(self._end_layers)
        distributed.destroy_process_group()

    def _broadcast(self, kind: _Kind, payload: bytes) -> None:
        with self._as_lost("a step"):
            message = bytearray(_HEADER.pack(kind, len(payload)) + payload)
            num_first = _HEADER.size + INLINE_NBYTES
            first = torch.frombuffer(message[:num_first].ljust(num_first, b"\0"), dtype=torch.uint8)
            distributed.broadcast(first, 0, group=self._steps)
            if len(message) > num_first:
                distributed.broadcast(torch.frombuffer(message[num_first:], dtype=torch.uint8), 0, group=self._steps)

    def _connected(self, address: str, timeout_s: float) -> dict[int, socket.socket]:
        """Connect to rank 0, or on rank 0 to all others."""

        def share(words: bytes) -> bytes:
            shared = torch.from_numpy(np.frombuffer(words, np.uint8).copy())
            distributed.broadcast(shared, 0, group=self._steps)
            return shared.numpy().tobytes()

        if self.is_first:
            return connect_to_others(self.size, share, timeout_s)
        host = address.rpartition(":")[0].strip("[]")
        return connect_to_first(self.rank, host, share, timeout_s)

    def _end_layers(self) -> None:
        """End the sums that GPUs wait for. May be called again, also in another thread."""
        layers, self._layers = self._layers, None
        if self.device.type == "cuda" and layers is not None:
            for of_object in self._before_end:
                if (action := of_object()) is not None:
                    action()
            layers.abort()

    @contextmanager
    def _as_lost(self, where: str) -> Iterator[None]:
        """Raise the errors of torch.distributed, and the loss of a rank that was noticed before, as RankLostError."""
        if self._watch.loss is not None:
            raise self._lost(where, self._watch.loss)
        try:
            yield
        except RuntimeError as problem:
            raise self._lost(where, str(problem).splitlines()[0][:200]) from problem

    def _lost(self, where: str, reason: str) -> RankLostError:
        self.lifetime += 1
        return RankLostError(
            f"rank {self.rank} of {self.size} cannot finish {where}: another rank has ended or does not answer "
            f"({reason}). {REMEDY}"
        )


def _device_of(name: str, rank: int) -> torch.device:
    """Return a rank's device, which becomes the current one if it is a GPU. Raises ConfigurationError."""
    if not name.startswith("cuda"):
        return torch.device(name)
    count = torch.cuda.device_count()
    device = torch.device(f"cuda:{rank % count}" if name == "cuda" and count else name)
    if device.index is None or device.index >= count:
        raise ConfigurationError(
            f"rank {rank} has device {name!r}, and there are {count} GPUs on this host: one is needed for each rank"
        )
    torch.cuda.set_device(device)
    return device


def _parts_of(batch: FlatBatch) -> dict[str, Any]:
    names = ("token_ids", "decoding", "num_prompt_tokens", "wanted", "source", "chunk_starts", "sources")
    return {name: getattr(batch, name) for name in names}
