"""Attention to the keys that an indexer selects for each query (sparse attention), in rows of one sequence each.

The model's own code scores and selects; see DeepSeek-V3.2-Exp (2025). It is given everything that a sequence has up to
its last position, the sequences of a pass padded to the longest, and names what it selects by indices into that::

    row 0    | 0 1 2 ........ 17 |            keys of an indexer, latents: as gathered from blocks
    row 1    | 0 1 ... 9 | zeros |
    mask     causal, bool [rows, 1, tokens, keys]; false for padding
    selected indices [rows, tokens, k], some of them beyond the mask; or a mask that is part of the causal one

What a query attends to does not depend on the other rows: padding is never selected before a key of its own sequence.
"""

from typing import final

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from pagedkv.attention.backend import AttentionLayer, GroupMetadata
from pagedkv.attention.reference import Span, gather, spans


@final
class KeysInRows:
    """What the rows of a pass see of their sequences.

    Args:
        layer: one of the sparse layers, which see all positions; group: its part of the pass.
        positions: int64 ``[rows, tokens]``.

    Attributes:
        mask: bool ``[rows, 1, tokens, keys]``, the causal mask.
        positions: int64 ``[rows, keys]``, of the keys.
    """

    def __init__(self, layer: AttentionLayer, group: GroupMetadata, positions: torch.Tensor) -> None:
        self._spans = tuple(spans(layer, group))
        assert len(self._spans) == len(positions), f"{len(self._spans)} sequences are in {len(positions)} rows"
        keys = torch.arange(max(span.stop for span in self._spans), device=positions.device)
        self.positions = keys.expand(len(positions), -1)
        self.mask = keys <= positions[:, None, :, None]

    def read(self, blocks: torch.Tensor, group: GroupMetadata) -> torch.Tensor:
        """Copy what the rows see out of blocks ``[num_blocks, block_size, ...]``: ``[rows, keys, ...]``."""
        return torch.stack([self._padded(gather(blocks, group, span), span) for span in self._spans])

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention to the keys that each query sees.

        Args:
            layer: the layer.
            query: ``[rows, heads, tokens, key_dim]``.
            key, value: ``[rows, key heads, keys, dim]``.
            seen: bool ``[rows, 1, tokens, keys]``, part of the mask.
            sinks: ``[heads]``, if the layer has sinks.

        Returns:
            ``[rows, tokens, heads, value_dim]``.
        """
        if layer.soft_cap or sinks is not None:
            return _explicit_attention(layer, query, key, value, seen, sinks).transpose(1, 2)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=layer.scale, enable_gqa=key.shape[1] != query.shape[1]
        )
        return out.transpose(1, 2)

    def selected(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the mask of the keys at some indices, integers ``[rows, tokens, k]``, none beyond the mask."""
        chosen = torch.zeros_like(self.mask[:, 0]).scatter(-1, indices.long(), value=True)
        return self.mask & chosen[:, None]

    def _padded(self, keys: torch.Tensor, span: Span) -> torch.Tensor:
        missing = self.positions.shape[1] - span.stop
        return pad(keys, (*(0, 0) * (keys.ndim - 1), 0, missing)) if missing else keys


def _explicit_attention(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute scores, cap them, and weight the values: ``[rows, heads, tokens, value_dim]``."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf).float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)], dim=3)
    weights = torch.softmax(scores, dim=3)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value
