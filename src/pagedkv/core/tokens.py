"""Token ids as callers bring them, checked once at the door."""

from typing import Final

import numpy as np

from pagedkv.core.blocks import Int32Array
from pagedkv.errors import TokenError
from pagedkv.spec import TokenIds

__all__ = ["as_token_array"]

INT32: Final = np.dtype(np.int32)


def as_token_array(token_ids: TokenIds) -> Int32Array:
    """Turn token ids from any one-dimensional integer buffer or sequence into contiguous int32.

    Raises:
        TokenError: not one-dimensional, not integers, or an id outside int32.
    """
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == INT32 and token_ids.ndim == 1:
        return np.ascontiguousarray(token_ids)
    try:
        array = np.asarray(token_ids)
    except (OverflowError, ValueError, TypeError) as error:
        raise TokenError(f"token ids are not a flat sequence of integers: {error}") from error
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1:
        raise TokenError(f"token ids must be one-dimensional, got the shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TokenError(f"token ids must be integers within int32, got the type {array.dtype}")
    limits = np.iinfo(np.int32)
    if array.min() < limits.min or array.max() > limits.max:
        raise TokenError(f"token ids must lie within int32, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, np.int32)
