"""Arguments that all launches of attention kernels share, derived from a layer's parameters."""

from dataclasses import dataclass
from math import e, log2
from typing import Final

import torch
import triton

from pagedkv.device.kernels.inputs import LEAST_EXTENT, PagedLayer, WorkList, num_processors
from pagedkv.device.kernels.triton.overlapping import may_overlap

FAR: Final = 2**31
"""From this number of elements on, offsets need more than 32 bits."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments of a launch.

    Args:
        num_processors: multiprocessors of the device.
        overlaps: whether a kernel may begin before the previous one has ended.
        scale: factor of products, with log2(e) included, so that weights are powers of two.
        scales: scales of keys and values, or placeholders.
        constants: compile-time constants.
    """

    num_processors: int
    overlaps: bool
    scale: float
    scales: tuple[torch.Tensor, torch.Tensor]
    constants: dict[str, object]

    @classmethod
    def of(cls, work: WorkList, layer: PagedLayer, query: torch.Tensor, sinks: torch.Tensor | None) -> "Launch":
        """Make the arguments of one layer's launches."""
        key_dim, value_dim = layer.keys.shape[3], layer.values.shape[3]
        dim = value_dim if layer.is_read_once else max(LEAST_EXTENT, 1 << key_dim.bit_length() - 1)
        rest = key_dim - dim
        reading, overlaps = work.reading, may_overlap(query.device)
        scales, scale_step, is_scaled = (query, query), 0, False
        if layer.key_scales is not None and layer.value_scales is not None:
            scales, is_scaled = (layer.key_scales, layer.value_scales), True
            scale_step = 1 if layer.key_scales.shape[0] > 1 else 0
        constants = {
            "WINDOW": reading.window,
            "CHUNK": reading.chunk,
            "SINK_TOKENS": reading.num_sink_tokens if reading.window else 0,
            "BLOCK_SIZE": layer.keys.shape[1],
            "IS_FAR": are_tokens_far(layer),
            "KEY_DIM": key_dim,
            "DIM": dim,
            "REST": max(LEAST_EXTENT, triton.next_power_of_2(rest)) if rest > 0 else 0,
            "VALUE_DIM": value_dim,
            "VALUE_TILE": max(LEAST_EXTENT, triton.next_power_of_2(value_dim)),
            "IS_LATENT": layer.is_read_once,
            "HAS_CAP": layer.soft_cap > 0,
            "HAS_SINKS": sinks is not None,
            "IS_SCALED": is_scaled,
            "scale_step": scale_step,
            "PRECISION": "ieee" if query.dtype is torch.float32 else "tf32",
            "OVERLAPS": overlaps,
        }
        return cls(num_processors(query.device), overlaps, layer.scale * log2(e), scales, constants)


def are_tokens_far(layer: PagedLayer) -> bool:
    """Return whether offsets of a block's tokens need 64 bits, as in layouts with N before B."""
    return (layer.keys.shape[1] - 1) * max(layer.keys.stride(1), layer.values.stride(1)) >= FAR
