"""One model on several ranks: each process computes some heads of every layer, and stores their keys and values.

::

    rank 0     requests, scheduler, block space --> plan and tokens of a step --+--> model, blocks, sampling
    rank 1..   (the same model, the same tables)                                +--> model, blocks

Only rank 0 schedules and samples. It sends the plan of each step unchanged (``StepPlan.buffer``), so the block tables
are equal on all ranks: a block has the same id everywhere, and each rank stores its own heads of it. Within a layer the
ranks sum their partial results (all-reduce of torch.distributed), so the loss of one rank ends all of them.
:mod:`~pagedkv.engine.sharding` says which part of each weight a rank keeps, :mod:`~pagedkv.engine.ranked_content` what
the other ranks do, and how tiers see the whole model.

There are groups of torch.distributed: one sums the results of layers, by NCCL on GPUs and by gloo elsewhere; one sends
steps from rank 0 to all, and one for each other rank its rows of blocks, by gloo. Rank 0 may have nothing to compute
for long, so the latter have no timeout. A rank that waits in them asks each second whether a rank is lost
(:class:`PeerWatch`). Where a rank waits for its GPU, which waits for a lost rank, the watch ends NCCL's kernels, and
:meth:`RankGroup.finish_step` raises the error before their results are used.

A rank that waits for its GPU raises no error: the GPU waits for the other ranks. So a thread of each rank watches the
others, and ends that wait. Each rank has a connection to rank 0::

    rank 1 ---+
    rank 2 ---+--- rank 0       a byte at least each second, both ways; a rank that leaves in order says so first
    rank 3 ---+

If a connection ends without that, or is silent for too long, a rank is lost. Rank 0 then names it to the others.
"""

import atexit
import os
import pickle
import re
import secrets
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from time import monotonic
from typing import Any, Final, Self, final

import numpy as np
import torch
from torch import distributed

from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.device import is_device_failure
from pagedkv.engine.runner import FlatBatch
from pagedkv.errors import ConfigurationError, EngineError, RankLostError
from pagedkv.tiers.entry_blocks import Rows

IDLE: Final = timedelta(days=365)
LAYER: Final = timedelta(seconds=60)
LOOK: Final = timedelta(seconds=1)
"""A rank that waits for a message asks as often whether a rank is lost."""
WATCHDOG: Final = 10
"""NCCL's own timeout ends a process without an error to read, so it is so many times as long as that of the watch."""
INLINE_NBYTES: Final = 2**14
"""Messages up to this size, as those of decode steps, are one broadcast."""
HEADER: Final = struct.Struct("<qq")
REMEDY: Final = "Start all ranks again: docs/ranks.md"


class _Kind(IntEnum):
    STEP = 1
    END = 2
    COPY = 3
    WEIGHTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class SentStep:
    """A step as rank 0 sends it.

    Args:
        plan: its plan; batch: its tokens.
        is_scored: whether rank 0 scores prompts in it. All ranks run such a step call by call.
    """

    plan: StepPlan
    batch: FlatBatch
    is_scored: bool


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


@dataclass(frozen=True, slots=True)
class SentWeights:
    """New weights, which all ranks set before the next step. ``weights_epoch``: as of rank 0."""

    weights_epoch: str | int


@final
class RankGroup:
    """The ranks of one model. Each process makes one, with the same address and size.

    Args:
        rank: number of this process, from 0; size: number of processes.
        address: HOST:PORT where rank 0 listens, and to which the other ranks connect.
        device: where this rank's model is: "cpu", a GPU as "cuda:1", or "cuda": one GPU of this host for each rank, in
            their order. It becomes the process's current GPU.
        layer_timeout: a rank is lost if its process does not answer for this time; on a CPU, also if it does not take
            part in a layer's sum within it.

    Attributes:
        device: this rank's device.
        lifetime: changes when the loops of the other ranks end, or a rank is lost.

    Raises:
        ConfigurationError: ``rank`` is not below ``size``, there is no such device, the ranks do not connect, or this
            process has a group of torch.distributed already.
    """

    def __init__(
        self, rank: int, size: int, address: str, *, device: str = "cpu", layer_timeout: timedelta = LAYER
    ) -> None:
        as_count(size, "size", least=1)
        self.rank = as_count(rank, "rank", most=size - 1)
        self.size = size
        self.lifetime = 0
        self.device = _device_of(device, rank)
        self._before_end: list[weakref.WeakMethod[Callable[[], object]]] = []
        self._is_open = True
        self._num_steps_open = 0  # sent by rank 0, and not finished there
        self._is_ended = self.rank > 0  # whether the other ranks' loops have ended, or have not begun here
        self._is_gpu = self.device.type == "cuda"
        self._layers: distributed.ProcessGroup | None = None
        self._steps: distributed.ProcessGroup | None = None
        self._pairs: dict[int, distributed.ProcessGroup] = {}
        if distributed.is_initialized():
            raise ConfigurationError("this process has a group of torch.distributed already: close it first")
        try:
            self._connect(address, layer_timeout)
        except (RuntimeError, ValueError, OSError) as problem:
            if distributed.is_initialized():
                distributed.destroy_process_group()
            raise ConfigurationError(
                f"rank {rank} of {size} cannot connect to the other ranks at {address}: {problem}"
            ) from None

    @classmethod
    def from_environment(cls, *, device: str = "cpu") -> Self:
        """Make the group from the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

        On "cuda" a rank has the GPU with the number LOCAL_RANK, or without this variable, that of its rank.

        Raises ConfigurationError: a variable is missing or no number, and for the reasons of the class.
        """
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ConfigurationError(
                f"environment variables are not set: {', '.join(missing)}. Start the ranks by torchrun"
            )
        rank, size, host, port = (os.environ[name] for name in names)
        if not (rank.isdecimal() and size.isdecimal()):
            raise ConfigurationError(f"RANK and WORLD_SIZE are no numbers: {rank!r} and {size!r}")
        if device == "cuda" and "LOCAL_RANK" in os.environ:
            device = f"cuda:{os.environ['LOCAL_RANK']}"
        host = f"[{host}]" if ":" in host else host
        return cls(int(rank), int(size), f"{host}:{port}", device=device)

    @property
    def is_first(self) -> bool:
        """Whether this rank plans and samples."""
        return self.rank == 0

    # Together

    def meet(self) -> None:
        """Wait until all ranks are here, for as long as none is lost. Raises RankLostError."""
        self.agree(True)  # noqa: FBT003 - its only argument

    def agree(self, finding: bool, /) -> bool:  # noqa: FBT001 - its only argument
        """Return whether all ranks found so; all of them ask at the same point. Raises RankLostError."""
        found = torch.tensor([int(finding)])
        with self._as_lost("a step"):
            self._wait(distributed.all_reduce(found, distributed.ReduceOp.MIN, group=self._steps, async_op=True))
        return bool(found.item())

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place, within a layer. Raises RankLostError: a rank is lost."""
        with self._as_lost("a layer"):
            distributed.all_reduce(tensor, group=self._layers)

    def share(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of rank 0 to all ranks, in place, behind what the devices do now. Raises RankLostError."""
        with self._as_lost("a step"):
            distributed.broadcast(tensor, 0, group=self._layers)

    def require_all(self) -> None:
        """Raise RankLostError if a rank is lost: what this rank's GPU has computed since may be wrong."""
        with self._as_lost("a step"):
            pass

    # Messages of rank 0

    def send(self, step: SentStep) -> None:
        """Send a step to the other ranks, before rank 0 runs it. Raises RankLostError."""
        self._num_steps_open += 1
        parts = (step.plan.buffer.tobytes(), _parts_of(step.batch), step.is_scored)
        self._broadcast(_Kind.STEP, pickle.dumps(parts, pickle.HIGHEST_PROTOCOL))

    def finish_step(self) -> None:
        """Note that rank 0 has the results of the first step that is open. Raises RankLostError: they may be wrong."""
        self.require_all()
        self._num_steps_open -= 1

    def send_copy(self, copy: SentCopy) -> None:
        """Send the copy that rank 0 does next with some of the other ranks. Raises RankLostError."""
        parts = (copy.group, copy.block_ids, copy.ranks, copy.is_write)
        self._broadcast(_Kind.COPY, pickle.dumps(parts, pickle.HIGHEST_PROTOCOL))

    def send_weights(self, weights: SentWeights) -> None:
        """Send that all ranks set new weights. Raises RankLostError."""
        self._broadcast(_Kind.WEIGHTS, pickle.dumps(weights.weights_epoch, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> SentStep | SentCopy | SentWeights | None:
        """Wait for what comes next and return it; None at the end. Raises RankLostError: rank 0 is lost."""
        self._is_ended = False
        first = np.empty(HEADER.size + INLINE_NBYTES, np.uint8)
        with self._as_lost("a step"):
            self._pass_on(first, 0, self._steps)
            kind, nbytes = HEADER.unpack_from(first.data)
            if kind == _Kind.END:
                self._is_ended = True
                return None
            rest = np.empty(max(0, nbytes - INLINE_NBYTES), np.uint8)
            if len(rest):
                self._pass_on(rest, 0, self._steps)
        payload = first[HEADER.size : HEADER.size + nbytes].tobytes() + rest.tobytes()
        sent = pickle.loads(payload)  # noqa: S301 - from rank 0 of the same engine
        if kind == _Kind.WEIGHTS:
            return SentWeights(sent)
        if kind == _Kind.COPY:
            group, block_ids, ranks, is_write = sent
            return SentCopy(group, block_ids, ranks, is_write=is_write)
        buffer, parts, is_scored = sent
        return SentStep(StepPlan.from_buffer(buffer), FlatBatch(**parts), is_scored)

    def send_rows(self, rank: int, rows: Rows) -> None:
        """Send rows, uint8 ``[n, nbytes]``, to a rank that receives them next; one of the two is rank 0.

        Raises RankLostError.
        """
        with self._as_lost("a copy of blocks"):
            self._pass_on(np.array(rows, np.uint8, order="C"), self.rank, self._pairs[rank or self.rank])

    def receive_rows(self, rank: int, shape: tuple[int, int]) -> Rows:
        """Wait for rows of this shape from a rank; one of the two is rank 0. Raises RankLostError."""
        rows = np.empty(shape, np.uint8)
        with self._as_lost("a copy of blocks"):
            self._pass_on(rows, rank, self._pairs[rank or self.rank])
        return rows

    # The end

    def before_end(self, action: Callable[[], object]) -> None:
        """Call a method before the sums of layers end: NCCL waits for graphs that have its kernels to be dropped.

        The method's object is not kept alive.
        """
        self._before_end = [each for each in self._before_end if each() is not None]
        self._before_end.append(weakref.WeakMethod(action))

    def end(self) -> None:
        """On rank 0, end the loops of the other ranks. The group stays open, for another engine of the same ranks."""
        if self.is_first:
            self.lifetime += 1
            self._broadcast(_Kind.END, b"")
            self._is_ended = True

    def close(self) -> None:
        """End the loops of the other ranks, as :meth:`end` does, and leave the group. May be called again.

        Graphs of steps cannot be replayed afterwards. A rank that closes within a step, or before rank 0 has ended its
        loop, is lost to the others.
        """
        if not self._is_open:
            return
        if self.is_first and not (self._is_ended or self._num_steps_open):
            with suppress(RankLostError):  # a lost rank has ended already
                self.end()
        self._watch.close(in_order=self._is_ended and self._watch.loss is None)
        self._is_open = False
        if self._is_gpu and self._is_ended and self._watch.loss is None:
            torch.cuda.synchronize(self.device)
        self._end_layers()
        atexit.unregister(self._end_layers)
        distributed.destroy_process_group()
        self._steps, self._pairs = None, {}

    def _end_layers(self) -> None:
        """End the sums that GPUs wait for. May be called again, also in another thread."""
        layers, self._layers = self._layers, None
        if self._is_gpu and layers is not None:
            for of_object in self._before_end:
                if (action := of_object()) is not None:
                    with suppress(Exception):  # the sums end in any case
                        action()
            layers.abort()

    # Connections

    def _connect(self, address: str, layer_timeout: timedelta) -> None:
        distributed.init_process_group(
            "nccl" if self._is_gpu else "gloo",
            init_method=f"tcp://{address}",
            rank=self.rank,
            world_size=self.size,
            timeout=layer_timeout * WATCHDOG if self._is_gpu else layer_timeout,
            device_id=self.device if self._is_gpu else None,
        )
        self._layers = distributed.group.WORLD
        self._steps = distributed.new_group(backend="gloo", timeout=IDLE)
        self._pairs = {
            rank: distributed.new_group([0, rank], backend="gloo", timeout=IDLE) for rank in range(1, self.size)
        }
        seconds = layer_timeout.total_seconds()
        if self.is_first:
            peers = connect_to_others(self.size, self._share, seconds)
        else:
            peers = connect_to_first(self.rank, address.rpartition(":")[0].strip("[]"), self._share, seconds)
        self._watch = PeerWatch(peers, seconds, self._end_layers)
        atexit.register(self._end_layers)  # also after an error: otherwise the end of Python waits for NCCL

    def _share(self, words: bytes) -> bytes:
        """Return the words of rank 0."""
        shared = torch.from_numpy(np.frombuffer(words, np.uint8).copy())
        distributed.broadcast(shared, 0, group=self._steps)
        return shared.numpy().tobytes()

    def _broadcast(self, kind: _Kind, payload: bytes) -> None:
        message = np.frombuffer(HEADER.pack(kind, len(payload)) + payload, np.uint8)
        first = np.zeros(HEADER.size + INLINE_NBYTES, np.uint8)
        first[: len(message)] = message[: len(first)]
        self._is_ended = False
        with self._as_lost("a step"):
            self._pass_on(first, 0, self._steps)
            if len(message) > len(first):
                self._pass_on(message[len(first) :].copy(), 0, self._steps)

    def _pass_on(self, words: Rows, source: int, group: distributed.ProcessGroup | None) -> None:
        """Send an array from one rank to the others of a group."""
        self._wait(distributed.broadcast(torch.from_numpy(words), source, group=group, async_op=True))

    def _wait(self, work: distributed.Work | None) -> None:
        """Wait for the end of a call of gloo, for as long as no rank is lost."""
        while work is not None:
            try:
                work.wait(LOOK)
            except RuntimeError as problem:
                if self._watch.gone is not None or "timed out" not in str(problem).lower():
                    raise
            else:
                return

    @contextmanager
    def _as_lost(self, where: str) -> Iterator[None]:
        """Raise the errors of torch.distributed, and the loss of a rank that was noticed before, as RankLostError."""
        if not self._is_open:
            raise EngineError("the ranks' group is closed: make another RankGroup on all ranks, and another engine")
        if self._watch.loss is not None:
            raise self._lost(where, self._watch.loss)
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            if is_device_failure(problem) and self._watch.loss is None:
                raise
            raise self._lost(where, self._watch.gone or str(problem).splitlines()[0][:200]) from problem

    def _lost(self, where: str, reason: str) -> RankLostError:
        self.lifetime += 1
        return RankLostError(
            f"rank {self.rank} of {self.size} cannot finish {where}: another rank has ended or does not answer "
            f"({reason}). {REMEDY}"
        )


def _device_of(name: str, rank: int) -> torch.device:
    """Return a rank's device, which becomes the current one if it is a GPU. Raises ConfigurationError."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigurationError(f"a rank's device is 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if name == "cpu":
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


INTERVAL_S: Final = 1.0
ALIVE: Final = b"."
LEAVES: Final = b"E"
LOST: Final = b"L"
"""The rest of the words is a text: which rank is lost, and how that was noticed."""
HELLO_S: Final = 5.0
"""What connects and is no rank may be silent for so long."""
NUM_KEY_BYTES: Final = 16
NUM_RANK_BYTES: Final = 4


@final
class PeerWatch:
    """Watches connections to other ranks, in a thread.

    Args:
        peers: the connections, by rank.
        patience_s: a rank that is silent for this time is lost.
        on_loss: called once in the thread, when :attr:`loss` is set.

    Attributes:
        loss: which rank is lost, and how that was noticed; None: none is.
    """

    def __init__(self, peers: dict[int, socket.socket], patience_s: float, on_loss: Callable[[], object]) -> None:
        self.loss: str | None = None
        self._peers = peers
        self._patience_s = patience_s
        self._on_loss = on_loss
        self._is_in_order = True
        self._left: list[int] = []
        self._waking, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._heard_at = dict.fromkeys(peers, monotonic())
        for rank, peer in peers.items():
            peer.setblocking(False)  # noqa: FBT003 - its only argument
            self._selector.register(peer, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    @property
    def gone(self) -> str | None:
        """Why what this rank waits for does not come: a rank is lost, or has left in order; None: neither."""
        return self.loss or (f"rank {self._left[0]} has left" if self._left else None)

    def close(self, *, in_order: bool = True) -> None:
        """End the watch. May be called again.

        Args:
            in_order: whether this rank says to the others that it leaves; if not, it is lost to them.
        """
        self._is_in_order = in_order
        with suppress(OSError):  # the thread has ended, or is ending
            self._waking.send(LEAVES)
        self._thread.join()

    def _watch(self) -> None:
        try:
            while self.loss is None and not self._is_leaving():
                self._send_to_all(ALIVE)
                self._find_silent()
            if self.loss is not None:
                self._send_to_all(LOST + self.loss.encode())
            elif self._is_in_order:
                self._send_to_all(LEAVES)
        finally:
            self._selector.close()
            for each in (*self._peers.values(), self._waking, self._woken):
                each.close()
        if self.loss is not None:
            self._on_loss()

    def _is_leaving(self) -> bool:
        """Read what has come within the interval; return whether this rank is to leave."""
        for key, _ in self._selector.select(min(INTERVAL_S, self._patience_s / 4)):
            if key.fileobj is self._woken:
                return True
            self._read(key.data)
        return False

    def _read(self, rank: int) -> None:
        try:
            received = self._peers[rank].recv(4096)
        except OSError:
            received = b""
        word = received.lstrip(ALIVE)
        if not received:
            self.loss = f"rank {rank} has ended"
        elif word.startswith(LOST):
            self.loss = word[len(LOST) :].decode()
        elif word:
            self._left.append(rank)
            peer = self._peers.pop(rank)
            self._selector.unregister(peer)
            peer.close()
        self._heard_at[rank] = monotonic()

    def _find_silent(self) -> None:
        for rank in self._peers:
            silent_s = monotonic() - self._heard_at[rank]
            if self.loss is None and silent_s > self._patience_s:
                self.loss = f"rank {rank} has not answered for {silent_s:.0f} seconds"

    def _send_to_all(self, word: bytes) -> None:
        for peer in self._peers.values():
            try:
                peer.send(word)
            except OSError:
                continue  # its end is read next


def connect_to_others(size: int, share: Callable[[bytes], bytes], timeout_s: float) -> dict[int, socket.socket]:
    """On rank 0, accept a connection of every other rank; return them by rank.

    Args:
        size: number of ranks.
        share: sends bytes of rank 0 to all ranks.
        timeout_s: for all ranks to connect.

    Raises:
        OSError: a rank did not connect in time.
    """
    key = secrets.token_bytes(NUM_KEY_BYTES)
    peers: dict[int, socket.socket] = {}
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual) as listener:
        listener.settimeout(timeout_s)
        share(key + listener.getsockname()[1].to_bytes(NUM_RANK_BYTES))
        while len(peers) < size - 1:
            peer, _ = listener.accept()
            rank = _rank_behind(peer, key)
            if rank in range(1, size) and rank not in peers:
                peers[rank] = peer
            else:
                peer.close()
    return peers


def _rank_behind(peer: socket.socket, key: bytes) -> int:
    """Return the rank that has connected; 0: it is none."""
    peer.settimeout(HELLO_S)
    hello = b""
    with suppress(OSError):
        while len(hello) < NUM_KEY_BYTES + NUM_RANK_BYTES and (words := peer.recv(NUM_KEY_BYTES + NUM_RANK_BYTES)):
            hello += words
    is_rank = hello[:NUM_KEY_BYTES] == key and len(hello) == NUM_KEY_BYTES + NUM_RANK_BYTES
    return int.from_bytes(hello[NUM_KEY_BYTES:]) if is_rank else 0


def connect_to_first(
    rank: int, host: str, share: Callable[[bytes], bytes], timeout_s: float
) -> dict[int, socket.socket]:
    """On another rank, connect to rank 0 at a host; return the connection. Raises OSError: rank 0 does not answer."""
    shared = share(bytes(NUM_KEY_BYTES + NUM_RANK_BYTES))
    key, port = shared[:NUM_KEY_BYTES], int.from_bytes(shared[NUM_KEY_BYTES:])
    peer = socket.create_connection((host, port), timeout=timeout_s)
    peer.sendall(key + rank.to_bytes(NUM_RANK_BYTES))
    return {0: peer}
