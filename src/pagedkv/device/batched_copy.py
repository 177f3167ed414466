"""Many copies between host and device by one call to the driver, executed by the copy engine.

``cuMemcpyBatchAsync`` (CUDA 12.8) takes arrays of addresses, so that blocks of 2 MiB are copied as fast as one long
range. With one call for each block the bus would be idle between the copies. Torch does not offer the call, so it is
made directly to the driver's library, which every working GPU has. With an older driver, each copy is a call of its
own.
"""

import ctypes
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch

from pagedkv.contract.arrays import Int64Array
from pagedkv.errors import DeviceUnavailableError

__all__ = ["copy_batch"]

LIBRARY: Final = "libcuda.so.1"
IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
BESIDE_COMPUTE: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


def copy_batch(destinations: Int64Array, sources: Int64Array, sizes: Int64Array, stream: torch.cuda.Stream) -> None:
    """Enqueue in a stream the copies of ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``, in any order.

    Args:
        destinations, sources: int64 ``[n]``, addresses; host memory must be pinned.
        sizes: int64 ``[n]``, positive.
        stream: not the default one.

    Raises:
        DeviceUnavailableError: the driver refuses the copies; the message has its error.
    """
    if len(sizes) == 0:
        return
    entry = _entry_point()
    if entry is None:
        _copy_one_by_one(destinations, sources, sizes, stream)
        return
    function, has_fail_index = entry
    attributes = _Attributes(IN_STREAM_ORDER, _Location(), _Location(), BESIDE_COMPUTE)
    first = ctypes.c_size_t(0)
    fail_index = ctypes.c_size_t(0)
    arrays = [np.ascontiguousarray(values, np.uint64) for values in (destinations, sources, sizes)]
    arguments: list[Any] = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    arguments += [ctypes.c_size_t(len(sizes)), ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)]
    if has_fail_index:
        arguments.append(ctypes.byref(fail_index))
    status = function(*arguments, ctypes.c_void_p(stream.cuda_stream))
    if status:
        raise DeviceUnavailableError(f"the driver refused {len(sizes)} copies: CUDA error {status}")


def _copy_one_by_one(
    destinations: Int64Array, sources: Int64Array, sizes: Int64Array, stream: torch.cuda.Stream
) -> None:
    copy = ctypes.CDLL(LIBRARY).cuMemcpyAsync
    for destination, source, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        status = copy(
            ctypes.c_void_p(destination), ctypes.c_void_p(source), ctypes.c_size_t(size),
            ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        if status:
            raise DeviceUnavailableError(f"the driver refused to copy {size:,} bytes: CUDA error {status}")


@lru_cache(maxsize=1)
def _entry_point() -> "tuple[Any, bool] | None":
    """Return the driver's function, and whether it has an argument for the index of a failed copy (before CUDA 13)."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    for name, has_fail_index in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        function = getattr(library, name, None)
        if function is not None:
            return function, has_fail_index
    return None
