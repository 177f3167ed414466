"""Checks before block tables are written: of plans, and of the arguments of calls that write tables without plans.

A plan is checked before any part of it is executed, so that a refused plan has written nothing.
``StepPlan.from_buffer`` has checked that a plan's buffer is consistent. The checks here are whether the plan is one of
*this* space, and fits *these* tables. They make only a few passes over its words, since they run between two GPU steps.

How many tokens steps have refused, by row, is checked and recorded here, too. It is kept on the device: later ranges
move down by these numbers.
"""

from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.contract.arguments import LARGEST_SIZE, as_array, as_count
from pagedkv.contract.arrays import Int32Array
from pagedkv.device.table_arrays import TableArrays, TableGeometry
from pagedkv.device.tensors import require_numbers, require_tensor
from pagedkv.errors import PlanError, StepError, TensorError
from pagedkv.plan_buffer import (
    CHECKSUM_HIGH,
    CHECKSUM_KIND,
    CHECKSUM_LOW,
    COMPUTE,
    ENDS,
    ENTRIES,
    HEADER_WORDS,
    LENGTH,
    LINE_WORDS,
    NUM_PARTS,
    NUM_WORDS,
    OFFSET,
    RUNS,
    STARTS,
    STEP_HIGH,
    STEP_LOW,
    VERSION,
    padded,
    read_fingerprint,
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


def record_refused(arrays: TableArrays, step_id: int, rows: torch.Tensor, counts: torch.Tensor) -> None:
    """Record how many tokens of some rows a step has refused; rows that it did not compute stay as they are.

    Raises:
        TensorError: tensors of another type, shape or device.
    """
    as_count(step_id, "step_id", most=2**63 - 1, error=TensorError)
    taken, device = (torch.int32, torch.int64), arrays.sample_steps.device
    require_tensor(rows, "rows", dtype=taken, shape=(None,), device=device)
    require_tensor(counts, "counts", dtype=taken, shape=(len(rows),), device=device)
    require_numbers(rows, "rows", len(arrays.sample_steps))
    index = rows.long()
    is_this = arrays.sample_steps[index] == step_id
    arrays.sample_refused[index] = torch.where(is_this, counts.int()[:, None], arrays.sample_refused[index])


def forget_steps(arrays: TableArrays, first_step_id: int) -> None:
    """Drop what is recorded for steps from this one on. Raises StepError for a number that is none."""
    is_gone = arrays.sample_steps >= as_count(first_step_id, "step_id", most=2**63 - 1, error=StepError)
    arrays.sample_steps.masked_fill_(is_gone, -1)
    arrays.sample_refused.masked_fill_(is_gone, 0)


_Part: TypeAlias = tuple[int, int]
"""First word of a part of the plan, and the length of its arrays."""


@final
class PlanChecks:
    """Checks of the plans of one space.

    Args:
        sizes: sizes of the tables.
        num_blocks: for each table, blocks of its pool; ids must be smaller.
        names: name of each table in errors.
    """

    def __init__(self, sizes: TableGeometry, num_blocks: Sequence[int], names: Sequence[str]) -> None:
        self._sizes = sizes
        self._num_blocks = tuple(num_blocks)
        self._names = tuple(names)
        template = sizes.layout.template
        self._fixed = _fixed_words(sizes)
        self._fixed_words = template[self._fixed].tobytes()
        kinds = [(kind, group) for group in range(sizes.num_tables) for kind in (RUNS, ENTRIES)]
        lines = [sizes.layout.lines[part] for part in (*kinds, (COMPUTE, 0))]
        self._places = np.array([HEADER_WORDS + LINE_WORDS * line + OFFSET for line in lines]).repeat(2)
        self._places[1::2] += LENGTH - OFFSET
        starts = [(group, sizes.line(STARTS, group)) for group in range(sizes.num_tables)]
        self._own_ranges = [(group, line, sizes.line(ENDS, group)) for group, line in starts if line]

    def require_plan(self, words: Int32Array) -> tuple[int, int]:
        """Check a plan's words; return the numbers of rows and of positions that it computes.

        Raises:
            PlanError: a plan of another space, rows or entries beyond the tables, blocks beyond their pool, or a row
                that is computed twice.
            TensorError: more positions than there are slots.
        """
        if len(words) < len(self._sizes.layout.template) or words.take(self._fixed).tobytes() != self._fixed_words:
            self._refuse_layout(words)
        part_words = words.take(self._places).tolist()
        *writes, compute = zip(part_words[::2], part_words[1::2], strict=True)
        if compute[1] == 0 or not self._fits(words, writes, compute):
            for group in range(self._sizes.num_tables):
                runs, entries = writes[2 * group : 2 * group + 2]
                if runs[1]:
                    self._require_runs(group, words, runs, entries)
        return self._require_ranges(words, compute)

    def _fits(self, words: Int32Array, writes: Sequence[_Part], compute: _Part) -> bool:
        """Return whether every group's entries fit, by the largest number of each array, in one pass.

        They may fit although it returns False, since the last start and the largest count may belong to different runs.
        (NumPy takes three times as long if the bounds are a list.)
        """
        bounds: list[int] = []
        limits = []
        for group, ((offset, num_runs), (entries_at, _)) in enumerate(zip(writes[::2], writes[1::2], strict=True)):
            if num_runs:
                stride = padded(num_runs)
                bounds += (offset, offset + stride, offset + 2 * stride, entries_at)
                limits.append((self._sizes.widths[group], self._num_blocks[group]))
        if not bounds:
            return True
        bounds.append(compute[0])
        most = np.maximum.reduceat(words, np.array(bounds, np.intp)).tolist()
        for (width, num_blocks), row, start, count, block in zip(
            limits, most[::4], most[1::4], most[2::4], most[3::4], strict=False
        ):
            if row >= self._sizes.max_rows or start + count > width or block >= num_blocks:
                return False
        return True

    def _refuse_layout(self, words: Int32Array) -> None:
        require_fingerprint(words, self._sizes.layout.fingerprint)
        expected = self._sizes.layout
        raise PlanError(
            f"the plan is of another space: version {words[VERSION]}, {words[NUM_PARTS]} parts, {words[NUM_WORDS]} "
            f"words; the tables have version {expected.template[VERSION]}, {expected.template[NUM_PARTS]} parts, pools "
            f"{list(expected.pool_names)}"
        )

    def _require_runs(self, group: int, words: Int32Array, runs: _Part, entries: _Part) -> None:
        offset, num_runs = runs
        part = words[offset : offset + 3 * padded(num_runs)].reshape(3, -1)
        block_ids = words[entries[0] : entries[0] + entries[1]]
        most_row, most_start, most_count = part.max(axis=1).tolist()
        most_row_of_tables, width = self._sizes.max_rows, self._sizes.widths[group]
        if most_row >= most_row_of_tables:
            raise PlanError(
                f"the plan writes row {most_row} of {self._names[group]}, but the tables have {most_row_of_tables}"
            )
        if most_start + most_count > width:  # perhaps of different runs
            rows, ends = part[0], part[1] + part[2]
            place = int(ends.argmax())
            if ends[place] > width:
                raise PlanError(
                    f"row {rows[place]} of {self._names[group]} would have {ends[place]} entries, but its table has "
                    f"room for {width}: build the tables with the space's max_tokens"
                )
        if block_ids.max() >= self._num_blocks[group]:
            raise PlanError(
                f"the plan names block {block_ids.max()} in {self._names[group]}, but its pool has "
                f"{self._num_blocks[group]}"
            )

    def _require_ranges(self, words: Int32Array, compute: _Part) -> tuple[int, int]:
        offset, num_rows = compute
        if num_rows == 0:
            return 0, 0
        stride = padded(num_rows)
        rows = words[offset : offset + num_rows]
        starts = words[offset + stride : offset + stride + num_rows]
        ends = words[offset + 2 * stride : offset + 2 * stride + num_rows]
        if int(rows[-1]) >= self._sizes.max_rows:
            raise PlanError(f"the plan computes row {rows[-1]}, but the tables have {self._sizes.max_rows}")
        is_back = rows[1:] <= rows[:-1]
        if np.count_nonzero(is_back):
            place = int(is_back.argmax())
            raise PlanError(f"a batch has each row once, ascending; row {rows[place + 1]} follows row {rows[place]}")
        num_tokens = int(np.add.reduce(ends - starts, dtype=np.int64))
        if num_tokens > self._sizes.max_tokens:
            raise TensorError(
                f"the plan computes {num_tokens} positions, but there are slots for {self._sizes.max_tokens}: raise "
                "max_batched_tokens"
            )
        for group, starts_line, ends_line in self._own_ranges:
            self._require_own_ranges(words, group, starts_line, (ends_line, ends))
        return num_rows, num_tokens

    def _require_own_ranges(
        self, words: Int32Array, group: int, starts_line: int, ends: tuple[int, Int32Array]
    ) -> None:
        """Check that there are slots for the positions of a group with starts of its own, and perhaps ends."""
        ends_line, common = ends
        offset, length = words[starts_line + OFFSET : starts_line + LENGTH + 1].tolist()
        stops = words[words[ends_line + OFFSET] :][:length] if ends_line else common
        num_positions = int(np.maximum(stops - words[offset : offset + length], 0).sum(dtype=np.int64))
        if num_positions > self._sizes.max_tokens:
            raise TensorError(
                f"the plan writes {num_positions} positions in {self._names[group]}, but there are slots for "
                f"{self._sizes.max_tokens}: raise max_batched_tokens"
            )


def require_fingerprint(words: Int32Array, expected: bytes) -> None:
    """Raise PlanError for a plan of a space with another configuration."""
    found = read_fingerprint(words)
    if found != expected:
        raise PlanError(
            f"the plan is of another space: its configuration has the fingerprint {found.hex()}, that of storage and "
            f"tables {expected.hex()}; build all three from one SpaceConfig"
        )


def _fixed_words(sizes: TableGeometry) -> npt.NDArray[np.intp]:
    """Return the places of the words that all plans of a space share: layout and names, no step, size or checksum."""
    template = sizes.layout.template
    is_fixed = np.ones(len(template), bool)
    is_fixed[[NUM_WORDS, STEP_LOW, STEP_HIGH, CHECKSUM_KIND, CHECKSUM_LOW, CHECKSUM_HIGH]] = False
    end = HEADER_WORDS + LINE_WORDS * int(template[NUM_PARTS])
    is_fixed[HEADER_WORDS + LINE_WORDS + OFFSET : end : LINE_WORDS] = False
    is_fixed[HEADER_WORDS + LINE_WORDS + LENGTH : end : LINE_WORDS] = False
    return np.flatnonzero(is_fixed)
