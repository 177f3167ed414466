"""StoredContent: what an engine's blocks are outside the process: their bytes, their identity, and how they are copied.

Tiers and files of prefixes have the content of the whole model. An engine in one process has it in its own storage
(:class:`OwnContent`). An engine on several ranks has parts of it in each
(:class:`~pagedkv.engine.ranks.RankedContent`).
"""

from collections.abc import Sequence
from typing import Protocol, assert_never, final

from pagedkv.contract.spec import GroupSpec
from pagedkv.device import FP8_TYPES, KeyValueShape, KVStorage, LatentShape, StateShape
from pagedkv.engine.tiering.block_bytes import block_bytes_with_staging, block_nbytes, open_tier_memory
from pagedkv.engine.tiering.identity import Scales, identity_of, model_digest
from pagedkv.probe import compat
from pagedkv.tiers import HostMemory, Identity, Tier
from pagedkv.tiers.entry_blocks import BlockBytes

__all__ = ["OwnContent", "StoredContent", "scales_of"]


class StoredContent(Protocol):
    """The content of an engine's blocks, as other processes see it."""

    @property
    def nbytes(self) -> Sequence[int]:
        """Bytes of a block of each group, of all heads."""

    def identity(self, blocks_per_run: int) -> Identity:
        """Return the identity of the present content, in runs of so many blocks.

        Raises MissingExtraError: xxhash is not installed.
        """

    def open_memory(self, specs: Sequence[Tier], entry_nbytes: int) -> tuple[BlockBytes, list[HostMemory | None]]:
        """Open the copies of blocks, and for each tier the memory that it is to use; None: plain memory.

        Raises ConfigurationError: there is not so much memory, or it cannot be pinned.
        """

    def open_block_bytes(self, staging_nbytes: int) -> BlockBytes:
        """Open copies of blocks that need no tier, with staging memory of so many bytes on a GPU."""


@final
class OwnContent:
    """The content of an engine in one process.

    Args:
        model: the model; draft: the model whose layers the last groups are of, or None. Their weights are read each
            time that the identity is returned.
        specs: the groups; storage: their blocks.
    """

    def __init__(
        self, model: compat.Model, specs: Sequence[GroupSpec], storage: KVStorage, draft: compat.Model | None = None
    ) -> None:
        self._model, self._draft = model, draft
        self._specs = specs
        self._storage = storage

    @property
    def nbytes(self) -> Sequence[int]:
        """Bytes of a block of each group."""
        return block_nbytes(self._storage)

    def identity(self, blocks_per_run: int) -> Identity:
        """Return the identity of the present content. Cost: the weights are read once."""
        storage, model = self._storage, self._model
        return identity_of(
            model, model_digest(model), self._specs, storage.shapes, blocks_per_run, scales_of(storage), self._draft
        )

    def open_memory(self, specs: Sequence[Tier], entry_nbytes: int) -> tuple[BlockBytes, list[HostMemory | None]]:
        """Open the copies of blocks, and the memory of tiers."""
        return open_tier_memory(specs, self._storage, entry_nbytes)

    def open_block_bytes(self, staging_nbytes: int) -> BlockBytes:
        """Open copies of blocks that need no tier."""
        return block_bytes_with_staging(self._storage, staging_nbytes)


def scales_of(storage: KVStorage) -> Scales:
    """List the scales of each group of eight bits: by layer, keys before values, by head. Other types have none."""
    scales: list[tuple[float, ...]] = []
    for group, shape in enumerate(storage.shapes):
        match shape:
            case StateShape():
                scales.append(())
            case KeyValueShape() | LatentShape():
                has_scales = shape.dtype in FP8_TYPES
                scales.append(tuple(storage.scales(group).flatten().tolist()) if has_scales else ())
            case _:
                assert_never(shape)
    return tuple(scales)
