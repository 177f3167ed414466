"""Prompts: torch's SDPA for each sequence, on keys gathered from its blocks.

If a layer has a soft cap or sinks, which SDPA does not support, scores are computed explicitly.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.attention.backend import AttentionLayer
from pagedkv.attention.reference import Span, seen_keys

__all__ = ["attend_to"]


def attend_to(
    layer: AttentionLayer,
    span: Span,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of one sequence's queries to its gathered keys.

    Args:
        layer: the layer.
        span: the sequence.
        query: ``[queries, heads, key_dim]``.
        key: ``[keys, key heads, key_dim]``, positions from ``first_key`` on.
        value: ``[keys, key heads, value_dim]``, likewise.
        sinks: ``[heads]``, if the layer has sinks.

    Returns:
        ``[queries, heads, value_dim]``.
    """
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    if layer.soft_cap or layer.has_sinks:
        return _explicit_attention(layer, span, query, key, value, sinks).transpose(0, 1)
    is_causal = query.shape[1] == key.shape[1] and not (layer.window or layer.chunk)
    mask = None if is_causal else seen_keys(layer, span, query.device)[None]
    out = scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=layer.scale,
        enable_gqa=key.shape[0] != query.shape[0],
    )
    return out[0].transpose(0, 1)


def _explicit_attention(
    layer: AttentionLayer,
    span: Span,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute scores, cap them, and weight the values. All tensors have heads first, ``[heads, queries, dim]``."""
    repeats = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    scores = query @ key.transpose(1, 2) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.masked_fill(~seen_keys(layer, span, query.device), -torch.inf).float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, : key.shape[1]]
    return weights.to(value.dtype) @ value
