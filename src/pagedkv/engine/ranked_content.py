"""A model on several ranks as tiers see it: whole blocks, of the heads of all ranks; and the loop of the other ranks.

It has the identity and the bytes of the same model in one process, so engines on any number of ranks share tiers and
files of prefixes. Rank 0 has the tiers. A block of a group with keys and values has, for each layer, the keys of all
its tokens and then their values, and each token's heads one after another. So the heads of a rank are a slice of one
axis::

    whole block    layer 0 keys [tokens, heads, bytes of a key] | values [tokens, heads, bytes of a value] | layer 1 ...
    of a rank                           `-- its heads

:mod:`~pagedkv.contract.head_slices` has the slices. Latents, states and companions have no heads: they are whole on
each rank. Blocks are gathered at rank 0, and sent out from there::

    read    rank 0: "send blocks 4, 7" --> the other ranks copy them to the host, and send them
            rank 0 puts the heads of all ranks together                                          --> a tier
    write   a tier --> rank 0 cuts whole blocks by heads, and sends each rank its own            --> blocks of each rank

The other ranks do this between two steps, in the order in which rank 0 sends it, so blocks have the content of the same
step on all ranks. The messages are those of :class:`~pagedkv.engine.ranks.RankGroup`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, assert_never, final

import numpy as np
import torch

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.head_slices import head_slices, heads_of_rank
from pagedkv.device import (
    FP8_TYPES,
    CopyTicket,
    GroupShape,
    KeyValueShape,
    KVStorage,
    LatentShape,
    PlanExecutor,
    StateShape,
    StepInputs,
)
from pagedkv.engine.content import block_bytes_with_staging, open_tier_memory, scales_of
from pagedkv.engine.identity import identity_of
from pagedkv.engine.ranks import RankGroup, SentCopy, SentStep, SentWeights
from pagedkv.engine.runner import ModelRunner
from pagedkv.errors import ConfigurationError, RankLostError
from pagedkv.probe import compat
from pagedkv.probe.layers import EngineGroups
from pagedkv.tiers import HostMemory, Identity, Tier
from pagedkv.tiers.entry_blocks import BlockBytes, CopyEnd, HostBlocks, Rows


@dataclass(frozen=True, slots=True)
class _Axes:
    """The axes of a block with heads: layers, tokens, and bytes of a head's key and value."""

    num_layers: int
    block_size: int
    head_nbytes: tuple[int, int]

    def parts(self, rows: Rows, num_heads: int) -> list[Rows]:
        """Return the keys and the values of blocks: views of ``[blocks, layers, tokens, heads, bytes]``."""
        own = self.num_layers * self.block_size * num_heads * sum(self.head_nbytes)
        by_layer = rows[:, :own].reshape(len(rows), self.num_layers, -1)
        parts, begin = [], 0
        for nbytes in self.head_nbytes:
            end = begin + self.block_size * num_heads * nbytes
            shape = (len(rows), self.num_layers, self.block_size, num_heads, nbytes)
            parts.append(by_layer[:, :, begin:end].reshape(shape))  # an axis is split: a view
            begin = end
        return parts


@final
class WholeBlocks:
    """The blocks of one group on a number of ranks.

    Args:
        shape: of a block with all heads; block_size: its tokens.
        num_ranks: number of ranks.

    Attributes:
        nbytes: bytes of a whole block; rank_nbytes: of a rank's.
        sources: the ranks that have every head between them, each head once.

    Raises:
        ConfigurationError: the heads cannot be shared out to so many ranks.
    """

    def __init__(self, shape: GroupShape, block_size: int, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.nbytes = shape.block_nbytes(block_size)
        self._num_heads: int | None = None
        match shape:
            case KeyValueShape():
                key_dim, value_dim = shape.dims
                size = shape.dtype.itemsize
                self._axes = _Axes(shape.num_layers, block_size, (key_dim * size, value_dim * size))
                self._num_heads = shape.num_heads
                self._width = heads_of_rank(shape.num_heads, num_ranks, 0).count
                self._beside = self.nbytes - shape.companion_offsets(block_size)[0]
                self.rank_nbytes = (self.nbytes - self._beside) // shape.num_heads * self._width + self._beside
            case LatentShape() | StateShape():
                self.rank_nbytes = self.nbytes
            case _:
                assert_never(shape)
        self._gathered = head_slices(self._num_heads, num_ranks, 1, 0)
        self.sources: Sequence[int] = tuple(dict.fromkeys(each.source_rank for each in self._gathered))

    def put(self, whole: Rows, rank: int, rows: Rows) -> None:
        """Copy the heads of a rank in :attr:`sources` into whole blocks.

        Args:
            whole: uint8 ``[n, nbytes]``; rank: whose; rows: uint8 ``[n, rank_nbytes]``.
        """
        if self._num_heads is None:
            whole[...] = rows
            return
        for target, source in zip(
            self._axes.parts(whole, self._num_heads), self._axes.parts(rows, self._width), strict=True
        ):
            for each in self._gathered:
                if each.source_rank == rank:
                    heads = source[:, :, :, each.source_head : each.source_head + each.count]
                    target[:, :, :, each.target_head : each.target_head + each.count] = heads
        whole[:, self.nbytes - self._beside :] = rows[:, self.rank_nbytes - self._beside :]

    def cut(self, whole: Rows, rank: int) -> Rows:
        """Return the blocks of a rank, uint8 ``[n, rank_nbytes]``: a copy of its heads, or the blocks as given."""
        if self._num_heads is None:
            return whole
        rows = np.empty((len(whole), self.rank_nbytes), np.uint8)
        for source, target in zip(
            self._axes.parts(whole, self._num_heads), self._axes.parts(rows, self._width), strict=True
        ):
            for each in head_slices(self._num_heads, 1, self._num_ranks, rank):
                heads = source[:, :, :, each.source_head : each.source_head + each.count]
                target[:, :, :, each.target_head : each.target_head + each.count] = heads
        rows[:, self.rank_nbytes - self._beside :] = whole[:, self.nbytes - self._beside :]
        return rows


STAGED_NBYTES: Final = 2**28
"""Staging memory of a rank other than the first, on a GPU."""


@final
class RankedBlockBytes:
    """Copies of whole blocks, for rank 0. See :class:`~pagedkv.tiers.entry_blocks.BlockBytes`.

    A read returns when all ranks have sent their heads. After the loops of the other ranks have ended, nothing is read.

    Args:
        ranks: the group; groups: the whole blocks of each group; own: copies of this rank's blocks.
    """

    def __init__(self, ranks: RankGroup, groups: Sequence[WholeBlocks], own: BlockBytes) -> None:
        self._ranks = ranks
        self._lifetime = ranks.lifetime
        self._groups = groups
        self._own = own
        self.read_nbytes_a_step = own.read_nbytes_a_step
        self.read_nbytes_a_second = own.read_nbytes_a_second
        self.read_nbytes_at_once = own.read_nbytes_at_once
        self.filled_nbytes_a_step = own.filled_nbytes_a_step
        self.filled_nbytes_at_once = own.filled_nbytes_at_once
        self.nbytes: Sequence[int] = [each.nbytes for each in groups]

    @property
    def room_nbytes(self) -> int | None:
        """Bytes that can be read now: no fewer of this rank's own blocks."""
        return self._own.room_nbytes

    def read(self, group: int, block_ids: Int32Array) -> HostBlocks | None:
        """Copy whole blocks to the host; None: no room there now, or the other ranks have ended."""
        if self._ranks.lifetime != self._lifetime:
            return None
        whole = self._groups[group]
        rows = np.empty((len(block_ids), whole.nbytes), np.uint8)
        if len(block_ids):
            own = self._own.read(group, block_ids) if 0 in whole.sources else None
            if own is None and 0 in whole.sources:
                return None
            others = [rank for rank in whole.sources if rank]
            if others:
                self._ranks.send_copy(SentCopy(group, block_ids, tuple(others), is_write=False))
            for rank in others:
                received = self._ranks.receive_rows(rank, (len(block_ids), whole.rank_nbytes))
                whole.put(rows, rank, received)
            if own is not None:
                own.ticket.wait()
                whole.put(rows, 0, own.rows)
        return HostBlocks(rows, CopyTicket("blocks of all ranks", None))

    def write(self, group: int, block_ids: Int32Array, rows: Sequence[Rows]) -> CopyEnd:
        """Send each rank its heads of whole blocks, and begin to copy this rank's own. Raises RankLostError."""
        if self._ranks.lifetime != self._lifetime:
            raise RankLostError("blocks cannot be written: the loops of the other ranks have ended")
        whole, content = self._groups[group], np.concatenate(rows)
        if self._ranks.size > 1:
            others = tuple(range(1, self._ranks.size))
            self._ranks.send_copy(SentCopy(group, block_ids, others, is_write=True))
            for rank in others:
                self._ranks.send_rows(rank, whole.cut(content, rank))
        return self._own.write(group, block_ids, [whole.cut(content, 0)])

    def order_steps_behind(self, ticket: CopyEnd) -> None:
        """Order this rank's steps behind a copy. Other ranks have done so when they began theirs."""
        self._own.order_steps_behind(ticket)

    def close(self) -> None:
        """Wait for this rank's copies."""
        self._own.close()


@final
class OtherRankBlocks:
    """Copies of the blocks of a rank other than the first, as rank 0 asks for them.

    Args:
        ranks: the group; storage: of this rank.
    """

    def __init__(self, ranks: RankGroup, storage: KVStorage) -> None:
        self._ranks = ranks
        self._storage = storage
        self._opened: BlockBytes | None = None

    def copy(self, sent: SentCopy) -> None:
        """Send blocks to rank 0, or receive blocks from it. Raises RankLostError."""
        if self._ranks.rank not in sent.ranks:
            return
        if self._opened is None:
            largest = max(self._storage.pool_of(group).block_nbytes for group in range(len(self._storage.shapes)))
            self._opened = block_bytes_with_staging(self._storage, max(STAGED_NBYTES, 2 * largest))
        if sent.is_write:
            shape = (len(sent.block_ids), self._opened.nbytes[sent.group])
            rows = self._ranks.receive_rows(0, shape)
            self._opened.order_steps_behind(self._opened.write(sent.group, sent.block_ids, [rows]))
        else:
            self._ranks.send_rows(0, _read(self._opened, sent.group, sent.block_ids))


def _read(block_bytes: BlockBytes, group: int, block_ids: Int32Array) -> Rows:
    """Copy blocks to the host, and wait for it; as many at a time as staging memory has room for."""
    nbytes = block_bytes.nbytes[group]
    rows = np.empty((len(block_ids), nbytes), np.uint8)
    at_once = max(1, STAGED_NBYTES // 2 // nbytes)
    for begin in range(0, len(block_ids), at_once):
        copied = block_bytes.read(group, block_ids[begin : begin + at_once])
        assert copied is not None, "the staging memory has room for them"
        copied.ticket.wait()
        rows[begin : begin + at_once] = copied.rows
    return rows


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


def _compute(runner: ModelRunner, sent: SentStep, inputs: StepInputs) -> torch.Tensor:
    return runner.compute(sent.plan, inputs, sent.batch, is_scored=sent.is_scored)


def follow(
    ranks: RankGroup, executor: PlanExecutor, runner: ModelRunner, set_weights: Callable[[str | int], object]
) -> int:
    """Carry out steps, copies of blocks and new weights, until rank 0 sends the end; return the number of steps.

    Args:
        ranks: the group; executor: storage and tables of this rank; runner: its part of the model.
        set_weights: sets the weights of an epoch.

    Raises:
        RankLostError: another rank is lost. If a step fails on this rank, the other ranks raise it.
    """
    num_steps = 0
    blocks = OtherRankBlocks(ranks, executor.storage)
    while (sent := ranks.receive()) is not None:
        if isinstance(sent, SentCopy):
            blocks.copy(sent)
            continue
        if isinstance(sent, SentWeights):
            set_weights(sent.weights_epoch)
            continue
        if len(sent.batch.token_ids):
            executor.launch(sent.plan, partial(_compute, runner, sent))
        else:
            executor.launch(sent.plan, lambda _: torch.zeros(0))
        executor.done()
        num_steps += 1
    return num_steps
