"""AttentionBackend: the interface of every implementation of attention, with the parameters of a layer and of a step.

A back end is bound once to a storage and to a model's layers, and is then called with a layer's number and a step's
metadata. It keeps no state of a step, and changes no cache object, so calls can be captured in graphs and traced by
compilers.

AttentionLayer has what is the same in every step, StepMetadata what changes from step to step.

Keys are identified by a group and a place in it, in the numbering of :class:`~pagedkv.device.KVStorage`. Several
layers may read the same keys.

Tokens of all sequences are in one flat row. Tokens of a sequence are consecutive, and sequences are in the order of the
places of :class:`~pagedkv.device.StepInputs`::

    query_start_loc     0            3   4   5              10
    flat row            | t  t  t    | t | t | t t t t t    |
    place                 0            1   2   3                positions of place i: [starts[i], seq_lens[i])

Lengths are on the device, where GPU back ends read them without a copy to the host. If exact lengths are known on the
host, they may be passed too, for back ends of other packages that need them there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pagedkv.contract.arguments import as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.device import KVStorage, StepInputs
from pagedkv.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer.

    A query at position q sees the keys at positions p <= q; with ``window`` only those with ``p > q - window``, and
    with ``chunk`` only those of its own chunk, ``p // chunk == q // chunk``.

    Args:
        group: the group whose block table locates its keys.
        index: the layer of that group whose keys it reads.
        num_heads: heads of its queries, a multiple of the key heads.
        scale: factor of the product of query and key.
        window, chunk: tokens; 0: none.
        num_sink_tokens: with a window, the first positions, which every query sees (StreamingLLM, 2023).
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2); 0: no cap.
        has_sinks: whether each head has a learnt score without a value in its softmax (gpt-oss).
        is_latent: whether the group stores latents, from which the model unfolds keys and values (DeepSeek-V2, 2024).

    Raises:
        ConfigurationError: a value is out of range, there are both window and chunk, or sink tokens without a window.
    """

    group: int
    index: int
    num_heads: int
    scale: float
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    is_latent: bool = False
    num_sink_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("group", "index", "window", "chunk", "num_sink_tokens"):
            as_count(getattr(self, name), name)
        as_count(self.num_heads, "num_heads", least=1)
        if self.window and self.chunk:
            raise ConfigurationError(f"a layer has a window ({self.window}) or a chunk ({self.chunk}), not both")
        if self.num_sink_tokens and not self.window:
            raise ConfigurationError(f"num_sink_tokens ({self.num_sink_tokens}) needs a window, and window is 0")
        if self.soft_cap < 0:
            raise ConfigurationError(f"soft_cap must not be negative, got {self.soft_cap}")

    def first_seen(self, position: int) -> int:
        """Return the first position, without sink tokens, that a query at ``position`` sees."""
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk else 0


class KnownRanges(NamedTuple):
    """A group's ranges on the host: int32 ``[places]`` each, equal to those on the device."""

    starts: Int32Array
    ends: Int32Array

    @classmethod
    def of(cls, plan: StepPlan, group: int) -> "KnownRanges | None":
        """Return a group's ranges in a plan; None if tokens are unknown, since its ranges are then upper bounds."""
        if plan.unknown is not None:
            return None
        ranges = plan.compute_in(group)
        return cls(ranges.starts, ranges.ends)


@dataclass(frozen=True, slots=True, eq=False)
class GroupMetadata:
    """One group's part of a step.

    Args:
        block_tables: int32 ``[places, width]``.
        starts: int32 ``[places]``, beginning of each place's positions.
        seq_lens: int32 ``[places]``, their ends.
        query_start_loc: int32 ``[places + 1]``, tokens before each place in the flat row.
        slot_mapping: int64 ``[tokens]``, slot of each token's keys; empty for recurrent states.
        known: starts and ends on the host; None if they are unknown there, or a graph is captured.
    """

    block_tables: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    known: KnownRanges | None = field(default=None, kw_only=True)

    def select(self, places: torch.Tensor, tokens: torch.Tensor) -> "GroupMetadata":
        """Return only some places and their tokens: int64 each, ascending."""
        starts, seq_lens = self.starts[places], self.seq_lens[places]
        query_start_loc = torch.zeros(len(places) + 1, dtype=torch.int32, device=starts.device)
        torch.cumsum(seq_lens - starts, 0, dtype=torch.int32, out=query_start_loc[1:])
        return GroupMetadata(self.block_tables[places], starts, seq_lens, query_start_loc, self.slot_mapping[tokens])


@dataclass(frozen=True, slots=True, eq=False)
class StepMetadata:
    """One step, or a part of one.

    Args:
        groups: metadata of each group, in their order.
        num_places: number of sequences.
        num_tokens: tokens of all sequences.
        is_padded: whether padding tokens, which belong to no sequence, may follow; their answers are zero.
        has_chunks: whether a sequence may compute more than one token and its drafts; else fewer kernels are launched.
        num_keys: positions of the longest sequence, or more, as the host knows it; 0: it does not.
    """

    groups: Sequence[GroupMetadata]
    num_places: int
    num_tokens: int
    is_padded: bool = field(default=False, kw_only=True)
    has_chunks: bool = field(default=True, kw_only=True)
    num_keys: int = field(default=0, kw_only=True)

    @classmethod
    def of(cls, inputs: StepInputs, plan: StepPlan | None = None, *, is_padded: bool = False) -> "StepMetadata":
        """Make the metadata of a step from its inputs on the device.

        Args:
            inputs: inputs of the step.
            plan: plan of the step, which has its lengths on the host.
            is_padded: whether the inputs may have more tokens than the step.
        """
        starts, seq_lens, offsets = inputs.starts, inputs.seq_lens, inputs.query_start_loc
        slots = inputs.slot_mappings
        groups = tuple(
            GroupMetadata(
                table,
                starts[group],
                seq_lens[group],
                offsets[group],
                slots[group, : inputs.num_tokens],
                known=None if plan is None else KnownRanges.of(plan, group),
            )
            for group, table in enumerate(inputs.block_tables)
        )
        return cls(groups, inputs.num_rows, inputs.num_tokens, is_padded=is_padded)

    def new_answers(self, query: torch.Tensor, value_dim: int) -> torch.Tensor:
        """Allocate answers: ``[tokens, heads, value_dim]``, undefined except for the zeros of padding."""
        shape = (*query.shape[:2], value_dim)
        return query.new_zeros(shape) if self.is_padded else query.new_empty(shape)

    def select(self, places: torch.Tensor, tokens: torch.Tensor) -> "StepMetadata":
        """Return only some places and their tokens: int64 each, ascending."""
        groups = tuple(group.select(places, tokens) for group in self.groups)
        return StepMetadata(groups, len(places), len(tokens))

    def with_ranges(self, starts: Sequence[int], ends: Sequence[int]) -> "StepMetadata":
        """Replace the computed positions of sequences by parts of them, with as many positions as tokens."""
        device = self.groups[0].starts.device
        first = torch.tensor(starts, dtype=torch.int32, device=device)
        last = torch.tensor(ends, dtype=torch.int32, device=device)
        offsets = torch.zeros(len(first) + 1, dtype=torch.int32, device=device)
        torch.cumsum(last - first, 0, dtype=torch.int32, out=offsets[1:])
        known = KnownRanges(np.array(starts, np.int32), np.array(ends, np.int32))
        groups = tuple(
            replace(group, starts=first, seq_lens=last, query_start_loc=offsets, known=known) for group in self.groups
        )
        return StepMetadata(groups, self.num_places, self.num_tokens, num_keys=max(ends))


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
