"""Chooses the back end of a storage: Triton's kernels on a GPU, or preferred ones; compiled loops on a CPU."""

from collections.abc import Sequence

import torch

from pagedkv.attention.backend import AttentionBackend, AttentionLayer
from pagedkv.attention.cpu import CPUBackend
from pagedkv.attention.on_gpu import TritonBackend
from pagedkv.attention.selection import Preference, PreferringBackend, require_preferences
from pagedkv.device import KVStorage

__all__ = ["backend_for"]


def backend_for(
    storage: KVStorage,
    layers: Sequence[AttentionLayer],
    *,
    max_places: int,
    max_tokens: int,
    max_length: int,
    query_dtype: torch.dtype,
    num_draft: int = 0,
    latent_dim: int = 0,
    batch_invariant: bool = True,
    prefer: Sequence[Preference] = (),
) -> AttentionBackend:
    """Build the back end for these layers on the device of their keys.

    Args:
        storage: storage of the keys.
        layers: the layers, by number.
        max_places, max_tokens, max_length: most rows of a step, tokens of a step, and tokens of a row.
        query_dtype: type of queries.
        num_draft: most drafts of a row.
        latent_dim: leading dimensions of latents that are values; 0: the model unfolds them.
        batch_invariant: whether an answer must not depend on other rows of the step.
        prefer: kernels of other packages, tried on a GPU in this order: "flashinfer", which needs
            ``batch_invariant=False``, and "varlen", torch's own. Layers that they do not support use Triton's kernels.

    Raises:
        ConfigurationError: the device's back end cannot serve a layer (the message has the reason), or a preference is
            unknown.
        DeviceUnavailableError: the device is a GPU, and Triton is not installed.
    """
    require_preferences(prefer)
    if storage.device.type == "cpu":
        return CPUBackend(storage, layers, latent_dim=latent_dim)
    own = TritonBackend(
        storage,
        layers,
        max_places=max_places,
        max_tokens=max_tokens,
        max_length=max_length,
        query_dtype=query_dtype,
        num_draft=num_draft,
        latent_dim=latent_dim,
        batch_invariant=batch_invariant,
    )
    if not prefer:
        return own
    return PreferringBackend(
        own, storage, layers, prefer=prefer, query_dtype=query_dtype, batch_invariant=batch_invariant
    )
