"""Meter: preemptions, evictions, forks and waste of memory, measured after every step.

Waste is the share of slots without a token. It is measured over the block tables of sequences, where a shared block
counts once for each of them, and over the blocks in use, each counted once. For comparison the meter also counts the
slots that a reservation of ``max_tokens`` for each sequence would take.
"""

from dataclasses import dataclass
from typing import Final, final

from pagedkv.engine.core import EngineCore
from pagedkv.engine.records import StepRecord

__all__ = ["Measured", "Meter"]

NOTHING_HELD: Final = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a run.

    Args:
        num_steps: steps of the engine.
        num_chunked: prompts that were computed over several steps; num_forked: answers that began as forks.
        num_swapped, num_recomputed: preemptions by kind.
        num_evictions: cached blocks that were evicted.
        most_waste: the largest share, after any step, of slots without a token in the tables of running sequences.
        most_waste_of_blocks: the same share of the blocks in use, each counted once.
        reserved_ratio: slots of a reservation of ``max_tokens`` for each sequence, over slots of blocks in use; both
            summed over the steps.
    """

    num_steps: int
    num_chunked: int
    num_forked: int
    num_swapped: int
    num_recomputed: int
    num_evictions: int
    most_waste: float
    most_waste_of_blocks: float
    reserved_ratio: float


@final
class Meter:
    """Measures an engine, and does not change it.

    Args:
        core: the engine.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._num_steps = self._num_swapped = self._num_recomputed = 0
        self._chunked: set[int] = set()
        self._forked: dict[int, int] = {}
        self._most_waste = self._most_waste_of_blocks = NOTHING_HELD
        self._num_reserved = self._num_held = 0

    def note(self, record: StepRecord) -> None:
        """Add the measurements of a step; to be called after every step. O(running sequences)."""
        self._num_steps += 1
        self._num_swapped += record.num_swapped_out
        self._num_recomputed += record.num_recomputed
        for request in self._core.scheduler.running:
            if request.num_unscheduled:
                self._chunked.add(request.number)
            if len(request.rows) > 1:
                self._forked[request.number] = request.num_sequences - 1
        self._note_memory()

    def measured(self) -> Measured:
        """Return the measurements so far."""
        return Measured(
            num_steps=self._num_steps,
            num_chunked=len(self._chunked),
            num_forked=sum(self._forked.values()),
            num_swapped=self._num_swapped,
            num_recomputed=self._num_recomputed,
            num_evictions=sum(pool.num_evictions for pool in self._core.space.statistics().pools),
            most_waste=self._most_waste,
            most_waste_of_blocks=self._most_waste_of_blocks,
            reserved_ratio=self._num_reserved / max(1, self._num_held),
        )

    def _note_memory(self) -> None:
        space = self._core.space
        rows = [row for request in self._core.scheduler.running for row in request.rows]
        if not rows:
            return
        block_size = space.block_size()
        lengths, num_blocks = space.lengths(rows), space.num_blocks(rows)
        empty = num_blocks * block_size - lengths
        self._most_waste = max(self._most_waste, float(empty.sum() / (num_blocks.sum() * block_size)))
        # Empty slots are in a sequence's last block, which forks share until one of them writes.
        tails = space.block_table()[rows, num_blocks - 1]
        num_empty = sum(dict(zip(tails.tolist(), empty.tolist(), strict=True)).values())
        num_held = space.num_live_blocks() * block_size
        self._most_waste_of_blocks = max(self._most_waste_of_blocks, num_empty / num_held)
        self._num_reserved += len(rows) * space.config.max_tokens
        self._num_held += num_held
