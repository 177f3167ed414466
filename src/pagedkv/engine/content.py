"""StoredContent: what an engine's blocks are outside the process: their bytes, their identity, and how they are copied.

Tiers and files of prefixes have the content of the whole model. An engine in one process has it in its own storage
(:class:`OwnContent`). An engine on several ranks has parts of it in each
(:class:`~pagedkv.engine.ranked_content.RankedContent`). What the content *is* says :mod:`~pagedkv.engine.identity`.

The bytes of blocks go to the host memory of tiers and back, on a CPU at once, on a GPU beside the steps::

    blocks --- gathered, in the steps' stream --> a buffer of the device --- copy engine --> pinned buffer --> a tier
    a tier --> pinned buffer --- copy engine, behind the launched steps --> blocks of a load, which no step reads yet

On a GPU the copy engines copy. Both directions have a stream of their own, so that no step waits for them. What is read
is gathered first: the blocks may be overwritten by the next step. What is written goes straight into its blocks, which
the load holds; steps that are launched after :meth:`~GpuBlockBytes.order_steps_behind` are ordered behind it on the
device.

On a CPU tiers use plain memory of the process. On a GPU all of it is pinned, allocated at the start: what a host tier
keeps, and staging memory, which other tiers read to and into which blocks are copied before a tier stores them.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, assert_never, final

import numpy as np
import torch

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.spec import GroupSpec
from pagedkv.device import (
    FP8_TYPES,
    CopyTicket,
    KeyValueShape,
    KVStorage,
    LatentShape,
    PinnedArena,
    StateShape,
    copy_batch,
)
from pagedkv.engine.identity import Scales, identity_of, model_digest
from pagedkv.probe import compat
from pagedkv.tiers import Codec, HostMemory, Identity, Tier
from pagedkv.tiers.codecs import identity_through
from pagedkv.tiers.entry_blocks import BlockBytes, CopyEnd, HostBlocks, Rows


class StoredContent(Protocol):
    """The content of an engine's blocks, as other processes see it."""

    @property
    def nbytes(self) -> Sequence[int]:
        """Bytes of a block of each group, of all heads."""

    def identity(self, blocks_per_run: int) -> Identity:
        """Return the identity of the present content, in runs of so many blocks.

        Raises MissingExtraError: xxhash is not installed.
        """

    def open_memory(self, specs: Sequence[Tier], entry_nbytes: int) -> tuple[BlockBytes, list[HostMemory | None]]:
        """Open the copies of blocks, and for each tier the memory that it is to use; None: plain memory.

        Raises ConfigurationError: there is not so much memory, or it cannot be pinned.
        """

    def open_block_bytes(self, staging_nbytes: int) -> BlockBytes:
        """Open copies of blocks that need no tier, with staging memory of so many bytes on a GPU."""


@final
class OwnContent:
    """The content of an engine in one process.

    Args:
        model: the model; draft: the model whose layers the last groups are of, or None. Their weights are read each
            time that the identity is returned.
        specs: the groups; storage: their blocks.
    """

    def __init__(
        self, model: compat.Model, specs: Sequence[GroupSpec], storage: KVStorage, draft: compat.Model | None = None
    ) -> None:
        self._model, self._draft = model, draft
        self._specs = specs
        self._storage = storage

    @property
    def nbytes(self) -> Sequence[int]:
        """Bytes of a block of each group."""
        return block_nbytes(self._storage)

    def identity(self, blocks_per_run: int) -> Identity:
        """Return the identity of the present content. Cost: the weights are read once."""
        storage, model = self._storage, self._model
        return identity_of(
            model, model_digest(model), self._specs, storage.shapes, blocks_per_run, scales_of(storage), self._draft
        )

    def open_memory(self, specs: Sequence[Tier], entry_nbytes: int) -> tuple[BlockBytes, list[HostMemory | None]]:
        """Open the copies of blocks, and the memory of tiers."""
        return open_tier_memory(specs, self._storage, entry_nbytes)

    def open_block_bytes(self, staging_nbytes: int) -> BlockBytes:
        """Open copies of blocks that need no tier."""
        return block_bytes_with_staging(self._storage, staging_nbytes)


@final
class LossyContent:
    """The content of an engine whose tiers change numbers: as what it wraps, with another identity.

    Args:
        content: of the engine; codecs: of its tiers.
    """

    def __init__(self, content: StoredContent, codecs: Sequence[Codec]) -> None:
        self._content = content
        self._codecs = codecs

    @property
    def nbytes(self) -> Sequence[int]:
        """Bytes of a block of each group."""
        return self._content.nbytes

    def identity(self, blocks_per_run: int) -> Identity:
        """Return the identity of the present content, with the codecs that it may have been loaded through."""
        return identity_through(self._content.identity(blocks_per_run), self._codecs)

    def open_memory(self, specs: Sequence[Tier], entry_nbytes: int) -> tuple[BlockBytes, list[HostMemory | None]]:
        """Open the copies of blocks, and the memory of tiers."""
        return self._content.open_memory(specs, entry_nbytes)

    def open_block_bytes(self, staging_nbytes: int) -> BlockBytes:
        """Open copies of blocks that need no tier."""
        return self._content.open_block_bytes(staging_nbytes)


def content_through(content: StoredContent | None, codecs: Sequence[Codec]) -> StoredContent | None:
    """Return the content of an engine whose tiers have these codecs."""
    if content is None or not any(codec.is_lossy for codec in codecs):
        return content
    return LossyContent(content, codecs)


def scales_of(storage: KVStorage) -> Scales:
    """List the scales of each group of eight bits: by layer, keys before values, by head. Other types have none."""
    scales: list[tuple[float, ...]] = []
    for group, shape in enumerate(storage.shapes):
        match shape:
            case StateShape():
                scales.append(())
            case KeyValueShape() | LatentShape():
                has_scales = shape.dtype in FP8_TYPES
                scales.append(tuple(storage.scales(group).flatten().tolist()) if has_scales else ())
            case _:
                assert_never(shape)
    return tuple(scales)


@final
class CpuBlockBytes:
    """Copies on a CPU, which have ended when the call returns: :class:`~pagedkv.tiers.entry_blocks.BlockBytes`.

    Args:
        storage: its pools are block-major, as the engine's are.
    """

    read_nbytes_a_step = 32 * 2**20
    read_nbytes_a_second = 2**30
    read_nbytes_at_once = 64 * 2**20
    filled_nbytes_a_step: int | None = 64 * 2**20
    filled_nbytes_at_once = 16 * 2**20

    def __init__(self, storage: KVStorage) -> None:
        pools = [storage.pool_of(group) for group in range(len(storage.shapes))]
        assert all(pool.pieces.is_block_major for pool in pools), "blocks of the engine are contiguous"
        self._pools = pools
        self.nbytes: Sequence[int] = block_nbytes(storage)
        self.room_nbytes: int | None = None

    def read(self, group: int, block_ids: Int32Array) -> HostBlocks | None:
        """Copy blocks to the host."""
        return HostBlocks(self._blocks(group)[block_ids], CopyTicket("blocks for a tier", None))

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> CopyTicket:
        """Copy rows into blocks."""
        blocks, begin = self._blocks(group), 0
        for own in rows:
            blocks[block_ids[begin : begin + len(own)]] = own
            begin += len(own)
        return CopyTicket("blocks of a tier", None)

    def order_steps_behind(self, ticket: CopyEnd) -> None:
        """Do nothing: the copies have ended."""

    def close(self) -> None:
        """Do nothing: the copies have ended."""

    def _blocks(self, group: int) -> Rows:
        pool = self._pools[group]
        return pool.device_bytes.view(pool.num_blocks, pool.block_nbytes).numpy()


def block_nbytes(storage: KVStorage) -> list[int]:
    """Return the bytes of a block of each group."""
    return [storage.pool_of(group).block_nbytes for group in range(len(storage.shapes))]


WORDS: Final = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
"""Blocks are gathered by words of the largest of these sizes that divides them."""


@final
class GpuBlockBytes:
    """Copies on a GPU. See :class:`~pagedkv.tiers.entry_blocks.BlockBytes`.

    Args:
        storage: its pools are block-major, as the engine's are.
        arenas: pinned memory that tiers read to: rows in it are copied from where they are.
        staging: pinned memory for all else.

    Attributes:
        out_stream, in_stream: streams of the copies to the host, and of those to the device.
    """

    read_nbytes_a_step = 64 * 2**20
    read_nbytes_a_second = 16 * 2**30
    read_nbytes_at_once = 64 * 2**20
    filled_nbytes_a_step: int | None = None
    filled_nbytes_at_once = 256 * 2**20

    def __init__(self, storage: KVStorage, arenas: Sequence[PinnedArena], staging: PinnedArena) -> None:
        pools = [storage.pool_of(group) for group in range(len(storage.shapes))]
        assert all(pool.pieces.is_block_major for pool in pools), "blocks of the engine are contiguous"
        self._storage = storage
        self._device = storage.device
        self._pools = pools
        self._arenas = (*arenas, staging)
        self._staging = staging
        self.out_stream = torch.cuda.Stream(storage.device)
        self.in_stream = torch.cuda.Stream(storage.device)
        self._under_way: deque[tuple[CopyTicket, Any]] = deque()
        self.nbytes: Sequence[int] = block_nbytes(storage)

    @property
    def room_nbytes(self) -> int:
        """Bytes of staging memory that are free."""
        self._release()
        return self._staging.free_nbytes

    def read(self, group: int, block_ids: Int32Array) -> HostBlocks | None:
        """Gather blocks behind the launched steps, and begin to copy them to pinned memory; None: no room there now."""
        self._release()
        nbytes = self.nbytes[group]
        if not len(block_ids):
            return HostBlocks(np.zeros((0, nbytes), np.uint8), CopyTicket("no blocks", None))
        buffer = self._staging.take(len(block_ids) * nbytes)
        if buffer is None:
            return None
        rows = np.asarray(buffer).reshape(len(block_ids), nbytes)
        gathered = self._gathered(group, block_ids)
        source, size = np.array([gathered.data_ptr()]), np.array([rows.nbytes])
        ticket = self._copied(self.out_stream, np.array([_address(rows)]), source, size, "for a tier", (rows, gathered))
        return HostBlocks(rows, ticket)

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> CopyTicket:
        """Begin to copy rows into blocks. Rows that are not in pinned memory are copied there first, by this thread."""
        self._release()
        nbytes, pool = self.nbytes[group], self._pools[group]
        pinned = [own if self._is_pinned(own) else self._pinned(own) for own in rows]
        places = [_address(own) + np.arange(len(own), dtype=np.int64) * nbytes for own in pinned]
        blocks = pool.device_bytes.data_ptr() + block_ids.astype(np.int64) * nbytes
        sizes = np.full(len(block_ids), nbytes, np.int64)
        return self._copied(self.in_stream, blocks, np.concatenate(places), sizes, "of a tier", pinned)

    def order_steps_behind(self, ticket: CopyEnd) -> None:
        """Order all steps from now on behind a copy, on the device."""
        if ticket.event is not None:
            torch.cuda.current_stream(self._device).wait_event(ticket.event)

    def close(self) -> None:
        """Wait for all copies."""
        for ticket, _ in self._under_way:
            ticket.wait()
        self._under_way.clear()

    def _gathered(self, group: int, block_ids: Int32Array) -> torch.Tensor:
        """Copy blocks together on the device, in the current stream."""
        pool, nbytes = self._pools[group], self.nbytes[group]
        size, dtype = next(each for each in WORDS if nbytes % each[0] == 0)
        blocks = pool.device_bytes.view(dtype).view(pool.num_blocks, nbytes // size)
        ids = torch.from_numpy(block_ids.astype(np.int64)).pin_memory().to(self._device, non_blocking=True)
        gathered = blocks.index_select(0, ids)
        gathered.record_stream(self.out_stream)
        return gathered

    def _copied(
        self,
        stream: torch.cuda.Stream,
        destinations: "np.typing.NDArray[np.int64]",
        sources: "np.typing.NDArray[np.int64]",
        sizes: "np.typing.NDArray[np.int64]",
        what: str,
        memory: object,
    ) -> CopyTicket:
        """Begin copies behind the launched steps; ``memory`` is held until they have ended."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        copy_batch(destinations, sources, sizes, stream)
        event = torch.cuda.Event()
        event.record(stream)
        ticket = CopyTicket(f"blocks {what}", event)
        self._under_way.append((ticket, memory))
        self._storage.began(ticket)
        return ticket

    def _release(self) -> None:
        """Let go of the memory of copies that have ended, oldest first."""
        while self._under_way and self._under_way[0][0].is_done():
            self._under_way.popleft()

    def _is_pinned(self, rows: Rows) -> bool:
        return any(arena.holds(_address(rows)) for arena in self._arenas)

    def _pinned(self, rows: Rows) -> Rows:
        """Copy rows into pinned memory: the staging memory, or, while that is full, memory of its own."""
        buffer = self._staging.take(rows.nbytes)
        if buffer is None:
            copied: Rows = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True).numpy()
        else:
            copied = np.asarray(buffer).reshape(rows.shape)
        copied[...] = rows
        return copied


def _address(rows: Rows) -> int:
    address: int = rows.__array_interface__["data"][0]
    return address


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
