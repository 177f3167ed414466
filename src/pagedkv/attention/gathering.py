"""Gathers the keys of one sequence from its blocks, and computes which keys its queries see.

Back ends use it for prompts. Only positions that some query sees are gathered, so other content of a block (old content
of other rows, NaN) is never read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagedkv.attention.backend import AttentionLayer, GroupMetadata

__all__ = ["Span", "gather", "seen_keys", "spans"]


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence of a step.

    Args:
        place: its place in the step.
        first_token: index of its first token in the flat row.
        start, stop: its computed positions.
        first_key: the first position that any of its queries sees; the last is ``stop - 1``.
    """

    place: int
    first_token: int
    start: int
    stop: int
    first_key: int

    @property
    def num_queries(self) -> int:
        """Number of its computed positions."""
        return self.stop - self.start

    @property
    def tokens(self) -> slice:
        """Its tokens in the flat row."""
        return slice(self.first_token, self.first_token + self.num_queries)


def spans(layer: AttentionLayer, step: GroupMetadata) -> Iterator[Span]:
    """Yield the sequences of a step with tokens to compute."""
    numbers = zip(step.query_start_loc.tolist(), step.starts.tolist(), step.seq_lens.tolist(), strict=False)
    for place, (first_token, start, stop) in enumerate(numbers):
        if start < stop:
            yield Span(place, first_token, start, stop, layer.first_seen(start))


def gather(blocks: torch.Tensor, step: GroupMetadata, span: Span) -> torch.Tensor:
    """Copy the keys (or values, or latents) of a sequence's positions out of its blocks.

    Args:
        blocks: ``[num_blocks, block_size, ...]``.
        step, span: the step and the sequence.

    Returns:
        ``[stop - first_key, ...]``.
    """
    size = blocks.shape[1]
    first, stop = span.first_key // size, -(-span.stop // size)
    block_ids = step.block_tables[span.place, first:stop].long()
    positions = blocks[block_ids].flatten(0, 1)
    return positions[span.first_key - first * size : span.stop - first * size]


def seen_keys(layer: AttentionLayer, span: Span, device: torch.device) -> torch.Tensor:
    """Return which gathered keys each query sees: bool ``[queries, keys]``."""
    query = torch.arange(span.start, span.stop, device=device)[:, None]
    key = torch.arange(span.first_key, span.stop, device=device)[None, :]
    seen = key <= query
    if layer.window:
        seen &= key > query - layer.window
    if layer.chunk:
        seen &= key // layer.chunk == query // layer.chunk
    return seen
