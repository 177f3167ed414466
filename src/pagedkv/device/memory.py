"""The memory of pools: blocks at fixed addresses on the device, and pinned memory on the host.

CUDA graphs and views contain addresses, so these are reserved once, and backed by physical memory while mapped. While
an engine sleeps, the physical memory is released, and the addresses stay reserved::

    addresses   | reserved, for as long as a view lives                      |
    mapped      | piece     | piece     | piece     | rest |                     GPU: pieces of 1 GiB of the driver
    unmapped    |                                            |                   reading or writing is a fault

On a CPU the operating system does the same with anonymous pages, but unmapped pages read as zeros instead of faulting.
The driver is called directly, as for batched copies, since torch does not offer these calls.

The memory of a pool that changes its size is mapped in pieces of some blocks, *runs*, so that each can be released and
mapped by itself (:meth:`pagedkv.BlockSpace.shrink`). What is left out stays so while an engine sleeps and wakes.

A GPU copies from and to pinned host memory without the host. Buffers in a region of it live as long as their views.
They are allocated by first fit, and adjacent free extents are merged, so that the region does not fragment for buffers
of one size::

    | buffer | free | buffer       | free                |

A pool has its blocks on the device, and those of its host pool, for swapping. Both are plain bytes;
:mod:`pagedkv.device.storage` views them for groups. In a block-major pool a block is contiguous. In any other layout a
block has several pieces on the device, but is contiguous on the host, where no kernel reads it::

    device, block-major    | block 0       | block 1       | block 2 ...
    device, layer-major    | layer 0 of block 0 | of block 1 | ... | layer 1 of block 0 | of block 1 | ...
    host                   | block 0       | block 1       | block 2 ...
"""

import ctypes
import mmap
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from math import lcm
from threading import Lock
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.device.shapes import Pieces
from pagedkv.device.tensors import require_pinned, require_tensor
from pagedkv.errors import ConfigurationError, DeviceUnavailableError, TensorError

LIBRARY: Final = "libcuda.so.1"
PIECE_NBYTES: Final = 2**30
"""Bytes mapped at once: 64 GiB in one piece took 0.2 s on an H100, in pieces of 1 GiB 0.09 s."""
OUT_OF_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY
PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
RECOMMENDED: Final = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


class ReservedMemory(Protocol):
    """Bytes that can be released and mapped again at the same addresses.

    Attributes:
        nbytes: number of bytes.
        address: address of the first byte, reserved as long as the object or a view of it exists.
        is_mapped: whether the addresses are backed by memory.
    """

    nbytes: int
    address: int
    is_mapped: bool

    def release(self, offsets: Sequence[int], nbytes: int) -> None:
        """Release pieces of ``nbytes`` bytes each, after waiting for the device's pending work; others stay mapped."""

    def take(self, offsets: Sequence[int], nbytes: int) -> None:
        """Map released pieces again. Raises ConfigurationError, and maps none, if there is not enough memory."""

    def tensor(self) -> torch.Tensor:
        """View the bytes, uint8 ``[nbytes]``, while they are mapped. Keeps the addresses reserved."""

    def map(self) -> None:
        """Map memory of undefined content. Raises ConfigurationError, and maps nothing, if there is not enough."""

    def unmap(self) -> None:
        """Release the memory, after waiting for the device's pending work."""


def reserve(
    nbytes: int,
    what: str,
    device: torch.device,
    *,
    piece_nbytes: int | None = None,
    left_out: Sequence[int] = (),
) -> ReservedMemory:
    """Reserve addresses and map them.

    Args:
        nbytes: number of bytes, at least 1.
        what: name of the memory in messages.
        device: the device.
        piece_nbytes: bytes of a piece that can be released by itself, a multiple of :func:`unit_nbytes`; None: all at
            once.
        left_out: offsets of the pieces that are not mapped at first.

    Raises:
        ConfigurationError: there is not enough memory.
        DeviceUnavailableError: the driver cannot reserve addresses.
    """
    if device.type == "cuda":
        memory: ReservedMemory = DriverMemory(nbytes, what, device, piece_nbytes, left_out)
    else:
        memory = HostMemory(nbytes, what)
    memory.map()
    return memory


def unit_nbytes(device: torch.device) -> int:
    """Return the bytes of which released pieces are multiples. Raises DeviceUnavailableError."""
    if device.type != "cuda":
        return mmap.PAGESIZE
    torch.cuda.init()
    return _granularity(_driver(), _properties(device))


@final
class HostMemory:
    """Anonymous pages of the operating system; see :class:`ReservedMemory`.

    Args:
        nbytes, what: as for :func:`reserve`.
    """

    def __init__(self, nbytes: int, what: str) -> None:
        try:
            self._pages = mmap.mmap(-1, nbytes)
        except (OSError, OverflowError, ValueError) as problem:
            raise no_room(what, nbytes, torch.device("cpu")) from problem
        self.nbytes = nbytes
        self._view = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.address = self._view.data_ptr()
        self.is_mapped = False

    def tensor(self) -> torch.Tensor:
        """View the bytes."""
        return self._view

    def map(self) -> None:
        """Do nothing: the operating system maps pages when they are first touched."""
        self.is_mapped = True

    def unmap(self) -> None:
        """Return the pages to the operating system."""
        self._pages.madvise(mmap.MADV_DONTNEED)
        self.is_mapped = False

    def release(self, offsets: Sequence[int], nbytes: int) -> None:
        """Return the pages of pieces to the operating system."""
        for offset in offsets:
            self._pages.madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def take(self, offsets: Sequence[int], nbytes: int) -> None:
        """Do nothing, as :meth:`map`."""


@final
class DriverMemory:
    """Addresses of CUDA's virtual memory management; see :class:`ReservedMemory`.

    The addresses are released when neither the object nor a view of it exists.

    Args:
        nbytes, what, device, piece_nbytes, left_out: as for :func:`reserve`.
    """

    def __init__(
        self,
        nbytes: int,
        what: str,
        device: torch.device,
        piece_nbytes: int | None = None,
        left_out: Sequence[int] = (),
    ) -> None:
        torch.cuda.init()
        self._driver, self._what, self._device = _driver(), what, device
        self._properties = _properties(device)
        unit = _granularity(self._driver, self._properties)
        self._padded = -(-nbytes // unit) * unit
        self._piece = -(-PIECE_NBYTES // unit) * unit if piece_nbytes is None else piece_nbytes
        self._left_out = set(left_out)
        address = ctypes.c_uint64()
        status = self._driver.cuMemAddressReserve(
            ctypes.byref(address), ctypes.c_size_t(self._padded), ctypes.c_size_t(0), ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )  # fmt: skip
        if status == OUT_OF_MEMORY:
            raise no_room(what, nbytes, device)
        _require(status, f"reserve {nbytes:,} bytes of addresses")
        self.nbytes, self.address, self.is_mapped = nbytes, address.value, False
        self._pieces = _Pieces(self._driver, self.address)
        weakref.finalize(self, _release_addresses, self._pieces, self._padded, device).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The interface from which torch makes a tensor; the tensor keeps this object alive."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 2}

    def tensor(self) -> torch.Tensor:
        """View the bytes."""
        return torch.as_tensor(self, device=self._device)

    def map(self) -> None:
        """Map memory piece by piece; if there is too little, release torch's unused cache and try again."""
        try:
            self._map()
        except _OutOfMemoryError as problem:
            torch.cuda.empty_cache()
            try:
                self._map()
            except _OutOfMemoryError:
                raise no_room(self._what, self.nbytes, self._device) from problem
        self.is_mapped = True

    def unmap(self) -> None:
        """Wait for the device, and release all pieces."""
        torch.cuda.synchronize(self._device)
        self._pieces.release()
        self.is_mapped = False

    def release(self, offsets: Sequence[int], nbytes: int) -> None:
        """Wait for the device, and release pieces."""
        assert nbytes == self._piece, f"pieces have {self._piece} bytes, not {nbytes}"
        torch.cuda.synchronize(self._device)
        self._pieces.release(offsets)
        self._left_out.update(offsets)

    def take(self, offsets: Sequence[int], nbytes: int) -> None:
        """Map released pieces; if there is too little memory, release torch's unused cache and try again."""
        assert nbytes == self._piece, f"pieces have {self._piece} bytes, not {nbytes}"
        try:
            self._map_pieces(offsets)
        except _OutOfMemoryError as problem:
            torch.cuda.empty_cache()
            try:
                self._map_pieces(offsets)
            except _OutOfMemoryError:
                raise no_room(self._what, len(offsets) * nbytes, self._device) from problem
        self._left_out.difference_update(offsets)

    def _map(self) -> None:
        self._map_pieces([start for start in range(0, self._padded, self._piece) if start not in self._left_out])

    def _map_pieces(self, offsets: Sequence[int]) -> None:
        """Map all of some pieces, or none."""
        access = _Access(Location(ON_DEVICE, self._device.index), READ_WRITE)
        try:
            for offset in offsets:
                nbytes = min(self._piece, self._padded - offset)
                self._pieces.take(offset, nbytes, self._properties)
                _require(
                    self._driver.cuMemSetAccess(
                        ctypes.c_uint64(self.address + offset), ctypes.c_size_t(nbytes), ctypes.byref(access),
                        ctypes.c_size_t(1),
                    ),
                    "make memory accessible",
                )  # fmt: skip
        except BaseException:
            self._pieces.release(offsets)
            raise


def no_room(what: str, nbytes: int, device: torch.device) -> ConfigurationError:
    """Return the error for memory that is not available."""
    free = f", of which {torch.cuda.mem_get_info(device)[0]:,} bytes are free" if device.type == "cuda" else ""
    return ConfigurationError(f"{what} needs {nbytes:,} bytes on {device}{free}: give fewer blocks, or less elsewhere")


class _OutOfMemoryError(Exception):
    """The driver does not have enough memory."""


class _Pieces:
    """The mapped pieces at an address, by offset: the driver's handles and their sizes."""

    def __init__(self, driver: Any, address: int) -> None:  # noqa: ANN401 - a library's functions
        self._driver, self.address = driver, address
        self._held: dict[int, tuple[int, int]] = {}

    def take(self, offset: int, nbytes: int, properties: "_Properties") -> None:
        """Map a piece. Raises _OutOfMemoryError, DeviceUnavailableError."""
        handle = ctypes.c_uint64()
        status = self._driver.cuMemCreate(
            ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(properties), ctypes.c_uint64(0)
        )
        _require(status, f"give {nbytes:,} bytes")
        status = self._driver.cuMemMap(
            ctypes.c_uint64(self.address + offset), ctypes.c_size_t(nbytes), ctypes.c_size_t(0), handle,
            ctypes.c_uint64(0),
        )  # fmt: skip
        if status:
            self._driver.cuMemRelease(handle)
        _require(status, f"map {nbytes:,} bytes")
        self._held[offset] = handle.value, nbytes

    def release(self, offsets: Sequence[int] | None = None) -> None:
        """Unmap those of some pieces that are mapped; None: all pieces."""
        for offset in list(self._held) if offsets is None else offsets:
            if offset in self._held:
                handle, nbytes = self._held.pop(offset)
                self._driver.cuMemUnmap(ctypes.c_uint64(self.address + offset), ctypes.c_size_t(nbytes))
                self._driver.cuMemRelease(ctypes.c_uint64(handle))

    def free(self, nbytes: int) -> None:
        """Unmap all pieces, and release the addresses."""
        self.release()
        self._driver.cuMemAddressFree(ctypes.c_uint64(self.address), ctypes.c_size_t(nbytes))


def _release_addresses(pieces: _Pieces, nbytes: int, device: torch.device) -> None:
    """Release addresses without views, after the device's pending work, which may still access them."""
    with suppress(RuntimeError):  # a failed device has no pending work
        torch.cuda.synchronize(device)
    pieces.free(nbytes)


def _require(status: int, what: str) -> None:
    if status == OUT_OF_MEMORY:
        raise _OutOfMemoryError
    if status:
        raise DeviceUnavailableError(f"the driver does not {what}: CUDA error {status}")


@lru_cache(maxsize=1)
def _driver() -> Any:  # noqa: ANN401 - a library's functions
    """Return the driver's library. Raises DeviceUnavailableError if it is missing or too old."""
    try:
        library = ctypes.CDLL(LIBRARY)
        library.cuMemAddressReserve  # noqa: B018 - the look-up raises if it is missing
    except (OSError, AttributeError) as problem:
        raise DeviceUnavailableError(
            f"{LIBRARY} has no virtual memory management: drivers of CUDA 10.2 and newer have it"
        ) from problem
    return library


class Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


def _properties(device: torch.device) -> _Properties:
    """Return what memory is asked for: pinned, on a device."""
    return _Properties(PINNED, 0, Location(ON_DEVICE, device.index))


def _granularity(driver: Any, properties: _Properties) -> int:  # noqa: ANN401 - a library's functions
    """Return the bytes of which the driver gives multiples. Raises DeviceUnavailableError."""
    unit = ctypes.c_size_t()
    status = driver.cuMemGetAllocationGranularity(
        ctypes.byref(unit), ctypes.byref(properties), ctypes.c_int(RECOMMENDED)
    )
    _require(status, "tell its unit of memory")
    return unit.value


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


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


MOST_NBYTES: Final = 2**46


@final
class PinnedArena:
    """Buffers in one region of host memory. Any thread may take and release them.

    Args:
        nbytes: size of the region.
        what: name of the region in messages.
        is_pinned: whether to pin the region; False without a GPU.
        alignment: every buffer begins at a multiple of this number of bytes.

    Raises:
        ConfigurationError: there is not enough memory, or it cannot be pinned.
    """

    def __init__(self, nbytes: int, what: str, *, is_pinned: bool = True, alignment: int = 4096) -> None:
        self.nbytes = as_count(nbytes, f"the size of {what}", least=1, most=MOST_NBYTES)
        self._alignment = alignment
        memory = allocate_pages(nbytes, what)
        self._bytes: npt.NDArray[np.uint8] = memory.numpy()
        self.address: int = memory.data_ptr()
        if is_pinned:
            pin(memory)
            weakref.finalize(self, unpin, memory).atexit = False
        self._lock = Lock()
        self._starts = [0]
        self._sizes = {0: nbytes}
        self._released: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> memoryview | None:
        """Allocate a buffer of undefined content; return None if there is no room now. O(free extents).

        The buffer is released with its last view. A GPU's copy does not count as a view: the caller of the copy must
        keep one until the copy has ended.
        """
        size = max(1, -(-nbytes // self._alignment)) * self._alignment
        with self._lock:
            self._collect_released()
            for place, start in enumerate(self._starts):
                if self._sizes[start] >= size:
                    self._cut(place, start, size)
                    buffer = self._bytes[start : start + nbytes]
                    weakref.finalize(buffer, self._released.append, (start, size)).atexit = False
                    return buffer.data
        return None

    def holds(self, address: int) -> bool:
        """Whether an address is in the region. Changes nothing."""
        return self.address <= address < self.address + self.nbytes

    @property
    def free_nbytes(self) -> int:
        """Free bytes, in extents of any size."""
        with self._lock:
            self._collect_released()
            return sum(self._sizes.values())

    def _cut(self, place: int, start: int, size: int) -> None:
        """Allocate the first bytes of a free extent."""
        left = self._sizes.pop(start) - size
        if left:
            self._starts[place] = start + size
            self._sizes[start + size] = left
        else:
            del self._starts[place]

    def _collect_released(self) -> None:
        """Free the buffers released since the last call. Finalizers, which run at any time, only append to a list."""
        while self._released:
            self._enter(*self._released.popleft())

    def _enter(self, start: int, size: int) -> None:
        """Add a free extent, and merge it with its neighbours."""
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == start + size:
            size += self._sizes.pop(self._starts.pop(place))
        before = self._starts[place - 1] if place else -1
        if place and before + self._sizes[before] == start:
            self._sizes[before] += size
        else:
            self._starts.insert(place, start)
            self._sizes[start] = size


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
        run: blocks of a piece of memory that can be released by itself; 0 in a pool that keeps its size.

    Raises:
        TensorError: the host memory has another type, shape or device, or is not pinned; nothing was allocated.
        ConfigurationError: there is not enough memory; a pool that is to change its size has blocks of several pieces.
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
        absent: Int32Array | None = None,
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
        self.run = 0 if absent is None else run_of(block_nbytes, pieces, device)
        self._memory = reserve(
            num_blocks * block_nbytes,
            f"pool {name!r}",
            device,
            piece_nbytes=self.run * block_nbytes or None,
            left_out=() if absent is None else self._offsets(absent),
        )
        self._num_absent = 0 if absent is None else len(absent)
        self.device_bytes = self._memory.tensor()
        self._zero_null_block()
        self.host_bytes = allocate_pages(num_host_bytes, host_pool) if host_bytes is None else host_bytes
        self._unpin: weakref.finalize[..., PoolMemory] | None = None
        if device.type == "cuda" and num_host_blocks and host_bytes is None:
            pin(self.host_bytes)
            self._unpin = weakref.finalize(self, unpin, self.host_bytes)

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device while awake, those of absent blocks left out."""
        return (self.num_blocks - self._num_absent) * self.block_nbytes

    def release(self, block_ids: Int32Array) -> None:
        """Release the memory of whole runs of blocks, after waiting for the device (:meth:`BlockSpace.shrink`)."""
        self._memory.release(self._offsets(block_ids), self.run * self.block_nbytes)
        self._num_absent += len(block_ids)

    def take(self, block_ids: Int32Array) -> None:
        """Map the memory of whole runs of blocks again, with undefined content.

        Raises ConfigurationError, and maps none, if there is not enough.
        """
        self._memory.take(self._offsets(block_ids), self.run * self.block_nbytes)
        self._num_absent -= len(block_ids)

    def _offsets(self, block_ids: Int32Array) -> list[int]:
        """Return where the runs of blocks begin. Raises ConfigurationError for blocks that are no whole runs."""
        starts = block_ids[:: self.run]
        whole = (starts[:, None] + np.arange(self.run)).ravel()
        if (starts % self.run).any() or not np.array_equal(whole, block_ids):
            raise ConfigurationError(f"pool {self.name!r} has runs of {self.run} blocks, got {block_ids.tolist()[:9]}")
        return [start * self.block_nbytes for start in starts.tolist()]

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

    def _zero_null_block(self) -> None:
        """Zero the null block, since padded rows of a batch read it."""
        for offset, size in zip(self.pieces.offsets, self.pieces.sizes, strict=True):
            self.device_bytes[offset : offset + size].zero_()


def run_of(block_nbytes: int, pieces: Pieces, device: torch.device) -> int:
    """Return how many blocks a piece of memory has that can be released by itself.

    Raises:
        ConfigurationError: a block is no single piece.
        DeviceUnavailableError: the driver of the GPU cannot reserve addresses.
    """
    if not pieces.is_block_major:
        raise ConfigurationError(
            "a pool that changes its size needs block-major layouts: its blocks have several pieces"
        )
    return lcm(block_nbytes, unit_nbytes(device)) // block_nbytes


def _require_host_memory(memory: torch.Tensor, what: str, nbytes: int, device: torch.device) -> None:
    require_tensor(memory, what, dtype=torch.uint8, shape=(nbytes,), device=torch.device("cpu"))
    if not memory.is_contiguous():
        raise TensorError(f"{what} must be contiguous, got strides {memory.stride()}")
    if device.type == "cuda":
        require_pinned(memory, what)
