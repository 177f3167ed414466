"""What a probe saw of a model: attention layers in the order of their calls, and what each keeps.

A *call* is one use of the attention function in a forward pass. Calls are numbered in their order, which is the same in
every pass: a block that several layers share is called several times, a layer that shares keys calls without keeping
any. A *source* is what one call of ``Cache.update`` keeps.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

__all__ = ["CallSpec", "ModelLayers", "Place", "Rule", "RuleKind", "SourceSpec", "StateSpec"]

RuleKind: TypeAlias = Literal["full", "window", "chunk"]


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """Which earlier positions are seen.

    Args:
        kind: as :mod:`pagedkv.memory.contract.spec` has them: "full", "window" or "chunk".
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
        is_latent: what is attended to is unfolded from it by the model: ``key_dim`` and ``value_dim`` are those of two
            vectors, for all heads.
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
        is_sharing: an earlier call reads the same source.
        num_heads: heads of its queries.
        scale, soft_cap: what happens to scores; 0: no cap.
        has_sinks: each head has a sink.
        rule: which positions it sees.
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
    """What a model keeps, and how it reads that.

    Args:
        calls: the calls of a forward pass, in order.
        sources: what is kept of tokens.
        states: what is kept of sequences.
    """

    calls: tuple[CallSpec, ...]
    sources: tuple[SourceSpec, ...]
    states: tuple[StateSpec, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a source or a state lies: layer ``index`` of a group."""

    group: int
    index: int
