"""LayerFacts: facts that determine whether kernels of other packages can serve a layer, and common refusals.

They are plain values, so that choosing and refusing need neither a GPU nor those packages.
"""

from dataclasses import dataclass
from typing import Final

import torch

from pagedkv.attention.backend import AttentionLayer
from pagedkv.device import GroupShape, KeyValueShape, KVStorage

HALF_TYPES: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A layer, and how its keys are stored.

    Args:
        layer: the layer.
        shape: shape of a block of its group.
        block_size: tokens of a block.
        element_stride: distance of the elements of one key, in elements.
        query_dtype: type of queries and answers.
        device: type of the device, "cuda" or "cpu".
        batch_invariant: whether an answer must not depend on other rows of the step.
    """

    layer: AttentionLayer
    shape: GroupShape
    block_size: int
    element_stride: int
    query_dtype: torch.dtype
    device: str
    batch_invariant: bool


def facts_of(
    storage: KVStorage, layer: AttentionLayer, query_dtype: torch.dtype, *, batch_invariant: bool
) -> LayerFacts:
    """Return a layer's facts. Raises ConfigurationError if the group or layer is unknown."""
    shape, stride = storage.shapes[layer.group], 1
    if isinstance(shape, KeyValueShape):
        stride = storage.keys(layer.group, layer.index).stride(3)
    block_size = storage.config.groups[layer.group].block_size
    return LayerFacts(layer, shape, block_size, stride, query_dtype, storage.device.type, batch_invariant)


def shared_refusal(facts: LayerFacts) -> str | None:  # noqa: PLR0911 - one return for each reason
    """Return the reason why kernels of other packages, for plain keys and values in 16 bits, cannot serve a layer."""
    layer, shape = facts.layer, facts.shape
    if facts.device != "cuda":
        return "its keys are not on a GPU"
    if layer.is_latent or not isinstance(shape, KeyValueShape):
        return "its group does not store keys and values"
    if facts.query_dtype not in HALF_TYPES or shape.dtype is not facts.query_dtype:
        return f"queries are {facts.query_dtype} and keys {shape.dtype}: both must be float16, or bfloat16"
    for what, is_there in (
        ("chunks", layer.chunk),
        ("learnt sinks", layer.has_sinks),
        ("sink tokens before its window", layer.num_sink_tokens),
    ):
        if is_there:
            return f"it has {what}"
    if shape.key_dim != shape.value_dim:
        return f"keys have {shape.key_dim} dimensions and values {shape.value_dim}"
    if facts.element_stride != 1:
        return f"{facts.element_stride} elements lie between those of one key"
    return None
