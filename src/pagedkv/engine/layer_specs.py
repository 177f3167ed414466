"""ModelLayers: the result of the probe: a model's calls of attention in order, and what each layer keeps.

A *call* is one use of the attention function in a forward pass. Calls are numbered in their order, which is the same in
every pass: a module that several layers share has several calls, and a layer that shares keys has a call without a
source of its own. A *source* is what one call of ``Cache.update`` keeps.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

__all__ = ["CallSpec", "ModelLayers", "Place", "Rule", "RuleKind", "SourceSpec", "StateSpec"]

RuleKind: TypeAlias = Literal["full", "window", "chunk"]


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """The positions that a call attends to.

    Args:
        kind: as :mod:`pagedkv.contract.spec` has them: "full", "window" or "chunk".
        extent: tokens of the window or the chunk; 0 for full attention.
    """

    kind: RuleKind
    extent: int = 0


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """What a layer keeps of a token.

    Args:
        layer_idx: transformers' number of the layer.
        num_heads, key_dim, value_dim: of its keys and values.
        dtype: of both.
        is_latent: whether the model unfolds keys and values from it: ``key_dim`` and ``value_dim`` are then the widths
            of two vectors for all heads.
    """

    layer_idx: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    is_latent: bool


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One call of the attention function.

    Args:
        source: number of the source whose keys it reads.
        is_sharing: whether an earlier call reads the same source.
        num_heads: heads of its queries.
        scale, soft_cap: factor and soft cap of scores; 0: no cap.
        has_sinks: whether each head has a sink.
        rule: the positions that it attends to.
    """

    source: int
    is_sharing: bool
    num_heads: int
    scale: float
    soft_cap: float
    has_sinks: bool
    rule: Rule


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a recurrent layer keeps of a sequence.

    Args:
        layer_idx: transformers' number of the layer.
        tensors: shape and type of each of its tensors, by name.
    """

    layer_idx: int
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The attention calls of a model, and what its layers keep.

    Args:
        calls: the calls of a forward pass, in order.
        sources: kept for each token.
        states: kept for each sequence.
        num_vocabulary: columns of its logits. What modules and configs say of it may be stale (Ovis 2).
    """

    calls: tuple[CallSpec, ...]
    sources: tuple[SourceSpec, ...]
    states: tuple[StateSpec, ...]
    num_vocabulary: int


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a source or a state: layer ``index`` of a group."""

    group: int
    index: int
