"""Checks of the arguments of calls that write block tables without plans: lists of block ids, and batches of rows."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.contract.arguments import LARGEST_SIZE, as_array, as_count
from pagedkv.device.tensors import require_tensor
from pagedkv.errors import TensorError

__all__ = ["as_batch_rows", "as_block_ids", "as_padding", "require_ids", "require_room"]


def as_block_ids(given: Sequence[int], group: int) -> npt.NDArray[np.int64]:
    """Convert the block ids of a row to an array. Raises TensorError for anything but a flat list of integers."""
    ids = as_array(given, f"block ids of group {group}", TensorError)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TensorError(f"block ids of group {group} must be a flat list of integers, got {ids.dtype} {ids.shape}")
    if ids.size and ids.max() > LARGEST_SIZE:  # uint64 values may not fit into int64
        raise TensorError(f"block ids of group {group} must lie within int32, got {ids.max()}")
    return ids.astype(np.int64)


def as_padding(number: int) -> int:
    """Check a padded number of places or positions; the caller checks its bounds. Raises TensorError."""
    return as_count(number, "places wanted", least=-LARGEST_SIZE, error=TensorError)


def require_ids(block_ids: npt.NDArray[np.int64], group: int, num_blocks: int) -> None:
    """Raise TensorError for a block id outside a pool of this size."""
    if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < num_blocks:
        raise TensorError(
            f"block ids of group {group} must be from 0 to {num_blocks - 1}, got {block_ids.min()} to {block_ids.max()}"
        )


def require_room(row: int, group: int, num_blocks: int, width: int) -> None:
    """Raise TensorError if a row's table has no room for this many blocks."""
    if num_blocks > width:
        raise TensorError(
            f"row {row} of group {group} would have {num_blocks} blocks, but its table has room for {width}"
        )


def as_batch_rows(idx_mapping: torch.Tensor, max_rows: int, device: torch.device) -> torch.Tensor:
    """Check the rows of a batch: int32 ``[any]``, -1 for empty places. Values are checked only on a CPU.

    Raises:
        TensorError: wrong type, shape or device, too many rows; on a CPU also rows out of range or named twice.
    """
    rows = require_tensor(idx_mapping, "idx_mapping", dtype=torch.int32, shape=(None,), device=device)
    if len(rows) > max_rows:
        raise TensorError(f"a batch has {max_rows} places at most, got {len(rows)} rows")
    if rows.device.type == "cpu" and len(rows):
        real = rows[rows >= 0]
        if int(rows.min()) < -1 or int(rows.max()) >= max_rows:
            raise TensorError(f"rows must be from 0 to {max_rows - 1}, or -1, got {rows.min()} to {rows.max()}")
        if len(real.unique()) < len(real):
            raise TensorError(f"a batch has each row once, got {rows.tolist()}")
    return rows
