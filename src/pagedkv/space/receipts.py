"""Receipts: what each sequence has taken, so that the sums equal the statistics exactly.

Owns the counts, which exist only if :attr:`SpaceConfig.receipts <pagedkv.SpaceConfig>` is set. The operations tell it
what they do; decision 17 has the rule for each moment. No operation reads or depends on the counts.

::

    plan        acknowledge      -> computed, and in part recomputed; also what waited: hit, forked, swapped in
    in flight   abort            -> aborted
                free             -> abandoned
                mark_computed    -> declared, together with tokens that were not planned yet
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.compilation.compiled import compiled
from pagedkv.contract.answers import Receipt
from pagedkv.contract.arrays import Int32Array, Int64Array
from pagedkv.contract.spec import StepId
from pagedkv.space.rows import (
    AT,
    FIRST_BLOCK,
    LOST_ON_HOST,
    NUM_BLOCKS,
    NUM_PLANNED,
    NUM_SINK_BLOCKS,
    NUM_TOKENS,
    STATUS,
    SWAPPED,
    VACANT,
    GroupArrays,
)
from pagedkv.space.steps import InFlightStep

NOT_ON_HOST: Final = -1


class _Holding(NamedTuple):
    """The columns in which a group's blocks are counted.

    Args:
        arrays: the group's arrays; on_device, on_host: columns of the counts, ``NOT_ON_HOST`` without a host pool.
    """

    arrays: GroupArrays
    on_device: int
    on_host: int


class ReceiptBook:
    """The counts of all rows, and their sums.

    Attributes:
        counts: int64 ``[max_sequences, NUM_LINES + pools + host pools]``, what was charged to each row.
        waiting: int64 ``[max_sequences, NUM_WAITING]``, what may still be charged.
        totals: int64 ``[NUM_LINES + pools + host pools]``, everything that was ever charged.
        closed: the same for the rows that were freed.
    """

    def __init__(
        self,
        rows: Int32Array,
        serials: Int32Array,
        tables: list[tuple[str, GroupArrays]],
        pools: tuple[str, ...],
        hosts: tuple[str, ...],
    ) -> None:
        """Make empty counts, for the rows of a space without sequences, its tables with their pools, and all pools."""
        max_sequences = len(rows)
        self._rows, self._serials = rows, serials
        self._freed: tuple[Receipt, ...] = ()
        self._num_pools = len(pools)
        width = NUM_LINES + len(pools) + len(hosts)
        self._holdings = [
            _Holding(
                arrays,
                NUM_LINES + pools.index(pool),
                NUM_LINES + len(pools) + hosts.index(pool) if pool in hosts else NOT_ON_HOST,
            )
            for pool, arrays in tables
        ]
        self.counts = np.zeros((max_sequences, width), np.int64)
        self.waiting = np.zeros((max_sequences, NUM_WAITING), np.int64)
        self.totals = np.zeros(width, np.int64)
        self.closed = np.zeros(width, np.int64)

    # Queries

    def receipt(self, row: int) -> Receipt:
        """Return a row's receipt as it is now."""
        return self._as_receipt(self.counts[row].tolist(), int(self.waiting[row, REACHED]))

    @property
    def sum(self) -> Receipt:
        """Everything that was ever charged."""
        return self._as_receipt(self.totals.tolist(), 0)

    def _as_receipt(self, numbers: list[int], num_reached: int) -> Receipt:
        behind = NUM_LINES + self._num_pools
        on_device, on_host = tuple(numbers[NUM_LINES:behind]), tuple(numbers[behind:])
        return Receipt(
            num_computed=numbers[COMPUTED],
            num_recomputed=numbers[RECOMPUTED],
            num_hit=numbers[HIT],
            num_hit_inside=numbers[HIT_INSIDE],
            num_replayed=numbers[REPLAYED],
            num_forked=numbers[FORKED],
            num_swapped_in=numbers[SWAPPED_IN],
            num_declared=numbers[DECLARED],
            num_aborted=numbers[ABORTED],
            num_abandoned=numbers[ABANDONED],
            block_steps=on_device,
            host_block_steps=on_host,
            num_reached=num_reached,
        )

    def take_freed(self) -> tuple[Receipt, ...]:
        """Return the receipts of the rows that were freed last, in their order, and drop them."""
        receipts, self._freed = self._freed, ()
        return receipts

    # Moments

    def admitted(self, row: int, num_hit: int, num_whole: int, num_reached: int) -> None:
        """Record the tokens that a sequence hit, those of them in whole blocks, and those that an earlier life had."""
        self.waiting[row, FOUND] = num_hit
        self.waiting[row, FOUND_WHOLE] = num_whole
        self.waiting[row, REACHED] = num_reached

    def forked(self, parent: int, children: Int32Array, num_tokens: int) -> None:
        """Record that rows begin with ``num_tokens`` tokens of another row."""
        self.waiting[children, SHARED] = num_tokens
        self.waiting[children, REACHED] = min(int(self.waiting[parent, REACHED]), num_tokens)

    def planned(self, step: InFlightStep) -> None:
        """Record the tokens of a planned step."""
        self.waiting[step.rows, IN_FLIGHT] += step.ends - step.starts

    def acknowledging(self, step: InFlightStep, replayed: Int32Array | None) -> None:
        """Charge a step that has run, before windows slide. O(rows of the step + max_sequences x groups).

        ``replayed``: of each of its rows, the tokens that it computed again in windows alone; None if there are none.
        """
        rows, serials, ranges = self._rows, self._serials, step.plan.compute
        if replayed is not None:
            is_alive = serials[step.rows] == step.serials
            self._charge(REPLAYED, step.rows[is_alive], replayed[is_alive])
        charge_step(
            self.counts,
            self.waiting,
            serials,
            step.rows,
            step.serials,
            ranges.starts,
            ranges.ends,
            step.starts,
            step.ends,
            step.plan.step_id,
            self.totals,
        )
        for arrays, on_device, on_host in self._holdings:
            charge_blocks(arrays, rows, self.counts, on_device, on_host, self.totals)

    def aborted(self, step: InFlightStep) -> None:
        """Charge a step that has failed."""
        is_alive, ranges = self._serials[step.rows] == step.serials, step.plan.compute
        batch, num_aborted = step.rows[is_alive], (ranges.ends - ranges.starts)[is_alive]
        self.waiting[batch, IN_FLIGHT] -= num_aborted
        self._charge(ABORTED, batch, num_aborted)

    def declaring(self, batch: Int32Array) -> None:
        """Charge rows that are about to be declared computed; no step in flight computes for them any more."""
        rows = self._rows
        num_tokens = rows[batch, NUM_TOKENS]
        self._charge(DECLARED, batch, self.waiting[batch, IN_FLIGHT] + num_tokens - rows[batch, NUM_PLANNED])
        self.waiting[batch, IN_FLIGHT] = 0
        self.waiting[batch, REACHED] = np.maximum(self.waiting[batch, REACHED], num_tokens)

    def truncating(self, batch: Int32Array, lengths: Int64Array) -> None:
        """Forget the tokens that are rolled back: those computed in their place are not computed again."""
        is_shorter = lengths < self._rows[batch, NUM_TOKENS]
        cut = batch[is_shorter]
        self.waiting[cut, REACHED] = np.minimum(self.waiting[cut, REACHED], lengths[is_shorter])

    def refused(self, refused: Int32Array, limits: Int32Array) -> None:
        """Lower the reached tokens by refused ones, int32 ``[max_sequences]``; all behind the limits moves down."""
        reached = self.waiting[:, REACHED]
        reached -= refused * (reached >= limits)

    def returned(self, batch: Int32Array, step_id: StepId) -> None:
        """Record the tokens of rows that are swapped in, in the open step."""
        self.waiting[batch, RETURNED] = self._rows[batch, NUM_PLANNED]
        self.waiting[batch, RETURNED_IN] = step_id

    def freed(self, batch: Int32Array) -> None:
        """Charge freed rows, and keep their receipts for :meth:`take_freed`."""
        self._charge(ABANDONED, batch, self.waiting[batch, IN_FLIGHT])
        counts, reached = self.counts[batch], self.waiting[batch, REACHED]
        self._freed = tuple(map(self._as_receipt, counts.tolist(), reached.tolist()))
        self.closed += counts.sum(axis=0)
        self.counts[batch] = 0
        self.waiting[batch] = 0

    def _charge(self, line: int, batch: Int32Array, numbers: npt.NDArray[np.integer]) -> None:
        """Charge rows, each at most once."""
        self.counts[batch, line] += numbers
        self.totals[line] += numbers.sum(dtype=np.int64)

    # Auditing

    def check(self) -> None:
        """Check that the receipts add up. Raises AssertionError."""
        rows = self._rows
        added = self.counts.sum(axis=0) + self.closed
        wrong = np.flatnonzero(added != self.totals)
        assert len(wrong) == 0, (
            f"receipts: line {wrong[0]} adds up to {added[wrong[0]]}, the statistics say {self.totals[wrong[0]]}"
        )
        is_vacant = rows[:, STATUS] == VACANT
        assert not self.counts[is_vacant].any(), "receipts: a vacant row has a receipt"
        assert not self.waiting[is_vacant].any(), "receipts: something waits for a vacant row"
        assert self.counts.min() >= 0, "receipts: a count is negative"
        assert self.waiting.min() >= 0, "receipts: less than nothing is in flight"
        assert (self.counts[:, HIT_INSIDE] <= self.counts[:, HIT]).all(), "receipts: more hit inside blocks than at all"
        assert (self.counts[:, RECOMPUTED] <= self.counts[:, COMPUTED]).all(), "receipts: more again than at all"


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
