"""Types of the arrays in which all state is kept."""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Uint16Array: TypeAlias = npt.NDArray[np.uint16]
Uint32Array: TypeAlias = npt.NDArray[np.uint32]
Uint8Array: TypeAlias = npt.NDArray[np.uint8]

NO_BLOCKS: Final = np.zeros(0, np.int32)
NO_TOKENS: Final = np.zeros(0, np.int32)
DIGEST_NBYTES: Final = 32
"""Of SHA-256."""
DIGEST_WORDS: Final = 8
