"""Filters in plain torch: every row is sorted."""

import torch

from pagedkv.device.drawing import Filters

__all__ = ["find_least"]


def find_least(filters: Filters, scores: torch.Tensor, out: torch.Tensor) -> None:
    """Find the least score that each row's filters keep; equal scores are kept or dropped together.

    Args:
        filters: filters of the rows.
        scores: float32, float16 or bfloat16 ``[rows, tokens]``, with contiguous tokens.
        out: float32 ``[rows]``; -inf if all are kept. Undefined for a row with a NaN.

    Cost: O(rows x tokens x log tokens).
    """
    if scores.numel() == 0:
        return
    values = scores.float().sort(dim=1, descending=True).values
    num_tokens = values.shape[1]
    is_greedy = filters.temperatures == 0
    temperatures = torch.where(is_greedy, 1.0, filters.temperatures)
    has_top_k = (filters.top_k > 0) & (filters.top_k < num_tokens)
    last = torch.where(has_top_k, filters.top_k, num_tokens) - 1
    of_top_k = values.gather(1, last[:, None])
    scaled = values.double() / temperatures.double()[:, None]
    mass = scaled.masked_fill(values < of_top_k, -torch.inf).logsumexp(dim=1, keepdim=True)
    summed = (scaled - mass).exp().cumsum(dim=1)
    num_before = torch.searchsorted(summed, filters.top_p[:, None]).clamp(max=num_tokens - 1)
    of_top_p = values.gather(1, num_before)[:, 0]
    of_min_p = values[:, 0] + temperatures * filters.min_p.clamp(min=1e-38).log()
    least = torch.where(has_top_k, of_top_k[:, 0], -torch.inf)
    least = torch.where(filters.top_p < 1, torch.maximum(least, of_top_p), least)
    least = torch.where(filters.min_p > 0, torch.maximum(least, of_min_p), least)
    out.copy_(torch.where(is_greedy, -torch.inf, least))
