"""CPUBackend: computes each sequence of a step by the faster path, and writes keys and values.

Keys in float32 or bfloat16 of a sequence with one query are read in place, and sums are float32; the keys of all other
sequences are gathered. A step in which all sequences decode gathers no keys.

Compiled loops take a layer's keys, or values, as the pool's elements in one flat array, and strides.

The flat array is contiguous for every layout of the pool, and so are the elements of one key, so loops are vectorised.
Element c of head h of the token at offset t of block b is at ``base + b * block + t * token + h * head + c``.

Prompts are computed by torch's SDPA for each sequence, on keys gathered from its blocks. If a layer has a soft cap or
sinks, which SDPA does not support, scores are computed explicitly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.attention.backend import AttentionLayer, GroupMetadata, StepMetadata, require_layers
from pagedkv.attention.cpu.decode import Pool, decode_attention, write_tokens
from pagedkv.attention.reference import Span, gather, seen_keys, spans
from pagedkv.contract.arrays import Int64Array
from pagedkv.device import KVStorage
from pagedkv.device.kernels.inputs import TokenSide
from pagedkv.device.kernels.reference import write_tokens as write_tokens_plainly
from pagedkv.errors import ConfigurationError


@dataclass(frozen=True, slots=True, eq=False)
class LayerMemory:
    """Location of a layer's keys or values.

    Args:
        blocks: the view of the storage, ``[num_blocks, block_size, heads, dim]``.
        strides: int64 ``[4]``, in elements: base, block, token, head.
        pool: the pool's bytes.
        is_half: whether elements are bfloat16.
        is_read_in_place: whether compiled loops can read the elements.
    """

    blocks: torch.Tensor
    strides: Int64Array
    pool: torch.Tensor
    is_half: bool
    is_read_in_place: bool

    @classmethod
    def of(cls, storage: KVStorage, group: int, blocks: torch.Tensor) -> "LayerMemory":
        """Describe a view of the storage. Raises ConfigurationError if the elements of a key are not contiguous."""
        if blocks.stride(3) != 1:
            raise ConfigurationError(
                f"group {group} is laid out with {blocks.stride(3)} elements between those of one key: put C last"
            )
        strides = np.array([blocks.storage_offset(), *blocks.stride()[:3]], np.int64)
        pool, is_half = storage.pool_of(group).device_bytes, blocks.dtype is torch.bfloat16
        is_read_in_place = blocks.dtype is torch.float32 or (is_half and pool.numel() % 4 == 0)
        return cls(blocks, strides, pool, is_half, is_read_in_place)

    def flat(self) -> Pool:
        """Return the pool as floats and as halves. Do not keep them, since a storage's memory moves when it sleeps."""
        return self.pool.view(torch.float32).numpy(), self.pool.view(torch.uint16).numpy()


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
    mask = None if is_causal else seen_keys(layer, span, query.device)  # of two dimensions: else SDPA is not fused
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


@final
class CPUBackend:
    """Attention on a CPU; see :class:`~pagedkv.attention.backend.AttentionBackend`.

    Args:
        storage: storage of the keys.
        layers: the layers, by number.
        latent_dim: leading dimensions of latents that are values.

    Raises:
        ConfigurationError: a layer cannot be served, or its layout does not keep the elements of a key contiguous.
    """

    def __init__(self, storage: KVStorage, layers: Sequence[AttentionLayer], *, latent_dim: int = 0) -> None:
        require_layers(CPUBackend, layers)
        self._layers = tuple(layers)
        of_tokens = {number: each for number, each in enumerate(layers) if not each.is_latent}
        self._keys = {
            number: LayerMemory.of(storage, each.group, storage.keys(each.group, each.index))
            for number, each in of_tokens.items()
        }
        self._values = {
            number: LayerMemory.of(storage, each.group, storage.values(each.group, each.index))
            for number, each in of_tokens.items()
        }
        self._shapes = {
            number: np.array(
                [*memory.blocks.shape[1:3], layers[number].window, layers[number].chunk, memory.is_half], np.int64
            )
            for number, memory in self._keys.items()
        }
        self._storage = storage
        self._latent_dim = latent_dim
        self._no_sinks = np.zeros(0, np.float32)

    @staticmethod
    def refusal(layer: AttentionLayer) -> str | None:
        """Refuse sink tokens, which these loops do not support."""
        if layer.num_sink_tokens:
            return "it has sink tokens before its window, which are read on a GPU alone"
        return None

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
        """Write a step's keys and values into their slots. O(elements)."""
        slots = step.groups[self._layers[layer].group].slot_mapping
        for memory, tokens in ((self._keys[layer], key), (self._values[layer], value)):
            size = memory.blocks.shape[1]
            if memory.is_read_in_place:
                floats, halves = memory.flat()
                given = tokens.to(memory.blocks.dtype).contiguous()
                if memory.is_half:
                    write_tokens(halves, memory.strides, size, slots.numpy(), given.view(torch.uint16).numpy())
                else:
                    write_tokens(floats, memory.strides, size, slots.numpy(), given.numpy())
            else:
                taken = slots >= 0
                memory.blocks[slots[taken] // size, slots[taken] % size] = tokens[taken].to(memory.blocks.dtype)

    def attend(
        self, layer: int, query: torch.Tensor, step: StepMetadata, *, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute attention of a step's queries; gathered keys are freed after each sequence."""
        spec, keys, values = self._layers[layer], self._keys[layer].blocks, self._values[layer].blocks
        group = step.groups[spec.group]
        out = step.new_answers(query, values.shape[3])
        reads_in_place = self._keys[layer].is_read_in_place and query.dtype is keys.dtype
        if reads_in_place and self._decode(layer, query, group, sinks, out) == step.num_tokens:
            return out
        for span in spans(spec, group):
            if reads_in_place and span.num_queries == 1:
                continue
            key, value = (gather(blocks, group, span).to(query.dtype) for blocks in (keys, values))
            out[span.tokens] = attend_to(spec, span, query[span.tokens], key, value, sinks)
        return out

    def write_latents(self, layer: int, latent: torch.Tensor, step: StepMetadata) -> None:
        """Write a step's latents into their slots. O(elements)."""
        side = TokenSide(latent[:, None], self._latents(layer)[:, :, None])
        write_tokens_plainly([side], step.groups[self._layers[layer].group].slot_mapping)

    def attend_latents(self, layer: int, query: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Compute attention of absorbed queries to gathered latents, sequence by sequence."""
        spec = self._layers[layer]
        group = step.groups[spec.group]
        out = step.new_answers(query, self._latent_dim)
        for span in spans(spec, group):
            key = gather(self._latents(layer), group, span).to(query.dtype)[:, None]
            out[span.tokens] = attend_to(spec, span, query[span.tokens], key, key[..., : self._latent_dim])
        return out

    def attend_unfolded(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepMetadata
    ) -> torch.Tensor:
        """Compute attention to keys and values that the model has unfolded from latents, sequence by sequence."""
        spec = self._layers[layer]
        out = step.new_answers(query, value.shape[2])
        first = 0
        for span in spans(spec, step.groups[spec.group]):
            keys = slice(first, first + span.stop - span.first_key)
            out[span.tokens] = attend_to(spec, span, query[span.tokens], key[keys], value[keys])
            first = keys.stop
        return out

    def _latents(self, layer: int) -> torch.Tensor:
        return self._storage.latents(self._layers[layer].group, self._layers[layer].index)

    def _decode(
        self, layer: int, query: torch.Tensor, group: GroupMetadata, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> int:
        """Compute the sequences with one query, in place; return their number."""
        spec, keys, values = self._layers[layer], self._keys[layer], self._values[layer]
        offsets, seq_lens = group.query_start_loc.numpy(), group.seq_lens.numpy()
        places = np.flatnonzero(np.diff(offsets) == 1)
        if not len(places):
            return 0
        longest = int(seq_lens[places].max())
        exponents = np.empty(longest, np.int32)
        bits = np.empty(keys.blocks.shape[1] * max(keys.blocks.shape[3], values.blocks.shape[3]), np.int32)
        answers = out if out.dtype is torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
        decode_attention(
            answers.numpy(),
            query.float().contiguous().numpy(),
            places,
            offsets[places].astype(np.int64),
            group.block_tables.numpy(),
            seq_lens,
            keys.flat(),
            keys.strides,
            values.flat(),
            values.strides,
            self._shapes[layer],
            float(spec.scale),
            float(spec.soft_cap),
            self._no_sinks if sinks is None else sinks.detach().float().contiguous().numpy(),
            np.empty((spec.num_heads, longest), np.float32),
            exponents,
            exponents.view(np.float32),
            bits,
            bits.view(np.float32),
        )
        if answers is not out:
            decoded = torch.from_numpy(offsets[places]).long()
            out[decoded] = answers[decoded].to(out.dtype)
        return len(places)
