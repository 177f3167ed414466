"""Attention over blocks in plain torch: gathers the keys that each row sees, with an explicit softmax."""

import torch

from pagedkv.device.paged_attention import PagedLayer, PagedRows, Reading, WorkList

__all__ = ["attend_rows"]


def attend_rows(  # noqa: PLR0913, PLR0917 - the work, the layer, the rows, inputs and outputs
    work: WorkList,
    layer: PagedLayer,
    rows: PagedRows,
    query: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    has_prompts: bool = True,
) -> None:
    """Compute attention of a step's queries; the step's own keys must be in their slots already.

    Args:
        work: the list of these rows, made by ``list_work`` in the same step.
        layer: its keys and values.
        rows: rows of the step. Blocks that no query sees are not read, so their table entries may be arbitrary.
        query: ``[tokens, heads, key_dim]``, with contiguous elements of a head.
        out: ``[tokens, heads, value_dim]``, likewise; tokens that belong to no row are unchanged.
        sinks: float ``[heads]``: for each head a score without a value in its softmax.
        has_prompts: False: the caller guarantees that no row has more than ``work.few_queries`` queries, which saves a
            launch.

    Cost: O(seen positions x heads x dimensions).
    """
    del has_prompts
    ranges = zip(rows.starts.tolist(), rows.seq_lens.tolist(), rows.query_start_loc.tolist(), strict=False)
    for place, (start, stop, token) in enumerate(ranges):
        if start < stop:
            tokens = slice(token, token + stop - start)
            out[tokens] = _attend(work.reading, layer, rows.block_tables[place], query[tokens], start, sinks)


def _attend(  # noqa: PLR0913, PLR0917 - as above, for one row
    reading: Reading,
    layer: PagedLayer,
    table: torch.Tensor,
    query: torch.Tensor,
    start: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    stop, block_size = start + len(query), layer.keys.shape[1]
    position = torch.arange(start, stop, device=query.device)[:, None]
    key = torch.arange(stop, device=query.device)
    seen = _sees(reading, position, key[None, :])
    taken = key[seen.any(0)]
    block, offset = table[taken // block_size].long(), taken % block_size
    keys = _read(layer.keys, block, offset, layer.key_scales, query.dtype).repeat_interleave(reading.heads_of_key, 1)
    values = _read(layer.values, block, offset, layer.value_scales, query.dtype)
    values = values.repeat_interleave(reading.heads_of_key, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys).float() * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.masked_fill(~seen[:, taken], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(query), 1)], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, : len(taken)]
    return torch.einsum("hqk,khd->qhd", weights.to(query.dtype), values)


def _sees(reading: Reading, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    seen = key <= position
    if reading.window:
        seen = seen & ((key > position - reading.window) | (key < reading.num_sink_tokens))
    if reading.chunk:
        seen = seen & (key // reading.chunk == position // reading.chunk)
    return seen


def _read(
    blocks: torch.Tensor, block: torch.Tensor, offset: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if blocks.dtype.itemsize == 1:  # torch cannot index eight-bit floats
        content = blocks.view(torch.uint8)[block, offset].view(blocks.dtype)
    else:
        content = blocks[block, offset]
    if scales is None:
        return content.to(dtype)
    return (content.float() * scales[:, None]).to(dtype)
