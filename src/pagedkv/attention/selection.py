"""Chooses the back end of a storage: Triton's kernels on a GPU, or preferred ones; compiled loops on a CPU.

PreferringBackend computes each layer by the first preferred kernels that support it, else by Triton's.

All kernels read the same blocks, so layers of one model, and steps of one layer, may use different kernels. Kernels of
other packages need lengths on the host. Triton's kernels compute steps whose lengths are unknown there, and steps
captured in a graph, which is replayed for other lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, final

import torch

from pagedkv.attention import flash_infer, varlen
from pagedkv.attention.backend import AttentionBackend, AttentionLayer, GroupMetadata, KnownRanges, StepMetadata
from pagedkv.attention.cpu import CPUBackend
from pagedkv.attention.facts import facts_of
from pagedkv.attention.on_gpu import TritonBackend
from pagedkv.device import KVStorage
from pagedkv.errors import ConfigurationError

Preference: TypeAlias = Literal["flashinfer", "varlen"]
PREFERENCES: Final[tuple[Preference, ...]] = ("flashinfer", "varlen")
OWN: Final = "own"


class _Attention(Protocol):
    """Kernels that take lengths from the host."""

    def attend(self, number: int, query: torch.Tensor, group: GroupMetadata, known: KnownRanges) -> torch.Tensor:
        """Compute attention of a step's queries."""


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The kernels of a layer.

    Args:
        name: one of :data:`PREFERENCES`, or "own".
        reasons: why more preferred kernels do not serve the layer.
    """

    name: str
    reasons: tuple[str, ...]


@final
class PreferringBackend:
    """Attention by preferred kernels; see :class:`~pagedkv.attention.backend.AttentionBackend`.

    Args:
        own: our back end, for all calls that other kernels do not compute.
        storage: storage of the keys.
        layers: the layers, by number.
        query_dtype: type of queries.
        prefer: kernels to try first, in this order.
        batch_invariant: whether an answer must not depend on other rows of the step.

    Attributes:
        choices: the kernels of each layer, by number.

    Raises:
        ConfigurationError: a preference is unknown.
    """

    def __init__(
        self,
        own: AttentionBackend,
        storage: KVStorage,
        layers: Sequence[AttentionLayer],
        *,
        prefer: Sequence[Preference],
        query_dtype: torch.dtype,
        batch_invariant: bool,
    ) -> None:
        require_preferences(prefer)
        self._own = own
        self._groups = tuple(layer.group for layer in layers)
        version, function = flash_infer.installed_version(), varlen.installed_function()
        chosen: list[LayerChoice] = []
        for layer in layers:
            facts = facts_of(storage, layer, query_dtype, batch_invariant=batch_invariant)
            refusals = {"flashinfer": flash_infer.refusal(facts, version), "varlen": varlen.refusal(facts, function)}
            chosen.append(choose(prefer, refusals))
        served = {
            name: {number: layers[number] for number, each in enumerate(chosen) if each.name == name}
            for name in PREFERENCES
        }
        self._others: dict[int, _Attention] = {}
        if served["flashinfer"]:
            flash_infer_attention = flash_infer.FlashInferAttention(storage, served["flashinfer"], query_dtype)
            self._others |= dict.fromkeys(served["flashinfer"], flash_infer_attention)
        if served["varlen"] and function is not None:
            varlen_attention = varlen.VarlenAttention(storage, served["varlen"], function)
            self._others |= dict.fromkeys(served["varlen"], varlen_attention)
        self.choices = tuple(chosen)

    @staticmethod
    def refusal(layer: AttentionLayer) -> str | None:
        """Refuse no layer: our back end serves the layers that preferred kernels do not support."""
        del layer
        return None

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: StepMetadata) -> None:
        """Write a step's keys and values, by our own kernels."""
        self._own.write(layer, key, value, step)

    def attend(
        self, layer: int, query: torch.Tensor, step: StepMetadata, *, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute attention by the layer's chosen kernels if the step's lengths are known on the host."""
        group, others = step.groups[self._groups[layer]], self._others.get(layer)
        if others is None or group.known is None or sinks is not None or _is_captured(query.device):
            return self._own.attend(layer, query, step, sinks=sinks)
        return others.attend(layer, query, group, group.known)

    def write_latents(self, layer: int, latent: torch.Tensor, step: StepMetadata) -> None:
        """Write a step's latents, by our own kernels."""
        self._own.write_latents(layer, latent, step)

    def attend_latents(self, layer: int, query: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Compute attention to latents, by our own kernels."""
        return self._own.attend_latents(layer, query, step)

    def attend_unfolded(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: StepMetadata
    ) -> torch.Tensor:
        """Compute attention to unfolded latents, by our own kernels."""
        return self._own.attend_unfolded(layer, query, key, value, step)


def choose(prefer: Sequence[str], refusals: dict[str, str | None]) -> LayerChoice:
    """Choose the first kernels without a refusal; keep the reasons of those before."""
    reasons: list[str] = []
    for name in prefer:
        reason = refusals[name]
        if reason is None:
            return LayerChoice(name, tuple(reasons))
        reasons.append(f"{name}: {reason}")
    return LayerChoice(OWN, tuple(reasons))


def require_preferences(prefer: Sequence[str]) -> None:
    """Refuse unknown names. Raises ConfigurationError."""
    if isinstance(prefer, str) or not isinstance(prefer, Sequence) or any(each not in PREFERENCES for each in prefer):
        raise ConfigurationError(f"prefer must be some of {list(PREFERENCES)}, got {prefer!r}")


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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
