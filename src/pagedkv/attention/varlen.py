"""torch's ``varlen_attn`` for layers that it supports: FlashAttention, if torch's version takes a block table.

It needs the length of the longest row on the host, so it computes only steps whose lengths are known there. Rows are
never split, since the split would depend on the longest row of a step. So an answer depends on its row alone.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, final

import torch

from pagedkv.attention.backend import AttentionLayer, GroupMetadata, KnownRanges
from pagedkv.attention.facts import LayerFacts, shared_refusal
from pagedkv.device import KVStorage

VarlenFunction: TypeAlias = Callable[..., Any]

WIDEST: Final = 256
WIDTH_UNIT: Final = 8
PAGE_UNIT: Final = 256
"""FlashAttention 2 needs blocks of a multiple of this number of tokens."""
NEEDED: Final = ("block_table", "seqused_k", "num_splits", "window_size")


def installed_function() -> VarlenFunction | None:
    """Return torch's function; None if torch's version does not have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in every version
    except ImportError:
        return None
    function: VarlenFunction = varlen_attn
    return function


def refusal(  # noqa: PLR0911 - one return for each reason
    facts: LayerFacts, function: VarlenFunction | None
) -> str | None:
    """Return the reason why it cannot serve a layer; None if it can.

    Args:
        facts: facts of the layer.
        function: torch's function.
    """
    if function is None:
        return f"torch {torch.__version__} has no varlen_attn"
    lacking = [name for name in NEEDED if name not in inspect.signature(function).parameters]
    if lacking:
        return f"varlen_attn of torch {torch.__version__} takes no {', no '.join(lacking)}: torch 2.13 does"
    reason = shared_refusal(facts)
    if reason is not None:
        return reason
    if facts.layer.soft_cap:
        return "it has a soft cap"
    dim = getattr(facts.shape, "key_dim", 0)
    if dim > WIDEST or dim % WIDTH_UNIT:
        return f"heads have {dim} dimensions, varlen_attn serves multiples of {WIDTH_UNIT} up to {WIDEST}"
    if facts.block_size % PAGE_UNIT:
        return f"blocks have {facts.block_size} tokens, varlen_attn takes multiples of {PAGE_UNIT}"
    return None


@final
class VarlenAttention:
    """Attention of some layers by ``varlen_attn``.

    Args:
        storage: storage of the keys.
        layers: layers to serve, by number.
        function: torch's function.
    """

    def __init__(self, storage: KVStorage, layers: Mapping[int, AttentionLayer], function: VarlenFunction) -> None:
        self._function = function
        self._layers = dict(layers)
        self._pairs = {
            number: (storage.keys(layer.group, layer.index), storage.values(layer.group, layer.index))
            for number, layer in layers.items()
        }

    def attend(self, number: int, query: torch.Tensor, group: GroupMetadata, known: KnownRanges) -> torch.Tensor:
        """Compute attention of a step's queries, ``[tokens, heads, dim]``, with lengths on the host."""
        layer, (keys, values) = self._layers[number], self._pairs[number]
        counts = known.ends - known.starts
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        num_tokens = int(counts.sum())
        if not num_tokens:
            return out
        out[:num_tokens] = self._function(
            query[:num_tokens],
            keys,
            values,
            group.query_start_loc,
            None,
            int(counts.max()),
            int(known.ends.max()),
            scale=layer.scale,
            window_size=(layer.window - 1, 0),
            enable_gqa=layer.num_heads != keys.shape[2],
            seqused_k=group.seq_lens,
            block_table=group.block_tables,
            num_splits=1,
        )
        return out
