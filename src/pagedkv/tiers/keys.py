"""The keys of entries: 32 bytes each, as rows of an array for compiled loops, and as bytes for dictionaries."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Uint32Array
from pagedkv.contract.errors import ConfigurationError

__all__ = ["KEY_NBYTES", "ZERO_KEY", "array_of", "as_keys", "names_of", "words_of"]

KEY_NBYTES: Final = 32
ZERO_KEY: Final = bytes(KEY_NBYTES)
NUM_AXES: Final = 2


def as_keys(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return keys, uint8 ``[n, 32]``, as a contiguous array. Raises ConfigurationError for other shapes or types."""
    is_array = isinstance(keys, np.ndarray)
    if not is_array or keys.dtype != np.uint8 or keys.ndim != NUM_AXES or keys.shape[1] != KEY_NBYTES:
        kind = f"{keys.dtype} {keys.shape}" if is_array else type(keys).__name__
        raise ConfigurationError(f"keys must be uint8 [n, {KEY_NBYTES}], got {kind}")
    return np.ascontiguousarray(keys)


def names_of(keys: npt.NDArray[np.uint8]) -> list[bytes]:
    """Turn keys, uint8 ``[n, 32]``, into bytes. O(n)."""
    return [row.tobytes() for row in keys]


def words_of(keys: npt.NDArray[np.uint8]) -> Uint32Array:
    """Turn keys, uint8 ``[n, 32]``, into words, uint32 ``[n, 8]``."""
    return np.ascontiguousarray(keys, np.uint8).view(">u4").astype(np.uint32)


def array_of(names: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """Put keys into an array: uint8 ``[n, 32]``."""
    return np.frombuffer(b"".join(names), np.uint8).reshape(len(names), KEY_NBYTES)
