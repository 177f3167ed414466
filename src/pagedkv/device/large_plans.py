"""Plans with more table entries than fit into a staging buffer: the entries are applied first, from further buffers."""

from typing import Final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import TableWrites
from pagedkv.device.staged_writes import Run
from pagedkv.device.table_arrays import TableGeometry
from pagedkv.plan_buffer import (
    ARRAYS_OF_KIND,
    COMPUTE,
    DRAFT_STATES,
    HEADER_WORDS,
    KIND,
    LENGTH,
    LINE_WORDS,
    NUM_WORDS,
    OFFSET,
    RUNS,
    STARTS,
    UNKNOWN,
    PlanLayout,
    padded,
    read_directory,
    read_step_id,
)

__all__ = ["buffer_words", "runs_of", "without_writes"]

PARTS_OF_ROWS: Final = (RUNS, COMPUTE, UNKNOWN, STARTS, DRAFT_STATES)


def buffer_words(layout: PlanLayout, sizes: TableGeometry, num_entries: int) -> int:
    """Return the words of a packet with all parts about rows and this many entries, each with a new block."""
    ranges = sum(ARRAYS_OF_KIND[kind] for kind, _ in layout.lines if kind in PARTS_OF_ROWS)
    return len(layout.template) + ranges * padded(sizes.max_rows) + 2 * padded(num_entries)


def runs_of(writes: TableWrites) -> list[Run]:
    """Split a group's table writes by row."""
    ends = np.cumsum(writes.counts)
    return [
        Run(row, start, writes.block_ids[end - count : end])
        for row, start, count, end in zip(
            writes.rows.tolist(), writes.starts.tolist(), writes.counts.tolist(), ends.tolist(), strict=True
        )
    ]


def without_writes(words: Int32Array, layout: PlanLayout) -> Int32Array:
    """Copy a plan without its table writes, moves and new blocks; the ranges of its rows remain."""
    lines = read_directory(words)
    kept = [line for line in lines if line[KIND] in {COMPUTE, UNKNOWN, STARTS, DRAFT_STATES}]
    num_words = sum(ARRAYS_OF_KIND[kind] * padded(length) for kind, _, _, length in kept)
    reduced = layout.new_buffer(read_step_id(words), num_words)
    end = len(layout.template)
    for kind, owner, offset, length in kept:
        if length:
            stop = end + ARRAYS_OF_KIND[kind] * padded(length)
            reduced[end:stop] = words[offset : offset + stop - end]
            entry = HEADER_WORDS + LINE_WORDS * layout.lines[kind, owner]
            reduced[entry + OFFSET], reduced[entry + LENGTH] = end, length
            end = stop
    reduced[NUM_WORDS] = end
    return reduced
