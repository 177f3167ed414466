"""Attention to the keys that an indexer selects for each query (sparse attention), in rows of one sequence each.

The model's own code scores and selects; see DeepSeek-V3.2-Exp (2025). It is given everything that a sequence has up to
its last position, the sequences of a pass padded to the longest, and names what it selects by indices into that::

    row 0    | 0 1 2 ........ 17 |            keys of an indexer, latents: as gathered from blocks
    row 1    | 0 1 ... 9 9 9 9 9 |            the row's last key again
    mask     causal, bool [rows, 1, tokens, keys]; false for padding
    selected indices [rows, tokens, k], some of them beyond the mask; or a mask that is part of the causal one

Where the matrices that unfold a layer's latents are known (:mod:`pagedkv.attention.unfolding`), nothing is unfolded:
the selected latents of each query are read from their blocks, a part of the tokens at a time.

What a query attends to does not depend on the other rows: padding is never selected before a key of its own sequence.

Nothing here waits for the device, and shapes depend on the given number of keys alone: a graph may be captured.
"""

from typing import Final, final

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.attention.backend import AttentionLayer, GroupMetadata
from pagedkv.attention.unfolding import Unfolding

MOST_ELEMENTS: Final = 2**27
"""Of latents that are copied out of blocks at once: 256 MiB in 16 bits."""


@final
class KeysInRows:
    """What the rows of a pass see of their sequences.

    Args:
        layer: one of the layers, which see the same positions.
        positions: int64 ``[rows, tokens]``, ascending by one in each row. A row without tokens of a step, behind the
            others, has the position 0 and a table of null blocks.
        num_keys: positions of the longest row, or more.

    Attributes:
        mask: bool ``[rows, 1, tokens, keys]``, the causal mask.
        positions: int64 ``[rows, keys]``, of the keys.
    """

    def __init__(self, layer: AttentionLayer, positions: torch.Tensor, num_keys: int) -> None:
        first = torch.zeros_like(positions[:, :1])
        if layer.window:
            first = (positions[:, :1] - layer.window + 1).clamp(min=0)
            num_keys = min(num_keys, layer.window - 1 + positions.shape[1])
        self.positions = first + torch.arange(num_keys, device=positions.device)
        key, query = self.positions[:, None, None, :], positions[:, None, :, None]
        self.mask = key <= query
        if layer.window:
            self.mask &= key > query - layer.window
        self._last = positions
        self._where: dict[GroupMetadata, tuple[torch.Tensor, torch.Tensor]] = {}

    def read(self, blocks: torch.Tensor, group: GroupMetadata) -> torch.Tensor:
        """Copy what the rows see out of blocks ``[num_blocks, block_size, ...]``: ``[rows, keys, ...]``."""
        if group not in self._where:
            there = torch.minimum(self.positions, self._last[:, -1:])
            tables = group.block_tables[: len(there)].long()
            self._where[group] = tables.gather(1, there // blocks.shape[1]), there % blocks.shape[1]
        return blocks[self._where[group]]

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

    def attend_latents(
        self,
        layer: AttentionLayer,
        unfolding: Unfolding,
        query: torch.Tensor,
        latents: torch.Tensor,
        group: GroupMetadata,
        indices: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention to selected latents, without unfolding any.

        Args:
            layer, query, sinks: as for :meth:`attend`; unfolding: of the layer.
            latents: ``[num_blocks, block_size, dim]``; group: where each row has its own.
            indices: integers ``[rows, tokens, k]``; those beyond the mask are not seen.

        Returns:
            ``[rows, tokens, heads, value_dim]``.
        """
        num_rows, num_heads, num_tokens, _ = query.shape
        tables = group.block_tables[:num_rows].long()
        absorbed = unfolding.absorb(query.transpose(1, 2).flatten(0, 1)).view(num_rows, num_tokens, num_heads, -1)
        at_once = max(1, MOST_ELEMENTS // (num_rows * indices.shape[2] * latents.shape[2]))
        mixed = []
        for first in range(0, num_tokens, at_once):
            part = slice(first, first + at_once)
            chosen = indices[:, part].long()
            seen = chosen <= self._last[:, part, None]
            where = chosen.masked_fill(~seen, 0)
            block_ids = tables.gather(1, (where // latents.shape[1]).flatten(1)).view_as(where)
            kept = latents[block_ids, where % latents.shape[1]].to(query.dtype)
            scores = torch.einsum("rthl,rtkl->rhtk", absorbed[:, part], kept) * layer.scale
            weights = _weights(layer, scores, seen[:, None], sinks).to(query.dtype)
            mixed.append(torch.einsum("rhtk,rtkl->rthl", weights, kept[..., : unfolding.num_value_dims]))
        out = unfolding.unfold(torch.cat(mixed, dim=1).flatten(0, 1))
        return out.view(num_rows, num_tokens, num_heads, -1)

    def selected(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the mask of the keys at some indices, integers ``[rows, tokens, k]``, none beyond the mask."""
        chosen = torch.zeros_like(self.mask[:, 0]).scatter(-1, indices.long(), value=True)
        return self.mask & chosen[:, None]


def _explicit_attention(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute scores, and weight the values: ``[rows, heads, tokens, value_dim]``."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * layer.scale
    return _weights(layer, scores, seen, sinks).to(value.dtype) @ value


def _weights(
    layer: AttentionLayer, scores: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the weights of keys, float32 ``[rows, heads, tokens, keys]``, of their scores."""
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    num_keys, scores = scores.shape[3], scores.masked_fill(~seen, -torch.inf).float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)], dim=3)
    return torch.softmax(scores, dim=3)[..., :num_keys]
