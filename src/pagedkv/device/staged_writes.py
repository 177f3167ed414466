"""Table entries that are staged row by row: checks of what calls give, and packets of staged runs.

The runs are packed like a plan's table writes. If a plan has more entries than fit into a staging buffer, its entries
are applied first, from further buffers.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.contract.arguments import LARGEST_SIZE, as_array, as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import TableWrites
from pagedkv.device.tensors import require_tensor
from pagedkv.errors import TensorError
from pagedkv.plan_buffer import (
    ARRAYS_OF_KIND,
    COMPUTE,
    DRAFT_STATES,
    ENDS,
    ENTRIES,
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


def as_block_ids(given: Sequence[int], group: int) -> npt.NDArray[np.int64]:
    """Convert the block ids of a row to an array. Raises TensorError for anything but a flat list of integers."""
    ids = as_array(given, f"block ids of group {group}", TensorError)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TensorError(f"block ids of group {group} must be a flat list of integers, got {ids.dtype} {ids.shape}")
    if ids.size and ids.max() > LARGEST_SIZE:  # uint64 values may not fit into int64
        raise TensorError(f"block ids of group {group} must lie within int32, got {ids.max()}")
    return ids.astype(np.int64)


def as_padding(number: int) -> int:
    """Check a padded number of places or positions; the caller checks its bounds. Raises TensorError."""
    return as_count(number, "places wanted", least=-LARGEST_SIZE, error=TensorError)


def require_ids(block_ids: npt.NDArray[np.int64], group: int, num_blocks: int) -> None:
    """Raise TensorError for a block id outside a pool of this size."""
    if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < num_blocks:
        raise TensorError(
            f"block ids of group {group} must be from 0 to {num_blocks - 1}, got {block_ids.min()} to {block_ids.max()}"
        )


def require_room(row: int, group: int, num_blocks: int, width: int) -> None:
    """Raise TensorError if a row's table has no room for this many blocks."""
    if num_blocks > width:
        raise TensorError(
            f"row {row} of group {group} would have {num_blocks} blocks, but its table has room for {width}"
        )


def as_batch_rows(idx_mapping: torch.Tensor, max_rows: int, device: torch.device) -> torch.Tensor:
    """Check the rows of a batch: int32 ``[any]``, -1 for empty places. Values are checked only on a CPU.

    Raises:
        TensorError: wrong type, shape or device, too many rows; on a CPU also rows out of range or named twice.
    """
    rows = require_tensor(idx_mapping, "idx_mapping", dtype=torch.int32, shape=(None,), device=device)
    if len(rows) > max_rows:
        raise TensorError(f"a batch has {max_rows} places at most, got {len(rows)} rows")
    if rows.device.type == "cpu" and len(rows):
        real = rows[rows >= 0]
        if int(rows.min()) < -1 or int(rows.max()) >= max_rows:
            raise TensorError(f"rows must be from 0 to {max_rows - 1}, or -1, got {rows.min()} to {rows.max()}")
        if len(real.unique()) < len(real):
            raise TensorError(f"a batch has each row once, got {rows.tolist()}")
    return rows


class Run(NamedTuple):
    """Consecutive entries of one row."""

    row: int
    start: int
    block_ids: Int32Array


@final
class StagedWrites:
    """Staged runs, by table; a row has at most one in each packet.

    Args:
        layout: layout of the space's plans.
        num_tables: number of all tables.
    """

    def __init__(self, layout: PlanLayout, num_tables: int) -> None:
        self._layout = layout
        self._runs: list[dict[int, Run]] = [{} for _ in range(num_tables)]

    def clear(self) -> None:
        """Drop all staged runs."""
        for runs in self._runs:
            runs.clear()

    def add(self, group: int, run: Run) -> None:
        """Stage a run. It is appended to the row's staged run, or replaces it if it begins at the first entry."""
        runs = self._runs[group]
        before = runs.get(run.row)
        if before is not None and run.start:
            start = min(before.start, run.start)
            block_ids = np.zeros(max(_end(before), _end(run)) - start, np.int32)
            for each in (before, run):
                block_ids[each.start - start : _end(each) - start] = each.block_ids
            run = Run(run.row, start, block_ids)
        runs[run.row] = run

    def packets(self, num_words: int, step_id: int = 0) -> Iterator[Int32Array]:
        """Pack all staged runs into as many packets as needed, and drop them.

        Args:
            num_words: most words of a packet.
            step_id: the step of these entries; 0 for entries from calls, whose runs from the first entry on are whole
                rows.
        """
        waiting = [(group, run) for group, runs in enumerate(self._runs) for run in runs.values()]
        self.clear()
        room = (num_words - len(self._layout.template)) // 2
        pending: list[tuple[int, Run]] = []
        taken = 0
        for group, run in waiting:
            for piece in _cut(run, room):
                cost = len(piece.block_ids) + _RUN_WORDS
                if pending and taken + cost > room:
                    yield self._pack(pending, step_id)
                    pending, taken = [], 0
                pending.append((group, piece))
                taken += cost
                if piece is not run:
                    yield self._pack(pending, step_id)  # a packet has at most one run of a row
                    pending, taken = [], 0
        if pending:
            yield self._pack(pending, step_id)

    def _pack(self, runs: Sequence[tuple[int, Run]], step_id: int) -> Int32Array:
        arrays: list[tuple[int, list[Int32Array]]] = []
        for group in range(len(self._runs)):
            mine = [run for owner, run in runs if owner == group]
            if mine:
                rows, starts, counts = np.array([(run.row, run.start, len(run.block_ids)) for run in mine], np.int32).T
                arrays.append((self._layout.lines[RUNS, group], [rows, starts, counts]))
                arrays.append((self._layout.lines[ENTRIES, group], [np.concatenate([run.block_ids for run in mine])]))
        num_words = sum(len(parts) * padded(len(parts[0])) for _, parts in arrays)
        words = self._layout.new_buffer(step_id, num_words)
        offset = len(self._layout.template)
        words[offset:] = 0
        for line, parts in arrays:
            entry = HEADER_WORDS + LINE_WORDS * line
            words[entry + OFFSET], words[entry + LENGTH] = offset, len(parts[0])
            for part in parts:
                words[offset : offset + len(part)] = part
                offset += padded(len(part))
        words[NUM_WORDS] = offset
        return words


_RUN_WORDS = 8
"""Words of a run besides its entries, padding included."""


def _end(run: Run) -> int:
    return run.start + len(run.block_ids)


def _cut(run: Run, room: int) -> Iterator[Run]:
    most = room - _RUN_WORDS
    if len(run.block_ids) <= most:
        yield run
        return
    for first in range(0, len(run.block_ids), most):
        yield Run(run.row, run.start + first, run.block_ids[first : first + most])


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
    kept = [line for line in lines if line[KIND] in {COMPUTE, UNKNOWN, STARTS, DRAFT_STATES, ENDS}]
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
