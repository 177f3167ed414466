"""AttentionBackend: the interface of every implementation of attention over blocks.

A back end is bound once to a storage and to a model's layers, and is then called with a layer's number and a step's
metadata. It keeps no state of a step, and changes no cache object, so calls can be captured in graphs and traced by
compilers.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from pagedkv.attention.backend import AttentionLayer, StepMetadata
from pagedkv.device import KVStorage
from pagedkv.errors import ConfigurationError

__all__ = ["AttentionBackend", "BackendClass", "require_layers"]


class AttentionBackend(Protocol):
    """Attention over blocks, for the layers of one model."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
        """Write a step's keys and values into their slots.

        Args:
            layer: number of the layer, in the order given when the back end was built.
            key: ``[tokens, key heads, key_dim]``, of any strides.
            value: ``[tokens, key heads, value_dim]``, of any strides.
            step: the step.
        """

    def attend(
        self, layer: int, query: torch.Tensor, step: StepMetadata, *, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute attention of a step's queries to the keys in the blocks, including this step's own keys.

        Args:
            layer: number of the layer.
            query: ``[tokens, heads, key_dim]``, of any strides.
            step: the step.
            sinks: ``[heads]``, if the layer has sinks.

        Returns:
            ``[tokens, heads, value_dim]``, contiguous, of the queries' type.
        """

    def write_latents(self, layer: int, latent: torch.Tensor, step: StepMetadata) -> None:
        """Write a step's latents, ``[tokens, dim]``, into their slots."""

    def attend_latents(self, layer: int, query: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Compute attention of absorbed queries to latents (:mod:`pagedkv.attention.unfolding`).

        Args:
            layer: number of the layer; the back end must have been built with ``latent_dim``.
            query: ``[tokens, heads, dim]``.
            step: the step.

        Returns:
            ``[tokens, heads, latent_dim]``: for each head a weighted sum of latents.
        """

    def attend_unfolded(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepMetadata
    ) -> torch.Tensor:
        """Compute attention to keys and values that the model has unfolded from latents.

        Args:
            layer: number of the layer.
            query: ``[tokens, heads, key_dim]``.
            key: ``[keys, heads, key_dim]``: for each sequence with queries, the keys of its positions from
                :meth:`AttentionLayer.first_seen` of its first query on; sequences are concatenated.
            value: ``[keys, heads, value_dim]``, likewise.
            step: the step.

        Returns:
            ``[tokens, heads, value_dim]``.
        """


class BackendClass(Protocol):
    """The class of a back end, by which it is chosen and built."""

    def __call__(self, storage: KVStorage, layers: Sequence[AttentionLayer]) -> AttentionBackend:
        """Bind a back end. Raises ConfigurationError if it cannot serve a layer."""

    def refusal(self, layer: AttentionLayer) -> str | None:
        """Return the reason why a layer cannot be served; None if it can."""


def require_layers(backend: BackendClass, layers: Sequence[AttentionLayer]) -> None:
    """Refuse layers that a back end cannot serve.

    Raises:
        ConfigurationError: a layer cannot be served; the message has the layer and the reason.
    """
    for number, layer in enumerate(layers):
        reason = backend.refusal(layer)
        if reason is not None:
            raise ConfigurationError(f"attention layer {number} ({layer}) cannot be served: {reason}")
