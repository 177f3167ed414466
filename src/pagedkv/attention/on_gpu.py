"""TritonBackend: attention on a GPU, by kernels that read blocks in place.

Lengths stay on the device and are not read by the host, so a captured graph of a call can be replayed for every step of
its size. Layers with equal reads share a list of work. The first of these layers makes the list at each of its calls,
since a forward pass calls layers in the order of their numbers. Keys that a model unfolded from latents are treated as
blocks of one token, whose table is made on the device too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from pagedkv.attention.backend import AttentionLayer, GroupMetadata, StepMetadata
from pagedkv.device import KVStorage, LatentShape
from pagedkv.device.kernels.inputs import (
    AttentionTiling,
    PagedLayer,
    PagedRows,
    Reading,
    TokenSide,
    WorkList,
    tiling_for,
)
from pagedkv.device.kernels.selection import KernelChoice, kernels_for
from pagedkv.device.shapes import FP8_TYPES, KeyValueShape
from pagedkv.errors import ConfigurationError

WIDEST: Final = 576
"""Most dimensions of a head for which there is a tiling."""


@dataclass(slots=True, eq=False)
class _Work:
    """A list of work, and the step that it is made for.

    Args:
        work: the list.
        first_layer: number of the layer that makes the list.
        made_for: the step's metadata; None before the first call.
        rows: the step's arguments for the kernels.
    """

    work: WorkList
    first_layer: int
    made_for: GroupMetadata | None = None
    rows: PagedRows | None = None


@final
class TritonBackend:
    """Attention on a GPU; see :class:`~pagedkv.attention.backend.AttentionBackend`.

    Args:
        storage: storage of the keys.
        layers: the layers, by number.
        max_places: most rows of a step.
        max_tokens: most tokens of a step.
        max_length: most tokens of a row.
        latent_dim: leading dimensions of latents that are values; 0: the model unfolds latents, and attention is
            computed as on a CPU (:meth:`attend_unfolded`).
        query_dtype: type of queries and answers.
        num_draft: most drafts of a row; rows of up to one query more are split along their keys.
        batch_invariant: whether an answer depends on its row alone. If False, consecutive rows that begin with the same
            blocks read these blocks once, which is faster and changes rounding.
        tiling: how work is split; None: chosen by :func:`tiling_for`, from measurements.
        kernels: "auto": Triton on a GPU, plain torch on a CPU.

    Raises:
        ConfigurationError: a layer cannot be served, a layout does not keep the elements of a key contiguous, or memory
            does not suffice for the lists.
        DeviceUnavailableError: Triton is not installed.
    """

    def __init__(
        self,
        storage: KVStorage,
        layers: Sequence[AttentionLayer],
        *,
        max_places: int,
        max_tokens: int,
        max_length: int,
        latent_dim: int = 0,
        query_dtype: torch.dtype = torch.bfloat16,
        num_draft: int = 0,
        batch_invariant: bool = True,
        tiling: AttentionTiling | None = None,
        kernels: KernelChoice = "auto",
    ) -> None:
        self._layers = tuple(layers)
        self._kernels = kernels_for(storage.device, kernels)
        self._memory = tuple(_memory_of(storage, number, layer, latent_dim) for number, layer in enumerate(layers))
        self._tiling, self._query_nbytes = tiling, query_dtype.itemsize
        self._positions = torch.arange(max_length, dtype=torch.int32, device=storage.device)
        self._limits = {
            "max_places": max_places,
            "max_tokens": max_tokens,
            "max_length": max_length,
            "few_queries": 1 + num_draft,
        }
        self._shares = not batch_invariant
        self._by_kind: dict[tuple[object, ...], _Work] = {}
        self._lists: dict[int, _Work] = {}
        for number, (layer, memory) in enumerate(zip(self._layers, self._memory, strict=True)):
            if layer.is_latent and not latent_dim:
                continue
            _require_dimensions(number, layer, memory)
            self._lists[number] = self._list_of(number, memory)

    @staticmethod
    def refusal(layer: AttentionLayer) -> str | None:
        """Refuse no layer; the constructor checks the memory of layers."""
        del layer
        return None

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
        """Write a step's keys and values into their slots; if stored in eight bits, divided by their scales."""
        memory = self._memory[layer]
        sides = [TokenSide(key, memory.keys, memory.key_scales), TokenSide(value, memory.values, memory.value_scales)]
        self._kernels.write_tokens(sides, step.groups[self._layers[layer].group].slot_mapping)

    def write_latents(self, layer: int, latent: torch.Tensor, step: StepMetadata) -> None:
        """Write a step's latents into their slots; if stored in eight bits, divided by their scale."""
        memory = self._memory[layer]
        sides = [TokenSide(latent[:, None, :], memory.keys, memory.key_scales)]
        self._kernels.write_tokens(sides, step.groups[self._layers[layer].group].slot_mapping)

    def attend(
        self, layer: int, query: torch.Tensor, step: StepMetadata, *, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute attention of a step's queries to the keys in the blocks. Answers of padding are undefined, or zero.

        The host does not wait. Cost: O(seen positions x heads x dimensions) on the device, each key read once.
        """
        group, memory = step.groups[self._layers[layer].group], self._memory[layer]
        listed = self._lists[layer]
        if layer == listed.first_layer or listed.made_for is not group:
            listed.rows = PagedRows(group.block_tables, group.starts, group.seq_lens, group.query_start_loc)
            self._make_list(listed, group, memory)
        return self._answer(listed, memory, query, step, sinks)

    def attend_latents(self, layer: int, query: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Compute attention of absorbed queries to latents; as :meth:`attend`."""
        return self.attend(layer, query, step)

    def attend_unfolded(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepMetadata
    ) -> torch.Tensor:
        """Compute attention to unfolded keys and values as :meth:`attend`, also without reading lengths on the host.

        The first call of a layer may allocate a list, and must not be captured.
        """
        spec = self._layers[layer]
        group = step.groups[spec.group]
        key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
        memory = PagedLayer(key[:, None], value[:, None], spec.scale, spec.soft_cap)
        listed = self._list_of(layer, memory, is_unfolded=True)
        if layer == listed.first_layer or listed.made_for is not group:
            table = _unfolded_table(spec, group, self._positions)
            listed.rows = PagedRows(table, group.starts, group.seq_lens, group.query_start_loc)
            self._make_list(listed, group, memory)
        return self._answer(listed, memory, query, step, None)

    def _list_of(self, number: int, memory: PagedLayer, *, is_unfolded: bool = False) -> _Work:
        """Return the list of a layer, shared by layers with equal reads; allocate it at the first call."""
        layer = self._layers[number]
        num_key_heads, value_dim = memory.keys.shape[2], memory.values.shape[3]
        kind: tuple[object, ...] = (layer.group, layer.num_heads, layer.window, layer.chunk, layer.num_sink_tokens)
        kind += (num_key_heads, value_dim, is_unfolded)
        if kind not in self._by_kind:
            reading = _reading_of(layer, memory)
            work = WorkList(
                reading,
                num_heads=layer.num_heads,
                value_dim=value_dim,
                shares=self._shares,
                tiling=self._tiling or tiling_for(memory, reading, self._query_nbytes),
                device=memory.keys.device,
                **self._limits,
            )
            self._by_kind[kind] = _Work(work, number)
        return self._by_kind[kind]

    def _make_list(self, listed: _Work, group: GroupMetadata, memory: PagedLayer) -> None:
        assert listed.rows is not None
        self._kernels.list_work(listed.work, listed.rows, memory.keys.shape[1])
        listed.made_for = group

    def _answer(
        self, listed: _Work, memory: PagedLayer, query: torch.Tensor, step: StepMetadata, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        query = query if query.stride(2) == 1 else query.contiguous()
        out = step.new_answers(query, memory.values.shape[3])
        self._kernels.attend_rows(listed.work, memory, listed.rows, query, out, sinks, has_prompts=step.has_chunks)
        return out


def _unfolded_table(layer: AttentionLayer, group: GroupMetadata, positions: torch.Tensor) -> torch.Tensor:
    """Make a table of unfolded keys as blocks of one token: int32 ``[places, max_length]``.

    Keys of a sequence follow those of earlier sequences, from the first position that it sees on.
    """
    starts, stops = group.starts, group.seq_lens
    first = torch.zeros_like(starts)
    if layer.window:
        first = (starts - layer.window + 1).clamp(min=0)
    elif layer.chunk:
        first = starts // layer.chunk * layer.chunk
    counts = torch.where(starts < stops, stops - first, 0)
    begins = torch.cumsum(counts, 0, dtype=torch.int32) - counts - first
    return (begins[:, None] + positions).clamp(min=0)


def _reading_of(layer: AttentionLayer, memory: PagedLayer) -> Reading:
    return Reading(layer.num_heads // memory.keys.shape[2], layer.window, layer.chunk, layer.num_sink_tokens)


def _memory_of(storage: KVStorage, number: int, layer: AttentionLayer, latent_dim: int) -> PagedLayer:
    """View a layer's memory. Raises ConfigurationError if the kernels cannot read it."""
    shape = storage.shapes[layer.group]
    if isinstance(shape, LatentShape):
        keys = storage.latents(layer.group, layer.index)[:, :, None]
        values = keys[..., : latent_dim or shape.dim]
    elif isinstance(shape, KeyValueShape):
        keys, values = storage.keys(layer.group, layer.index), storage.values(layer.group, layer.index)
    else:
        raise ConfigurationError(f"attention layer {number} ({layer}) cannot be served: its group stores states")
    for what, side in (("keys", keys), ("values", values)):
        if side.stride(3) != 1:
            raise ConfigurationError(
                f"group {layer.group} is laid out with {side.stride(3)} elements between those of one of its {what}: "
                "put C last"
            )
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if shape.dtype in FP8_TYPES:
        given = storage.scales(layer.group)[layer.index]
        scales = (given[0], given[-1])
    return PagedLayer(keys, values, layer.scale, layer.soft_cap, *scales)


def _require_dimensions(number: int, layer: AttentionLayer, memory: PagedLayer) -> None:
    """Refuse heads wider than every tiling. Raises ConfigurationError."""
    for what, side in (("keys", memory.keys), ("values", memory.values)):
        if side.shape[3] > WIDEST:
            raise ConfigurationError(
                f"attention layer {number} ({layer}) cannot be served: its {what} have {side.shape[3]} dimensions, "
                f"and the kernels support up to {WIDEST}"
            )
