"""The matrices by which a model unfolds its latents, read by one pass of two tokens, and again for new weights.

The matrices are copies of weights. They stay at their addresses, so that captured graphs remain valid after
:meth:`AbsorbedLatents.read_again` has replaced their contents.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast, final

import torch

from pagedkv.attention import Unfolding, UnfoldingReader
from pagedkv.errors import ConfigurationError, UnsupportedModelError
from pagedkv.probe import compat
from pagedkv.probe.compat import IMPLEMENTATION, BorrowedModel, listening
from pagedkv.probe.layers import EngineGroups

__all__ = ["AbsorbedLatents", "Unfoldings", "latents_to_absorb", "read_unfoldings"]

NUM_TOKENS: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Unfoldings:
    """The unfoldings of a model's layers.

    Args:
        by_layer: the matrices of layers, by transformers' number of the layer.
        reasons: why the model must unfold the latents of the other layers, by the same.
    """

    by_layer: Mapping[int, Unfolding]
    reasons: Mapping[int, str]


def read_unfoldings(model: compat.Model, latents: Mapping[int, tuple[int, int]]) -> Unfoldings:
    """Find out how a model unfolds latents. Changes nothing.

    Args:
        model: a decoder that was probed.
        latents: widths of the two latent vectors, by layer, as :class:`~pagedkv.probe.layers.EngineGroups`
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
    inputs = {"input_ids": positions[None], "position_ids": positions[None]}
    if any(map(compat.has_indexer, cache.layers)):
        inputs["attention_mask"] = positions <= positions[None, None, :, None]
    failure = "it was not called in the pass"
    try:
        with torch.inference_mode(), BorrowedModel(model).calling(IMPLEMENTATION), listening(reader):
            compat.forward(model, positions[-1:], cache, **inputs)
    except Exception as problem:  # noqa: BLE001 - a model that unfolds otherwise does so in any way
        failure = f"the pass failed: {type(problem).__name__}: {problem}".splitlines()[0]
    left_out = {layer_idx: failure for layer_idx in latents if layer_idx not in reader.unfoldings}
    return Unfoldings(reader.unfoldings, left_out | reader.reasons)


@final
class AbsorbedLatents:
    """The layers whose latents an engine attends to without unfolding them.

    Args:
        model: a decoder that was probed.
        latents: the layers to be absorbed where possible, as :func:`read_unfoldings` takes them; {}: none.

    Attributes:
        by_layer: the matrices of these layers, by transformers' number of the layer. Empty: the model unfolds all.
        latent_dim: leading dimensions of a latent that are values; 0 if there is no such layer.
        reasons: why the model unfolds the latents of other layers, by the same.

    Cost: as :func:`read_unfoldings`, and memory for the matrices: as much as the weights that unfold latents.
    """

    def __init__(self, model: compat.Model, latents: Mapping[int, tuple[int, int]]) -> None:
        self._model = model
        self._latents = latents
        found = read_unfoldings(model, latents)
        sizes = Counter(each.num_value_dims for each in found.by_layer.values())
        self.latent_dim = sizes.most_common(1)[0][0] if sizes else 0
        self.by_layer = {
            layer_idx: each for layer_idx, each in found.by_layer.items() if each.num_value_dims == self.latent_dim
        }
        others = {
            layer_idx: f"its values depend on {each.num_value_dims} dimensions, others on {self.latent_dim}"
            for layer_idx, each in found.by_layer.items()
            if layer_idx not in self.by_layer
        }
        self.reasons = {**found.reasons, **others}

    def by_call(self, groups: EngineGroups) -> dict[int, Unfolding]:
        """Return how layers unfold, by the number of the attention call that reads their latents."""
        return {groups.writers[layer_idx]: unfolding for layer_idx, unfolding in self.by_layer.items()}

    def read_again(self) -> None:
        """Replace the matrices by those of the model's present weights, at the same addresses.

        Raises:
            UnsupportedModelError: a layer does not unfold by matrices of these shapes any more; nothing was replaced.
        """
        found = read_unfoldings(self._model, {layer_idx: self._latents[layer_idx] for layer_idx in self.by_layer})
        for layer_idx, old in self.by_layer.items():
            new = found.by_layer.get(layer_idx)
            if new is None or (new.keys.shape, new.values.shape) != (old.keys.shape, old.values.shape):
                why = found.reasons.get(layer_idx, "its matrices have other shapes")
                raise UnsupportedModelError(
                    f"layer {layer_idx} unfolds its latents otherwise than when the engine was built: {why}. Build a "
                    "new engine for these weights, or one with absorb_latents=False"
                )
        with torch.inference_mode():
            for layer_idx, old in self.by_layer.items():
                old.keys.copy_(found.by_layer[layer_idx].keys)
                old.values.copy_(found.by_layer[layer_idx].values)


def latents_to_absorb(
    model: compat.Model, groups: EngineGroups, *, wanted: bool | None, is_sharded: bool
) -> Mapping[int, tuple[int, int]]:
    """Return the layers whose latents an engine is to attend to without unfolding them, as ``groups.latents``.

    Args:
        model: a decoder that was probed; groups: where its layers lie.
        wanted: as ``EngineConfig.absorb_latents``.
        is_sharded: whether the model's layers are split among ranks, which run no pass for this.

    Raises:
        ConfigurationError: latents of a sharded model were to be absorbed.
    """
    if is_sharded and wanted and groups.latents:
        raise ConfigurationError("absorb_latents needs a whole model, and this one is split among ranks: leave it out")
    on_gpu = model.device.type == "cuda" and not is_sharded
    return groups.latents if (on_gpu if wanted is None else wanted) else {}
