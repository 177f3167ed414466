"""Attention of a step's queries to the keys in their rows' blocks: by tiles, items and merges."""

import torch

from pagedkv.device.kernels.inputs import PagedLayer, PagedRows, WorkList
from pagedkv.device.kernels.triton import latents
from pagedkv.device.kernels.triton.decoding import attend_tiles
from pagedkv.device.kernels.triton.launching import Launch
from pagedkv.device.kernels.triton.merging import merge_spans
from pagedkv.device.kernels.triton.prompting import attend_items


def attend_rows(
    work: WorkList,
    layer: PagedLayer,
    rows: PagedRows,
    query: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    has_prompts: bool = True,
) -> None:
    """As :func:`pagedkv.device.kernels.reference.attend_rows`, with the list of the same rows."""
    if query.shape[0] == 0 or rows.starts.shape[0] == 0:
        return
    launch = Launch.of(work, layer, query, sinks)
    if latents.can_serve(work, layer, query, sinks):
        latents.attend_latent_items(work, layer, rows, query, out, launch)
    elif has_prompts or work.shares or work.by_items:
        attend_items(work, layer, rows, query, out, sinks, launch)
    if not work.by_items:  # after the items, since it merges the partial answers of shared prefixes too
        attend_tiles(work, layer, rows, query, out, sinks, launch)
    if work.by_items or (has_prompts and work.chunk_queries):
        merge_spans(work, out, sinks, launch)
