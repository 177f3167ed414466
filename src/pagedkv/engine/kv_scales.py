"""KVScales: divisors of keys and values that are stored in eight bits.

A float of eight bits (e4m3fn) represents magnitudes from 2**-9 to 448: greater ones become 448, and below 2**-6 digits
are lost. Keys of some layers and heads lie outside of that range. So the greatest magnitude of each head is measured
once, over texts like those to be served, and becomes the greatest number of the type::

    stored = round(key / scale)        scale = margin x greatest magnitude / 448, for each layer and head

The scales are part of the identity of content in tiers: content stored by other scales is never loaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from pagedkv.contract.arguments import as_token_array
from pagedkv.device import KVStorage
from pagedkv.errors import ConfigurationError
from pagedkv.probe import compat
from pagedkv.probe.compat import BorrowedModel
from pagedkv.probe.layers import EngineGroups

GREATEST: Final = torch.finfo(torch.float8_e4m3fn).max
LEAST: Final = 1e-12
"""The scale of a head whose keys were all zero."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """The scales of a model's layers.

    Args:
        keys: for each layer that keeps keys, by transformers' number, the scale of each head.
        values: likewise.

    Raises:
        ConfigurationError: other layers or heads for values than for keys, or a scale that is not above 0.
    """

    keys: Mapping[int, tuple[float, ...]]
    values: Mapping[int, tuple[float, ...]]

    def __post_init__(self) -> None:
        """Check that both sides have the same layers and heads."""
        shapes = [{layer_idx: len(each) for layer_idx, each in side.items()} for side in (self.keys, self.values)]
        if shapes[0] != shapes[1]:
            raise ConfigurationError(f"keys have scales of {shapes[0]} heads by layer, and values of {shapes[1]}")
        for layer_idx, scales in (*self.keys.items(), *self.values.items()):
            if not all(0 < scale < float("inf") for scale in scales):
                raise ConfigurationError(f"scales of layer {layer_idx} must be above 0 and finite, got {scales}")

    def to_json(self) -> str:
        """Write the scales as JSON, for :meth:`from_json`."""
        return json.dumps({"keys": self.keys, "values": self.values})

    @classmethod
    def from_json(cls, text: str | bytes) -> "KVScales":
        """Read scales that :meth:`to_json` wrote. Raises ConfigurationError."""
        try:
            sides = json.loads(text)
            keys, values = (
                {int(layer_idx): tuple(map(float, scales)) for layer_idx, scales in sides[side].items()}
                for side in ("keys", "values")
            )
        except (ValueError, TypeError, LookupError, AttributeError) as problem:
            raise ConfigurationError(f"this is no JSON of KVScales: {problem!r}") from problem
        return cls(keys, values)


def measure_kv_scales(model: compat.Model, prompts: Sequence[Sequence[int]], *, margin: float = 1.0) -> KVScales:
    """Measure the scales of a model by dense passes over prompts.

    Args:
        model: a decoder in evaluation mode, on any device. It is not changed.
        prompts: token ids of texts like those to be served; a few thousand tokens.
        margin: factor of the greatest measured magnitude, since keys of requests may be greater.

    Raises:
        ConfigurationError: no prompt, or a margin below 1.
        TokenError: a prompt is not an array of token ids.

    Cost: one dense pass a prompt.
    """
    if not prompts:
        raise ConfigurationError("scales are measured over prompts, and there is none")
    if not margin >= 1.0:
        raise ConfigurationError(f"margin must be 1 or more, got {margin!r}")
    greatest: dict[int, torch.Tensor] = {}
    for prompt in prompts:
        tokens = torch.from_numpy(as_token_array(prompt).copy()).long().to(model.device)
        with torch.inference_mode(), BorrowedModel(model).alone():
            compat.call(model, _watched_cache(model, greatest), input_ids=tokens[None])
    scales = {layer_idx: (each.clamp(min=LEAST) * margin / GREATEST).tolist() for layer_idx, each in greatest.items()}
    sides = [{layer_idx: tuple(each[side]) for layer_idx, each in sorted(scales.items())} for side in (0, 1)]
    return KVScales(*sides)


def _watched_cache(model: compat.Model, greatest: dict[int, torch.Tensor]) -> object:
    """Return a dense cache that notes the greatest magnitudes of its updates by layer, float32 ``[2, heads]``."""
    cache = compat.dense_cache(model)
    update = cache.update

    def noted(
        key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: object, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if key.shape[1] == value.shape[1]:
            found = torch.stack([side.abs().amax(dim=(0, 2, 3)).float() for side in (key, value)])
            greatest[layer_idx] = torch.maximum(greatest.get(layer_idx, found), found)
        return update(key, value, layer_idx, *args, **options)

    cast("Any", cache).update = noted  # of this one cache
    return cache


def set_scales(storage: KVStorage, groups: EngineGroups, scales: KVScales) -> None:
    """Write scales into the storage of a model's keys and values.

    Raises:
        ConfigurationError: a layer that keeps keys has no scales, or scales of another number of heads.
    """
    for layer_idx, place in groups.sources.items():
        if layer_idx in groups.latents:
            continue
        there = storage.scales(place.group)[place.index]
        sides = [side.get(layer_idx, ()) for side in (scales.keys, scales.values)]
        if any(len(side) != there.shape[1] for side in sides):
            raise ConfigurationError(
                f"layer {layer_idx} keeps keys of {there.shape[1]} heads, and kv_scales has {len(sides[0])} for it: "
                "measure the scales with this model (measure_kv_scales)"
            )
        there.copy_(torch.tensor(sides, device=there.device))
