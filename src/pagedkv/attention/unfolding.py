"""Attention to latents without unfolding them (MLA, absorbed): matrices read from a model, and their use.

A model with latents computes keys and values from them by matrices, one for each head. If this is its only operation on
them, the matrices can be applied to the few queries and answers instead of to all positions (DeepSeek-V2, 2024, section
2.1)::

    unfolded    query . (K latent)      weights x (V latent)        K: key_dim x latent, V: value_dim x latent
    absorbed    (query K) . latent      V (weights x latent)

The matrices are read from any model without knowledge of its code. In one pass, unit vectors replace the cached
latents; the keys and values that the model then passes to attention are the rows of K and V. Random vectors are added
at both ends. They detect layers that do not unfold by these matrices alone (a norm after the cache, a bias, an angle
that depends on the position). Latents of such layers are unfolded by the model as before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch

from pagedkv.attention.backend import AttentionBackend, StepMetadata

NUM_OTHERS: Final = 4
"""Number of random vectors at each end."""
ROUNDING: Final = 16
"""Largest difference that counts as rounding, in units in the last place of the sum of absolute products."""


@dataclass(frozen=True, slots=True, eq=False)
class Unfolding:
    """The matrices by which a layer computes keys and values from a latent.

    Args:
        keys: ``[heads, latent_dim, key_dim]``, in the model's type.
        values: ``[heads, num_value_dims, value_dim]``; a value depends only on the first ``num_value_dims`` dimensions
            of a latent.

    The matrices take ``heads x (latent_dim x key_dim + num_value_dims x value_dim)`` elements, in addition to the
    model's own weights.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_value_dims(self) -> int:
        """Leading dimensions of a latent on which its value depends."""
        return self.values.shape[1]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Turn queries ``[tokens, heads, key_dim]`` into queries of latents, ``[tokens, heads, latent_dim]``."""
        return torch.einsum("thk,hlk->thl", query, self.keys)

    def unfold(self, mixed: torch.Tensor) -> torch.Tensor:
        """Turn sums of latents ``[tokens, heads, num_value_dims]`` into values, ``[tokens, heads, value_dim]``."""
        return torch.einsum("thl,hlv->thv", mixed, self.values)

    def attend(self, backend: AttentionBackend, layer: int, query: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Compute the answers of :meth:`AttentionBackend.attend_unfolded` up to rounding, without unfolding.

        Args:
            backend: a back end built with ``latent_dim=num_value_dims``.
            layer: number of the layer.
            query: ``[tokens, heads, key_dim]``.
            step: the step.
        """
        return self.unfold(backend.attend_latents(layer, self.absorb(query), step))


class _Latents(NamedTuple):
    """Vectors in place of cached latents, ``[vectors, latent_dim]``: zero, others, units, others."""

    vectors: torch.Tensor
    num_first: int
    """Width of the first of the two vectors in which a latent is stored."""

    @classmethod
    def of(cls, first: torch.Tensor, second: torch.Tensor) -> "_Latents":
        dim = first.shape[-1] + second.shape[-1]
        others = torch.randn(NUM_OTHERS, dim, generator=torch.Generator().manual_seed(0))
        vectors = torch.cat([torch.zeros(1, dim), others, torch.eye(dim), others])
        return cls(vectors.to(first), first.shape[-1])

    @property
    def units(self) -> slice:
        return slice(1 + NUM_OTHERS, len(self.vectors) - NUM_OTHERS)


@final
class UnfoldingReader:
    """Reads the matrices in one forward pass of any tokens, in which every layer with latents unfolds unit vectors.

    It receives the calls of an engine's pass: updates of the cache, and calls of attention, whose answers are zero. The
    output of the pass is not used.

    Args:
        latents: widths of the two vectors of each layer with latents, by transformers' layer number.

    Attributes:
        unfoldings: the matrices, by layer.
        reasons: by layer, why no matrices could be read; no entry for a layer that was not called.
    """

    def __init__(self, latents: Mapping[int, tuple[int, int]]) -> None:
        self._layers = latents
        self._pending: tuple[int, _Latents] | None = None
        self.unfoldings: dict[int, Unfolding] = {}
        self.reasons: dict[int, str] = {}

    def update(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return unit vectors in place of an update's latents: ``[1, 1, vectors, width]`` each."""
        if layer_idx not in self._layers:
            return key, value
        latents = _Latents.of(key, value)
        self._pending = layer_idx, latents
        first, second = latents.vectors[:, : latents.num_first], latents.vectors[:, latents.num_first :]
        return first[None, None], second[None, None]

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Read the unfolded keys and values of a layer; return zeros, ``[1, tokens, heads, value_dim]``."""
        del module, mask, options
        if self._pending is not None:
            layer_idx, latents = self._pending
            self._pending = None
            read = _read(latents, key, value)
            if isinstance(read, Unfolding):
                self.unfoldings[layer_idx] = read
            else:
                self.reasons[layer_idx] = read
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    def make_mask(self, options: dict[str, Any]) -> None:
        """Return None: the pass needs no mask."""


def _read(latents: _Latents, key: torch.Tensor, value: torch.Tensor) -> "Unfolding | str":
    """Read matrices from unfolded vectors, ``[1, heads, vectors, dim]`` each; return a reason if that is impossible."""
    matrices = []
    for what, side in (("keys", key), ("values", value)):
        if side.shape[0] != 1 or side.shape[2] != len(latents.vectors):
            return f"{list(side.shape)} {what} were unfolded from {len(latents.vectors)} latents"
        if not _is_linear(latents, side[0]):
            return f"its {what} are not a linear function of latents"
        matrices.append(side[0, :, latents.units].clone())
    keys, values = matrices
    if keys.shape[0] != values.shape[0]:
        return f"{keys.shape[0]} heads of keys and {values.shape[0]} of values were unfolded"
    if not values[:, latents.num_first :].any():
        values = values[:, : latents.num_first].clone()
    return Unfolding(keys, values)


def _is_linear(latents: _Latents, unfolded: torch.Tensor) -> bool:
    """Return whether unfolded vectors, ``[heads, vectors, dim]``, equal the latents times the unit vectors' rows."""
    units = unfolded[:, latents.units].double()
    given = latents.vectors.double()
    expected = torch.einsum("nl,hld->hnd", given, units)
    bound = torch.einsum("nl,hld->hnd", given.abs(), units.abs()) * ROUNDING * torch.finfo(unfolded.dtype).eps
    return bool(((unfolded.double() - expected).abs() <= bound).all())
