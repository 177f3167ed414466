"""StepMetadata: the parameters of attention over blocks that change from step to step.

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
from typing import NamedTuple

import numpy as np
import torch

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.device import StepInputs

__all__ = ["GroupMetadata", "KnownRanges", "StepMetadata"]


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
    """

    groups: Sequence[GroupMetadata]
    num_places: int
    num_tokens: int
    is_padded: bool = field(default=False, kw_only=True)
    has_chunks: bool = field(default=True, kw_only=True)

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
        return StepMetadata(groups, self.num_places, self.num_tokens)
