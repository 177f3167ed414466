"""Receipts as numbers: what an acknowledged step adds for its rows, and for every row the blocks that it refers to.

:mod:`pagedkv.space.receipts` holds the counts and defines them.
"""

from typing import Final

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.tables.rows import (
    AT,
    FIRST_BLOCK,
    LOST_ON_HOST,
    NUM_BLOCKS,
    NUM_SINK_BLOCKS,
    STATUS,
    SWAPPED,
    GroupArrays,
)

__all__ = ["charge_blocks", "charge_step"]

# Columns of the counts; after them the block steps of each device pool, then of each host pool.
COMPUTED: Final = 0
RECOMPUTED: Final = 1
HIT: Final = 2
FORKED: Final = 3
SWAPPED_IN: Final = 4
DECLARED: Final = 5
ABORTED: Final = 6
ABANDONED: Final = 7
HIT_INSIDE: Final = 8
REPLAYED: Final = 9
NUM_LINES: Final = 10

# Columns of the numbers that are not on a receipt, or not yet.
FOUND: Final = 0  # tokens that hit, until a step relies on them
SHARED: Final = 1  # tokens that a fork began with
RETURNED: Final = 2  # tokens that were swapped in
RETURNED_IN: Final = 3  # the step that swaps them in
IN_FLIGHT: Final = 4  # tokens that steps in flight compute for the row
REACHED: Final = 5  # leading tokens that the request had computed or hit, in this life or an earlier one
FOUND_WHOLE: Final = 6  # of the tokens that hit, those in whole blocks
NUM_WAITING: Final = 7


@compiled
def charge_step(
    counts: Int64Array,
    waiting: Int64Array,
    serials: Int32Array,
    step_rows: Int32Array,
    step_serials: Int32Array,
    planned: Int32Array,
    planned_ends: Int32Array,
    starts: Int32Array,
    ends: Int32Array,
    step_id: int,
    totals: Int64Array,
) -> None:
    """Add the tokens of a step that is over to the counts of its rows, if they still serve the same sequences.

    ``planned`` and ``planned_ends`` are the ranges as planned, ``starts`` and ``ends`` those that remain. Waiting
    numbers are counted up to the planned start of a range. Tokens swapped in by a later step go on waiting.
    """
    for place in range(len(step_rows)):
        row = step_rows[place]
        if serials[row] != step_serials[place]:
            continue
        begin = planned[place]
        num_computed = planned_ends[place] - begin
        num_again = max(min(ends[place], waiting[row, REACHED]) - starts[place], 0)
        num_hit = min(waiting[row, FOUND], begin)
        num_inside = max(num_hit - waiting[row, FOUND_WHOLE], 0)
        num_forked = min(waiting[row, SHARED], begin)
        num_returned = 0
        if waiting[row, RETURNED_IN] <= step_id:
            num_returned = min(waiting[row, RETURNED], begin)
            waiting[row, RETURNED] = 0
        waiting[row, FOUND] = 0
        waiting[row, FOUND_WHOLE] = 0
        waiting[row, SHARED] = 0
        waiting[row, IN_FLIGHT] -= num_computed
        waiting[row, REACHED] = max(waiting[row, REACHED], ends[place])
        _charge(counts, totals, row, COMPUTED, num_computed)
        _charge(counts, totals, row, RECOMPUTED, num_again)
        _charge(counts, totals, row, HIT, num_hit)
        _charge(counts, totals, row, HIT_INSIDE, num_inside)
        _charge(counts, totals, row, FORKED, num_forked)
        _charge(counts, totals, row, SWAPPED_IN, num_returned)


@compiled
def _charge(counts: Int64Array, totals: Int64Array, row: int, column: int, number: int) -> None:
    """Add to one count of a row, and to that of all rows."""
    counts[row, column] += number
    totals[column] += number


@compiled
def charge_blocks(
    group: GroupArrays, rows: Int32Array, counts: Int64Array, on_device: int, on_host: int, totals: Int64Array
) -> None:
    """Add one block step to every row for each block that it has in a group: sinks, and all from the first block on.

    ``on_device`` and ``on_host`` are the columns for blocks there.
    """
    at = group.parameters[AT]
    num_sinks = group.parameters[NUM_SINK_BLOCKS]
    for row in range(len(rows)):
        num_held = rows[row, at + NUM_BLOCKS] - max(rows[row, at + FIRST_BLOCK] - num_sinks, 0)
        if num_held > 0:
            is_on_host = rows[row, STATUS] == SWAPPED or rows[row, STATUS] == LOST_ON_HOST
            line = on_host if is_on_host else on_device
            _charge(counts, totals, row, line, num_held)
