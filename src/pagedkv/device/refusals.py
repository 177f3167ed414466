"""How many tokens steps have refused, by row, kept on the device: later ranges move down by these numbers."""

import torch

from pagedkv.contract.arguments import as_count
from pagedkv.device.table_arrays import TableArrays
from pagedkv.device.tensors import require_numbers, require_tensor
from pagedkv.errors import StepError, TensorError

__all__ = ["forget_steps", "record_refused"]


def record_refused(arrays: TableArrays, step_id: int, rows: torch.Tensor, counts: torch.Tensor) -> None:
    """Record how many tokens of some rows a step has refused; rows that it did not compute stay as they are.

    Raises:
        TensorError: tensors of another type, shape or device.
    """
    as_count(step_id, "step_id", most=2**63 - 1, error=TensorError)
    taken, device = (torch.int32, torch.int64), arrays.sample_steps.device
    require_tensor(rows, "rows", dtype=taken, shape=(None,), device=device)
    require_tensor(counts, "counts", dtype=taken, shape=(len(rows),), device=device)
    require_numbers(rows, "rows", len(arrays.sample_steps))
    index = rows.long()
    is_this = arrays.sample_steps[index] == step_id
    arrays.sample_refused[index] = torch.where(is_this, counts.int()[:, None], arrays.sample_refused[index])


def forget_steps(arrays: TableArrays, first_step_id: int) -> None:
    """Drop what is recorded for steps from this one on. Raises StepError for a number that is none."""
    is_gone = arrays.sample_steps >= as_count(first_step_id, "step_id", most=2**63 - 1, error=StepError)
    arrays.sample_steps.masked_fill_(is_gone, -1)
    arrays.sample_refused.masked_fill_(is_gone, 0)
