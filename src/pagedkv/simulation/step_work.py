"""The work of a step that takes time, counted from its plan."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pagedkv.contract.plan import BlockMoves, StepPlan

__all__ = ["StepWork", "work_of"]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step.

    Args:
        num_new_tokens: positions computed.
        num_attended_pairs: (query, key) pairs, as if there were no windows.
        num_context_tokens: sum of the lengths of the sequences with tokens in the step.
        num_sequences: number of these sequences.
        num_swapped_out_blocks, num_swapped_in_blocks: blocks moved to the host pools and back.
        num_swapped_tokens: slots of these blocks; with several pools, weighted by their bytes.
    """

    num_new_tokens: int
    num_attended_pairs: int
    num_context_tokens: int
    num_sequences: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_swapped_tokens: float


def work_of(plan: StepPlan, tokens_per_block: Mapping[str, float]) -> StepWork:
    """Count the work of a plan; ``tokens_per_block`` converts swapped blocks of each pool to tokens."""
    starts, ends = plan.compute.starts, plan.compute.ends
    counts = (ends - starts).astype(np.int64)
    num_new_tokens = int(counts.sum())
    swaps = (*plan.swaps_out, *plan.swaps_in)
    return StepWork(
        num_new_tokens=num_new_tokens,
        num_attended_pairs=(int(np.dot(counts, starts + ends)) + num_new_tokens) // 2,
        num_context_tokens=int(ends.sum(dtype=np.int64)),
        num_sequences=len(ends),
        num_swapped_out_blocks=_num_moved(plan.swaps_out),
        num_swapped_in_blocks=_num_moved(plan.swaps_in),
        num_swapped_tokens=sum(len(move.src_ids) * tokens_per_block[move.pool] for move in swaps),
    )


def _num_moved(moves: tuple[BlockMoves, ...]) -> int:
    return sum(len(move.src_ids) for move in moves)
