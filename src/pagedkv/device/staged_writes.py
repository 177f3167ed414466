"""StagedWrites: table entries that calls stage row by row, until they are packed like a plan's table writes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.plan_buffer import (
    ENTRIES,
    HEADER_WORDS,
    LENGTH,
    LINE_WORDS,
    NUM_WORDS,
    OFFSET,
    RUNS,
    PlanLayout,
    padded,
)

__all__ = ["Run", "StagedWrites"]


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

    @property
    def is_empty(self) -> bool:
        """Whether no run is staged."""
        return not any(self._runs)

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
