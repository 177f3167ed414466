"""Memory at fixed addresses: reserved once, and backed by physical memory while it is mapped.

CUDA graphs and views contain addresses. While an engine sleeps, the physical memory is released, and the addresses stay
reserved::

    addresses   | reserved, for as long as a view lives                      |
    mapped      | piece     | piece     | piece     | rest |                     GPU: pieces of 1 GiB of the driver
    unmapped    |                                            |                   reading or writing is a fault

On a CPU the operating system does the same with anonymous pages, but unmapped pages read as zeros instead of faulting.
The driver is called directly, as for batched copies, since torch does not offer these calls.
"""

import ctypes
import mmap
import weakref
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, Protocol, final

import torch

from pagedkv.errors import ConfigurationError, DeviceUnavailableError

__all__ = ["ReservedMemory", "no_room", "reserve"]

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

    def tensor(self) -> torch.Tensor:
        """View the bytes, uint8 ``[nbytes]``, while they are mapped. Keeps the addresses reserved."""

    def map(self) -> None:
        """Map memory of undefined content. Raises ConfigurationError, and maps nothing, if there is not enough."""

    def unmap(self) -> None:
        """Release the memory, after waiting for the device's pending work."""


def reserve(nbytes: int, what: str, device: torch.device) -> ReservedMemory:
    """Reserve addresses and map them.

    Args:
        nbytes: number of bytes, at least 1.
        what: name of the memory in messages.
        device: the device.

    Raises:
        ConfigurationError: there is not enough memory.
        DeviceUnavailableError: the driver cannot reserve addresses.
    """
    memory = DriverMemory(nbytes, what, device) if device.type == "cuda" else HostMemory(nbytes, what)
    memory.map()
    return memory


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


@final
class DriverMemory:
    """Addresses of CUDA's virtual memory management; see :class:`ReservedMemory`.

    The addresses are released when neither the object nor a view of it exists.

    Args:
        nbytes, what, device: as for :func:`reserve`.
    """

    def __init__(self, nbytes: int, what: str, device: torch.device) -> None:
        torch.cuda.init()
        self._driver, self._what, self._device = _driver(), what, device
        self._properties = _Properties(PINNED, 0, _Location(ON_DEVICE, device.index))
        unit = self._granularity()
        self._padded = -(-nbytes // unit) * unit
        self._piece = -(-PIECE_NBYTES // unit) * unit
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

    def _map(self) -> None:
        try:
            for offset in range(0, self._padded, self._piece):
                self._pieces.take(offset, min(self._piece, self._padded - offset), self._properties)
            access = _Access(_Location(ON_DEVICE, self._device.index), READ_WRITE)
            _require(
                self._driver.cuMemSetAccess(
                    ctypes.c_uint64(self.address), ctypes.c_size_t(self._padded), ctypes.byref(access),
                    ctypes.c_size_t(1),
                ),
                "make memory accessible",
            )  # fmt: skip
        except BaseException:
            self._pieces.release()
            raise

    def _granularity(self) -> int:
        unit = ctypes.c_size_t()
        status = self._driver.cuMemGetAllocationGranularity(
            ctypes.byref(unit), ctypes.byref(self._properties), ctypes.c_int(RECOMMENDED)
        )
        _require(status, "tell its unit of memory")
        return unit.value


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

    def release(self) -> None:
        """Unmap all pieces."""
        for offset, (handle, nbytes) in self._held.items():
            self._driver.cuMemUnmap(ctypes.c_uint64(self.address + offset), ctypes.c_size_t(nbytes))
            self._driver.cuMemRelease(ctypes.c_uint64(handle))
        self._held.clear()

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


class _Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))
