"""CPUBackend: computes each sequence of a step by the faster path, and writes keys and values.

Keys in 32-bit floats of a sequence with one query are read in place; the keys of all other sequences are gathered. A
step in which all sequences decode gathers no keys.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from pagedkv.attention.backend import AttentionLayer, GroupMetadata, StepMetadata, require_layers
from pagedkv.attention.cpu.backend import LayerMemory, attend_to
from pagedkv.attention.cpu.decode import decode_attention, write_tokens
from pagedkv.attention.reference import gather, spans
from pagedkv.device import KVStorage
from pagedkv.device.kernels.inputs import TokenSide
from pagedkv.device.kernels.reference import write_tokens as write_tokens_plainly

__all__ = ["CPUBackend"]


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
            number: np.array([*self._keys[number].blocks.shape[1:3], each.window, each.chunk], np.int64)
            for number, each in of_tokens.items()
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
            if memory.blocks.dtype is torch.float32:
                write_tokens(memory.flat(), memory.strides, size, slots.numpy(), tokens.float().contiguous().numpy())
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
        reads_in_place = keys.dtype is torch.float32 and query.dtype is torch.float32
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
        decode_attention(
            out.numpy(),
            query.contiguous().numpy(),
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
            np.empty((spec.num_heads // keys.blocks.shape[2], longest), np.float32),
            exponents,
            exponents.view(np.float32),
        )
        return len(places)
