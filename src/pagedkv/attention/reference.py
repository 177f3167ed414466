"""Keys of one sequence, gathered from its blocks; and attention by its definition, for tests of other back ends.

Back ends gather for prompts. Only positions that some query sees are gathered, so other content of a block (old content
of other rows, NaN) is never read.

ReferenceBackend computes query by query, in double precision. It reads keys one by one through the block table, and
shares no code with other back ends except the description of a layer. Slow.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch

from pagedkv.attention.backend import AttentionLayer, GroupMetadata, StepMetadata
from pagedkv.device import KVStorage


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


KeyReader: TypeAlias = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""Returns key and value, ``[key heads, dim]``, for a place and a position of its sequence."""


@final
class ReferenceBackend:
    """The plain reference; see :class:`~pagedkv.attention.backend.AttentionBackend`.

    Args:
        storage: storage of the keys.
        layers: the layers, by number.
        latent_dim: leading dimensions of latents that are values.
    """

    def __init__(self, storage: KVStorage, layers: Sequence[AttentionLayer], *, latent_dim: int = 0) -> None:
        self._storage = storage
        self._latent_dim = latent_dim
        self._layers = tuple(layers)

    @staticmethod
    def refusal(layer: AttentionLayer) -> str | None:
        """Refuse no layer."""
        del layer
        return None

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
        """Write key by key."""
        spec = self._layers[layer]
        keys, values = self._blocks(spec)
        size = keys.shape[1]
        for token, slot in enumerate(step.groups[spec.group].slot_mapping.tolist()):
            if slot >= 0:
                keys[slot // size, slot % size] = key[token]
                values[slot // size, slot % size] = value[token]

    def attend(
        self, layer: int, query: torch.Tensor, step: StepMetadata, *, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute query by query and head by head."""
        spec = self._layers[layer]
        keys, values = self._blocks(spec)
        size = keys.shape[1]
        table = step.groups[spec.group].block_tables

        def read(place: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
            block = table[place, position // size]
            return keys[block, position % size], values[block, position % size]

        return _attend(spec, query, step, read, sinks)

    def write_latents(self, layer: int, latent: torch.Tensor, step: StepMetadata) -> None:
        """Write latent by latent."""
        spec = self._layers[layer]
        latents = self._storage.latents(spec.group, spec.index)
        size = latents.shape[1]
        for token, slot in enumerate(step.groups[spec.group].slot_mapping.tolist()):
            if slot >= 0:
                latents[slot // size, slot % size] = latent[token]

    def attend_latents(self, layer: int, query: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Compute attention to keys of one head, whose values are their first dimensions."""
        spec = self._layers[layer]
        latents = self._storage.latents(spec.group, spec.index)
        table = step.groups[spec.group].block_tables

        def read(place: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
            latent = latents[table[place, position // latents.shape[1]], position % latents.shape[1]][None]
            return latent, latent[:, : self._latent_dim]

        return _attend(spec, query, step, read, None)

    def attend_unfolded(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepMetadata
    ) -> torch.Tensor:
        """Compute attention to keys that the model has unfolded, query by query."""
        spec = self._layers[layer]
        group = step.groups[spec.group]
        places: dict[tuple[int, int], int] = {}
        for place in range(step.num_places):
            start, stop = int(group.starts[place]), int(group.seq_lens[place])
            for position in range(spec.first_seen(start), stop) if start < stop else ():
                places[place, position] = len(places)
        return _attend(spec, query, step, lambda *at: (key[places[at]], value[places[at]]), None)

    def _blocks(self, spec: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        return self._storage.keys(spec.group, spec.index), self._storage.values(spec.group, spec.index)


def _attend(
    spec: AttentionLayer, query: torch.Tensor, step: StepMetadata, read: KeyReader, sinks: torch.Tensor | None
) -> torch.Tensor:
    group = step.groups[spec.group]
    out = []
    for place in range(step.num_places):
        start, stop = int(group.starts[place]), int(group.seq_lens[place])
        for position in range(start, stop):
            token = int(group.query_start_loc[place]) + position - start
            seen = [past for past in range(position + 1) if _sees(spec, position, past)]
            keys, values = zip(*(read(place, past) for past in seen), strict=True)
            out.append(
                torch.stack(
                    [
                        _attend_one(spec, query[token], torch.stack(keys), torch.stack(values), head, sinks)
                        for head in range(spec.num_heads)
                    ]
                )
            )
    return torch.stack(out).to(query.dtype)


def _sees(spec: AttentionLayer, position: int, past: int) -> bool:
    if spec.window and spec.num_sink_tokens <= past <= position - spec.window:
        return False
    return not spec.chunk or past // spec.chunk == position // spec.chunk


def _attend_one(
    spec: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    head: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    key_head = head * keys.shape[1] // spec.num_heads
    scores = [float(key[key_head].double() @ query[head].double()) * spec.scale for key in keys]
    if spec.soft_cap:
        scores = [spec.soft_cap * math.tanh(score / spec.soft_cap) for score in scores]
    sink = [] if sinks is None else [float(sinks[head])]
    largest = max(scores + sink)
    total = sum(math.exp(score - largest) for score in scores + sink)
    weights = torch.tensor([math.exp(score - largest) / total for score in scores], dtype=torch.float64)
    return weights.to(values.device) @ values[:, key_head].double()
