"""Reads how a model unfolds its latents, by one pass of two tokens; once for each version of its weights.

What is read are copies: after weights have changed they are read again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from pagedkv.memory.attention import Unfolding, UnfoldingReader
from pagedkv.serving.engine import compat
from pagedkv.serving.engine.borrowing import BorrowedModel
from pagedkv.serving.engine.current_pass import IMPLEMENTATION, listening

__all__ = ["Unfoldings", "read_unfoldings"]

NUM_TOKENS: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Unfoldings:
    """What was read.

    Args:
        by_layer: how layers unfold, by transformers' number of the layer.
        reasons: why the other layers with latents are to be unfolded by the model, likewise.
    """

    by_layer: Mapping[int, Unfolding]
    reasons: Mapping[int, str]


def read_unfoldings(model: compat.Model, latents: Mapping[int, tuple[int, int]]) -> Unfoldings:
    """Find out how a model unfolds latents. Changes nothing.

    Args:
        model: a decoder that was probed.
        latents: widths of the two latent vectors, by layer, as :class:`~pagedkv.serving.engine.grouping.EngineGroups`
            has them.

    Cost: one pass of two tokens, in which each layer unfolds as many latents as they have dimensions.
    """
    if not latents:
        return Unfoldings({}, {})
    reader, cache = UnfoldingReader(latents), compat.dense_cache(model)
    update = cache.update

    def answered(
        key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: object, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reader.update(layer_idx, *update(key, value, layer_idx, *args, **options))

    cast("Any", cache).update = answered  # of this one cache
    positions = torch.arange(NUM_TOKENS, device=model.device)
    inputs = {"input_ids": positions[None], "position_ids": positions[None], "past_key_values": cache}
    failure = "it was not called in the pass"
    try:
        with torch.inference_mode(), BorrowedModel(model).calling(IMPLEMENTATION), listening(reader):
            compat.forward(model, positions[-1:], **inputs)
    except Exception as problem:  # noqa: BLE001 - a model that unfolds otherwise does so in any way
        failure = f"the pass failed: {type(problem).__name__}: {problem}".splitlines()[0]
    left_out = {layer_idx: failure for layer_idx in latents if layer_idx not in reader.unfoldings}
    return Unfoldings(reader.unfoldings, left_out | reader.reasons)
