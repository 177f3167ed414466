"""Searches in sorted arrays, inside kernels."""

import triton
import triton.language as tl


@triton.jit
def last_at_most(values, count, wanted, is_identity):
    """Return the last index below ``count`` whose value in an ascending array is at most ``wanted``.

    ``is_identity``: whether the values are 0, 1, 2..., so that no load is needed.
    """
    low = tl.minimum(wanted, tl.maximum(count - 1, 0))
    if is_identity == 0:
        low = tl.zeros_like(wanted)
        high = low + count
        width = count
        while width > 0:
            middle = (low + high) // 2
            is_open = low < high
            value = tl.load(values + middle, mask=is_open, other=0)
            high = tl.where(is_open & (value > wanted), middle, high)
            low = tl.where(is_open & (value <= wanted), middle + 1, low)
            width = width // 2
        low = tl.maximum(low - 1, 0)
    return low
