"""RankedContent: the content of a model on several ranks, as that of the whole model.

It has the identity and the bytes of the same model in one process, so engines on any number of ranks share tiers and
files of prefixes. Rank 0 has the tiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from pagedkv.device import FP8_TYPES, KeyValueShape, KVStorage, StateShape
from pagedkv.engine import compat
from pagedkv.engine.grouping import EngineGroups
from pagedkv.engine.ranks.rank_group import RankGroup
from pagedkv.engine.ranks.ranked_blocks import RankedBlockBytes
from pagedkv.engine.ranks.whole_blocks import WholeBlocks
from pagedkv.engine.tiering import block_bytes_with_staging, identity_of, open_tier_memory, scales_of
from pagedkv.errors import ConfigurationError
from pagedkv.tiers import HostMemory, Identity, Tier
from pagedkv.tiers.entry_blocks import BlockBytes

__all__ = ["RankedContent", "WholeModel"]


@dataclass(frozen=True, slots=True)
class WholeModel:
    """What is known of a model before it is split.

    Args:
        groups: of all its heads; weights: digest of its weights.
    """

    groups: EngineGroups
    weights: bytes


@final
class RankedContent:
    """The content of an engine on several ranks, at rank 0.

    Args:
        whole: the whole model, with the stored types of the engine's blocks.
        model: this rank's part of it; groups: of this part.
        storage: this rank's blocks; ranks: the processes.

    Raises:
        ConfigurationError: blocks of the ranks cannot be put together: layers are in other groups than those of the
            whole model, states are split, or scales are by head.
    """

    def __init__(
        self, whole: WholeModel, model: compat.Model, groups: EngineGroups, storage: KVStorage, ranks: RankGroup
    ) -> None:
        _require_parts(whole.groups, groups)
        self._whole, self._model = whole, model
        self._storage, self._ranks = storage, ranks
        self._blocks = [
            WholeBlocks(shape, spec.block_size, ranks.size)
            for spec, shape in zip(whole.groups.specs, whole.groups.shapes, strict=True)
        ]

    @property
    def nbytes(self) -> Sequence[int]:
        """Bytes of a block of each group, of all heads."""
        return [each.nbytes for each in self._blocks]

    def identity(self, blocks_per_run: int) -> Identity:
        """Return the identity of the whole model's content. Its weights are those from before it was split."""
        groups = self._whole.groups
        scales = scales_of(self._storage)  # one for each layer, so they are equal on all ranks
        return identity_of(self._model, self._whole.weights, groups.specs, groups.shapes, blocks_per_run, scales)

    def open_memory(self, specs: Sequence[Tier], entry_nbytes: int) -> tuple[BlockBytes, list[HostMemory | None]]:
        """Open the copies of whole blocks, and the memory of tiers, which is that of rank 0."""
        own, memories = open_tier_memory(specs, self._storage, entry_nbytes)
        return RankedBlockBytes(self._ranks, self._blocks, own), memories

    def open_block_bytes(self, staging_nbytes: int) -> BlockBytes:
        """Open copies of whole blocks that need no tier."""
        own = block_bytes_with_staging(self._storage, staging_nbytes)
        return RankedBlockBytes(self._ranks, self._blocks, own)


def _require_parts(whole: EngineGroups, part: EngineGroups) -> None:
    """Raise ConfigurationError if blocks of a rank are no parts of those of the whole model, group by group."""
    if (whole.specs, whole.sources, whole.states) != (part.specs, part.sources, part.states):
        raise ConfigurationError(
            "an engine on several ranks has tiers only if the ranks' layers have the groups of the whole model: it has "
            f"{[spec.pool for spec in whole.specs]}, a rank {[spec.pool for spec in part.specs]}. Leave out `tiers`"
        )
    for spec, shape, own in zip(whole.specs, whole.shapes, part.shapes, strict=True):
        is_split_state = isinstance(shape, StateShape) and shape != own
        is_scaled_by_head = isinstance(shape, KeyValueShape) and shape.dtype in FP8_TYPES and shape.scaling == "head"
        if is_split_state or is_scaled_by_head:
            reason = "states that are split over ranks" if is_split_state else "scales by head (kv_scales)"
            raise ConfigurationError(
                f"an engine on several ranks has no tiers for {reason}, as group {spec.pool!r} has them: leave out "
                "`tiers`"
            )
