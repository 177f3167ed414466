"""Writes of a row's record and of the entries of its block tables.

The layout is in :mod:`~pagedkv.tables.rows`. Each function makes one change to one row, or to a batch of rows if
called from Python, and makes no decision; operations do. Functions that add entries to the next plan say so.

Rows with something for the open plan are linked through ``TOUCHED``, so that the cost of a plan is proportional to the
changes. 0 means "not touched", and ``1 + r`` that row r was touched before. Row 0 is always in the list, as its
beginning and its end::

    row 0 [1 + 7] -> row 7 [1 + 3] -> row 3 [1 + 0] -> row 0        rows 3 and then 7 were touched
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv.blocks.blocks import aligned_zeros
from pagedkv.compilation.compiled import compiled, inlined, unsigned
from pagedkv.contract.arrays import BoolArray, Int32Array
from pagedkv.tables.rows import (
    DIRTY_FROM,
    DIRTY_TO,
    FIRST_BLOCK,
    FROZEN,
    LAST_STEP,
    MARK,
    NUM_ACCEPTED,
    NUM_BLOCKS,
    NUM_COMMON,
    NUM_DIGESTED,
    NUM_PER_GROUP,
    NUM_PER_REPLAY,
    NUM_PUBLISHED,
    NUM_TOKENS,
    STATUS,
    TAIL,
    TAIL_LIFE,
    TENANT,
    TOUCHED,
)

__all__ = [
    "add_blocks",
    "begin_table",
    "clear_changes",
    "clear_rows",
    "cut_changes",
    "digest_to",
    "freeze",
    "freeze_as",
    "lower_steps",
    "mark_row",
    "mark_rows",
    "new_rows",
    "note_change",
    "note_step",
    "plan_to",
    "publish_to",
    "put_entry",
    "set_accepted",
    "set_accepted_of",
    "set_column",
    "set_first_block",
    "set_lengths",
    "set_num_blocks",
    "set_num_tokens",
    "set_status",
    "set_tail",
    "set_tenant",
    "set_tokens",
    "start_touching",
    "touch",
    "untouch",
]

Batch: TypeAlias = int | list[int] | npt.NDArray[np.integer] | BoolArray
"""One row, several rows, or a mask of all rows."""

Numbers: TypeAlias = int | list[int] | npt.NDArray[np.integer]
"""The values to write: one number for all rows, or one for each."""


def new_rows(max_sequences: int, num_tables: int, *, num_replaying: int = 0, has_tenants: bool = False) -> Int32Array:
    """Make vacant rows, with columns for ``num_tables`` tables: those of the groups, and of their draft states."""
    num_columns = NUM_COMMON + num_tables * NUM_PER_GROUP + num_replaying * NUM_PER_REPLAY
    rows = aligned_zeros(max_sequences, num_columns + has_tenants)
    rows[0, TOUCHED] = 1
    return rows


@compiled
def clear_rows(
    rows: Int32Array, serials: Int32Array, relies_on: Int32Array, num_known: Int32Array, batch: Int32Array, status: int
) -> None:
    """Reset the records of rows to those of new, empty sequences, and reset the arrays kept beside the records."""
    for row in batch:
        serials[row] += 1
        relies_on[row] = 0
        num_known[row] = 0
        mark = rows[row, MARK]
        link = rows[row, TOUCHED]  # the row stays in the list until the next plan, whatever sequence it serves
        for column in range(rows.shape[1]):
            rows[row, column] = 0
        rows[row, STATUS] = status
        rows[row, MARK] = mark
        rows[row, TOUCHED] = link


# Contents of the open plan


@inlined
def touch(rows: Int32Array, row: int) -> None:
    """Record that a row has something for the open plan."""
    if rows[row, TOUCHED] == 0:
        rows[row, TOUCHED] = rows[0, TOUCHED]
        rows[0, TOUCHED] = row
        rows[0, TOUCHED] += 1  # apart: Numba adds signed to unsigned as floats


@inlined
def untouch(rows: Int32Array, row: int) -> None:
    """Record that a row has nothing more for the open plan; the caller removes all rows from the list."""
    rows[row, TOUCHED] = 0


@inlined
def start_touching(rows: Int32Array) -> None:
    """Reset the list of touched rows to row 0 alone."""
    rows[0, TOUCHED] = 1


@inlined
def note_change(rows: Int32Array, row: int, at: int, start: int, stop: int) -> None:
    """Widen the range of a row's table entries that the next plan writes."""
    if rows[row, at + DIRTY_TO] == 0:
        rows[row, at + DIRTY_FROM] = start
        rows[row, at + DIRTY_TO] = stop
    else:
        rows[row, at + DIRTY_FROM] = min(rows[row, at + DIRTY_FROM], start)
        rows[row, at + DIRTY_TO] = max(rows[row, at + DIRTY_TO], stop)
    touch(rows, row)


@inlined
def cut_changes(rows: Int32Array, row: int, at: int, stop: int) -> None:
    """Cut the range of a row's table entries that the next plan writes at ``stop``."""
    rows[row, at + DIRTY_TO] = min(rows[row, at + DIRTY_TO], stop)
    rows[row, at + DIRTY_FROM] = min(rows[row, at + DIRTY_FROM], rows[row, at + DIRTY_TO])


@inlined
def clear_changes(rows: Int32Array, row: int, at: int) -> None:
    """Clear the range of a row's table entries that the next plan writes."""
    rows[row, unsigned(at + DIRTY_FROM)] = 0
    rows[row, unsigned(at + DIRTY_TO)] = 0


# One row: common columns


@inlined
def mark_row(rows: Int32Array, row: int, mark: int) -> None:
    """Mark a row as named by a batch."""
    rows[row, MARK] = mark


@inlined
def set_tokens(rows: Int32Array, row: int, num_tokens: int, num_accepted: int) -> None:
    """Set a row's numbers of tokens and of accepted tokens."""
    rows[row, NUM_TOKENS] = num_tokens
    rows[row, NUM_ACCEPTED] = num_accepted


@inlined
def set_num_tokens(rows: Int32Array, row: int, num_tokens: int) -> None:
    """Set a row's number of tokens."""
    rows[row, NUM_TOKENS] = num_tokens


@inlined
def set_accepted(rows: Int32Array, row: int, num_accepted: int) -> None:
    """Set a row's number of accepted tokens."""
    rows[row, NUM_ACCEPTED] = num_accepted


@inlined
def plan_to(rows: Int32Array, row: int, column: int, position: int) -> None:
    """Set the position up to which a row is planned, in the column of a group."""
    rows[row, column] = position


@inlined
def note_step(rows: Int32Array, row: int, step: int) -> None:
    """Record ``step`` as the last planned one that computes something for a row."""
    rows[row, LAST_STEP] = step


@inlined
def freeze_as(rows: Int32Array, row: int, other: int) -> None:
    """Freeze a row if another one is frozen."""
    rows[row, FROZEN] = rows[other, FROZEN]


# One row: columns of a group, which begin at ``at``


@inlined
def put_entry(table: Int32Array, row: int, index: int, block: int) -> None:
    """Set one entry of a row's block table. The next plan writes it only after :func:`note_change`."""
    table[row, index] = block


@inlined
def set_num_blocks(rows: Int32Array, row: int, at: int, num_blocks: int) -> None:
    """Set how many entries of a row's block table are in use."""
    rows[row, at + NUM_BLOCKS] = num_blocks


@inlined
def add_blocks(rows: Int32Array, row: int, at: int, change: int) -> None:
    """Change the number of entries of a row's block table that are in use."""
    rows[row, at + NUM_BLOCKS] += change


@inlined
def set_first_block(rows: Int32Array, row: int, at: int, first: int) -> None:
    """Set the entry below which a row's block table is null, except for sinks."""
    rows[row, at + FIRST_BLOCK] = first


@inlined
def begin_table(rows: Int32Array, row: int, at: int, num_blocks: int, first: int, num_hits: int) -> None:
    """Set the entries in use of a new row's block table, the first that is not null, and how many blocks hit."""
    rows[row, at + NUM_BLOCKS] = num_blocks
    rows[row, at + FIRST_BLOCK] = first
    rows[row, at + NUM_DIGESTED] = num_hits
    rows[row, at + NUM_PUBLISHED] = num_hits


@inlined
def digest_to(rows: Int32Array, row: int, at: int, num_digested: int) -> None:
    """Set how many leading full blocks of a row have a known digest."""
    rows[row, at + NUM_DIGESTED] = num_digested


@inlined
def publish_to(rows: Int32Array, row: int, at: int, num_published: int) -> None:
    """Set how many leading full blocks of a row were offered to the prefix index."""
    rows[row, at + NUM_PUBLISHED] = num_published


@inlined
def set_tail(rows: Int32Array, row: int, at: int, block: int, life: int) -> None:
    """Set the parent of the next block to be published, and its life."""
    rows[row, at + TAIL] = block
    rows[row, at + TAIL_LIFE] = life


# Batches, from Python


def set_status(rows: Int32Array, batch: Batch, status: int | Int32Array) -> None:
    """Set the status of one or more rows."""
    rows[batch, STATUS] = status


def set_lengths(rows: Int32Array, batch: Batch, num_tokens: int, num_accepted: int) -> None:
    """Set the numbers of tokens and of accepted tokens of rows."""
    rows[batch, NUM_TOKENS] = num_tokens
    rows[batch, NUM_ACCEPTED] = num_accepted


def set_accepted_of(rows: Int32Array, batch: Batch, num_accepted: Numbers) -> None:
    """Set the number of accepted tokens of rows."""
    rows[batch, NUM_ACCEPTED] = num_accepted


def set_column(rows: Int32Array, batch: Batch, column: int | list[int], value: Numbers) -> None:
    """Set a column given by number, such as the position up to which a group is planned."""
    rows[batch, column] = value


def set_tenant(rows: Int32Array, batch: Batch, tenant: Numbers) -> None:
    """Set the tenant of rows."""
    rows[batch, TENANT] = tenant


def freeze(rows: Int32Array, batch: Batch) -> None:
    """Freeze rows, so that they publish nothing any more."""
    rows[batch, FROZEN] = 1


def mark_rows(rows: Int32Array, batch: Batch, mark: int) -> None:
    """Mark rows as named by a batch."""
    rows[batch, MARK] = mark


def lower_steps(rows: Int32Array, num_before: int) -> None:
    """Lower all step numbers in the records by ``num_before``."""
    rows[:, LAST_STEP] = np.maximum(rows[:, LAST_STEP] - num_before, 0)
