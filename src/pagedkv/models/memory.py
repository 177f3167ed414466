"""Memory of a model, group by group: the result of this package, from which the groups of a block space are made.

A group's name is also the name of its block pool, so groups of one model never share a pool with blocks of different
sizes in bytes.
"""

from dataclasses import dataclass
from typing import assert_never

from pagedkv.contract.budget import GIB
from pagedkv.contract.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from pagedkv.models.layer_rules import GroupKind, is_state

__all__ = ["GIB", "LayerGroup", "ModelMemory"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of a model that share one retention rule, and so one block table.

    Args:
        name: unique within the model, and the name of the pool: "full", "window_1024", "chunk_8192" or "state".
        kind: the rule, as in :mod:`pagedkv.contract.spec`.
        extent: tokens of the window or the chunk; 0 for the other kinds.
        num_layers: layers with a cache of their own; layers that share an earlier layer's keys are not counted.
        token_nbytes: bytes of keys and values of a token, over all of these layers; 0 for a state.
        state_nbytes: bytes of a sequence's state, over all of these layers; 0 for keys and values.
        pair_flops: floating-point operations for one query attending to one key, over all of these layers.
    """

    name: str
    kind: GroupKind
    extent: int
    num_layers: int
    token_nbytes: int
    state_nbytes: int
    pair_flops: int

    def block_nbytes(self, block_size: int) -> int:
        """Return the bytes of a block of ``block_size`` tokens, or of one state, whatever the block size."""
        return self.state_nbytes if is_state(self.kind) else block_size * self.token_nbytes

    def spec(self, block_size: int) -> GroupSpec:
        """Return the group's rule for a block space, in a pool of the group's own name.

        Args:
            block_size: tokens of a block; for a state, tokens between checkpoints.

        Raises:
            ConfigurationError: the block size is not positive.
        """
        match self.kind:
            case "full":
                return FullAttention(block_size, pool=self.name)
            case "window":
                return SlidingWindow(self.extent, block_size, pool=self.name)
            case "chunk":
                return ChunkedLocal(self.extent, block_size, pool=self.name)
            case "recurrent":
                return RecurrentState(block_size, pool=self.name)
            case _:
                assert_never(self.kind)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of a model; for a multimodal model, that of its language model.

    Args:
        name: the preset or the file.
        num_parameters: weights: a preset's published number, or counted from the config where that is exact
            (:mod:`pagedkv.models.parameters`); None if neither is known.
        num_active_parameters: weights that one token is multiplied with; None if unknown.
        expert_share: share of a layer's routed experts that a token uses; 1 without experts.
        weights_nbytes: bytes of the weights, quantised as published; None where unknown.
        dtype_nbytes: bytes of an element of the model's own type.
        max_context: longest sequence in tokens; None where the config does not state it.
        num_layers: layers of all kinds, including those without a cache.
        groups: groups of the layers with a cache; full attention first, then windows, chunks and the state.
    """

    name: str
    num_parameters: int | None
    num_active_parameters: int | None
    expert_share: float
    weights_nbytes: int | None
    dtype_nbytes: int
    max_context: int | None
    num_layers: int
    groups: tuple[LayerGroup, ...]

    @property
    def token_nbytes(self) -> int:
        """Bytes of keys and values of one token in all groups, while every group still keeps it."""
        return sum(group.token_nbytes for group in self.groups)

    @property
    def state_nbytes(self) -> int:
        """Bytes of one sequence's recurrent state."""
        return sum(group.state_nbytes for group in self.groups)

    def specs(self, block_size: int) -> tuple[GroupSpec, ...]:
        """Return the rules of all groups at one block size. Raises ConfigurationError as :meth:`LayerGroup.spec`."""
        return tuple(group.spec(block_size) for group in self.groups)
