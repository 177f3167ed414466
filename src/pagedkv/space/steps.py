"""The steps of a space: the moves gathered for the open step's plan, and the steps in flight.

Owns copies and swaps until their step is acknowledged. If the source of a copy is itself written by a copy of the same
plan, the plan copies from the original source instead, so that its copies are independent of each other.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.contract.spec import StepId
from pagedkv.errors import StepError

NO_SEQUENCE: Final = -1
Moves = dict[int, int]  # destination -> source, in order


@dataclass(slots=True)
class InFlightStep:
    """A planned step that is not acknowledged yet.

    Args:
        rows: the rows that it computes, as in the plan.
        serials: which sequence each row of the plan served.
        starts: own copy of the plan's starts, moved down by tokens that were refused since.
        ends: own copy of the plan's ends, moved down likewise, and lowered when a row is rolled back.
        duplicates: for each group the duplicates found since the plan before, int32 ``[n, NUM_DUPLICATE_FIELDS]`` each.
        epoch: the epoch of the weights with which it computes, if epochs are counted.
    """

    plan: StepPlan
    rows: Int32Array
    serials: Int32Array
    starts: Int32Array
    ends: Int32Array
    duplicates: list[list[Int32Array]] = field(default_factory=list)
    epoch: int = 0

    def starts_in(self, group: int) -> Int32Array:
        """Return where each range begins in a group, int32 ``[rows]``, moved down like the others; not an encoder's."""
        outside = self.plan.compute_outside.get(group)
        if group in self.plan.crossing:
            return self.plan.compute_outside[group].starts
        return self.starts if outside is None else outside.starts - (self.plan.compute.starts - self.starts)

    def live_starts(self, serials: Int32Array, group: int) -> list[tuple[int, int]]:
        """Return the rows that it computes and that still serve the same sequence, with their starts in a group."""
        is_alive = serials[self.rows] == self.serials
        starts = self.starts_in(group)
        return list(zip(self.rows[is_alive].tolist(), starts[is_alive].tolist(), strict=True))


class Samplers(NamedTuple):
    """The steps that sample the first unknown tokens of rows.

    Args:
        version: version of the space for which this holds.
        steps: int32 ``[max_sequences]``, the step's number; 0 if none is planned, or if it is forgotten.
        limits: int32 ``[max_sequences]``, the end of its range.
    """

    version: int
    steps: Int32Array
    limits: Int32Array


@dataclass(slots=True)
class OpenMoves:
    """Copies and swaps of the open step, by pool."""

    copies: dict[str, Moves] = field(default_factory=dict)
    swaps_out: dict[str, Moves] = field(default_factory=dict)
    swaps_in: dict[str, Moves] = field(default_factory=dict)


class StepLedger:
    """The open step and the steps in flight, oldest first.

    Attributes:
        in_flight: planned steps that are neither acknowledged nor aborted.
        duplicates: duplicates found since the last plan, by group (:mod:`pagedkv.space.publishing`).
        over: acknowledged steps with sampled tokens that are not filled in yet; oldest first.
        shares_pending: whether rows share blocks that the open step still has to compute.
        samplers: what the last plan found out about unknown tokens, for a ``fill`` right after it.
    """

    def __init__(self, num_groups: int) -> None:
        """Start with an open step and none in flight."""
        self.in_flight: deque[InFlightStep] = deque()
        self.duplicates: list[list[Int32Array]] = [[] for _ in range(num_groups)]
        self.over: list[InFlightStep] = []
        self.shares_pending = False
        self.samplers: Samplers | None = None
        self._open = OpenMoves()

    @property
    def unfilled(self) -> list[InFlightStep]:
        """Steps whose sampled tokens may not be filled in yet, oldest first."""
        return [*self.over, *self.in_flight]

    def forget_filled(self, is_unfilled: Callable[[InFlightStep], bool]) -> None:
        """Drop the acknowledged steps whose samples are all filled in."""
        if self.over:
            self.over = [step for step in self.over if is_unfilled(step)]

    def add_copies(self, pool: str, pairs: Int32Array) -> list[tuple[int, int]]:
        """Add copies on write (``[n, 2]``: source, destination); return them with their original sources."""
        copies = self._open.copies.setdefault(pool, {})
        added = []
        for source, destination in pairs.tolist():
            origin = copies.get(source, source)
            copies[destination] = origin
            added.append((origin, destination))
        return added

    def add_swaps_out(self, pool: str, pairs: Int32Array) -> None:
        """Add moves from device blocks to host blocks, ``[n, 2]``."""
        if len(pairs):
            self._open.swaps_out.setdefault(pool, {}).update((host, device) for device, host in pairs.tolist())

    def add_swaps_in(self, pool: str, pairs: Int32Array) -> None:
        """Add moves from host blocks to device blocks, ``[n, 2]``."""
        if len(pairs):
            self._open.swaps_in.setdefault(pool, {}).update((device, host) for host, device in pairs.tolist())

    def is_written(self, pool: str, block_ids: Iterable[int]) -> bool:
        """Return whether the open plan copies or swaps something into one of these device blocks."""
        copies = self._open.copies.get(pool, {})
        swaps_in = self._open.swaps_in.get(pool, {})
        return bool(copies or swaps_in) and any(block in copies or block in swaps_in for block in block_ids)

    def spread(self, pool: str, on_device: set[int], on_host: set[int]) -> tuple[set[int], set[int]]:
        """Return the blocks that hold the content of these blocks after the open plan's moves, in their order."""
        on_host = on_host | _filled_from(self._open.swaps_out.get(pool, {}), on_device)
        on_device = on_device | _filled_from(self._open.swaps_in.get(pool, {}), on_host)
        return on_device | _filled_from(self._open.copies.get(pool, {}), on_device), on_host

    def open_moves(self, pool: str) -> tuple[set[int], set[int]]:
        """Return the blocks on the device and on the host that the open plan's moves read or write."""
        copies, out, back = (
            moves.get(pool, {}) for moves in (self._open.copies, self._open.swaps_out, self._open.swaps_in)
        )
        on_device = {*copies, *copies.values(), *out.values(), *back}
        return on_device, {*out, *back.values()}

    @property
    def has_device_writes(self) -> bool:
        """Whether the open plan writes any device block before the forward pass."""
        return bool(self._open.copies or self._open.swaps_in)

    @property
    def has_moves(self) -> bool:
        """Whether the open plan copies or swaps anything."""
        return bool(self._open.copies or self._open.swaps_in or self._open.swaps_out)

    def take_moves(self) -> OpenMoves:
        """Close the open step; return its copies and swaps, each pool's in the order in which they were added."""
        moves, self._open = self._open, OpenMoves()
        return moves

    def close(self, step: InFlightStep) -> None:
        """Record that a plan was handed out."""
        step.duplicates = self.duplicates
        self.duplicates = [[] for _ in self.duplicates]
        self.shares_pending = False
        self.in_flight.append(step)

    def take_out(self, is_taken: npt.NDArray[np.bool_]) -> None:
        """Record that what steps in flight compute for some rows stays valid even if they are aborted.

        ``is_taken`` is bool ``[max_sequences]``.
        """
        for step in self.in_flight:
            step.serials[is_taken[step.rows]] = NO_SEQUENCE

    def forget_duplicates(self) -> None:
        """Drop all duplicates: the names with which they would be merged are gone."""
        for duplicates in (self.duplicates, *(step.duplicates for step in self.in_flight)):
            for parts in duplicates:
                parts.clear()

    def moved_blocks(self, pool: str) -> tuple[set[int], set[int]]:
        """Return device blocks that moves of open or planned steps write, and those that the open plan's moves read."""
        opened = self._open
        written = set(opened.copies.get(pool, ())) | set(opened.swaps_in.get(pool, ()))
        for step in self.in_flight:
            for moves in (*step.plan.copies, *step.plan.swaps_in):
                if moves.pool == pool:
                    written.update(moves.dst_ids.tolist())
        return written, {*opened.copies.get(pool, {}).values(), *opened.swaps_out.get(pool, {}).values()}

    def last_swaps(self, pool: str) -> dict[int, StepId]:
        """Return the last step in flight that swaps each device block, for all that any of them swaps."""
        return {
            block: step.plan.step_id
            for step in self.in_flight
            for moves, block_ids in (
                *((moves, moves.src_ids) for moves in step.plan.swaps_out),
                *((moves, moves.dst_ids) for moves in step.plan.swaps_in),
            )
            if moves.pool == pool
            for block in block_ids.tolist()
        }

    def lower_ends(self, num_tokens: Int32Array) -> None:
        """Lower the ends of steps after rows were rolled back: what they compute beyond the rows' tokens is void.

        ``num_tokens`` is int32 ``[max_sequences]``. Rows that were not rolled back have at least what is planned.
        """
        for step in self.unfilled:
            np.minimum(step.ends, num_tokens[step.rows], out=step.ends)

    def require_oldest(self, step_id: StepId) -> None:
        """Raise StepError unless this step is the oldest in flight. Changes nothing."""
        if not self.in_flight:
            raise StepError(f"step {step_id} cannot be acknowledged: no step is in flight")
        oldest = self.in_flight[0].plan.step_id
        if oldest != step_id:
            raise StepError(f"step {step_id} cannot be acknowledged before step {oldest}, the oldest in flight")

    def acknowledge(self) -> InFlightStep:
        """Remove and return the oldest step in flight."""
        return self.in_flight.popleft()

    def require_in_flight(self, step_id: StepId) -> None:
        """Raise StepError unless this step is in flight. Changes nothing."""
        ids = [step.plan.step_id for step in self.in_flight]
        if step_id not in ids:
            raise StepError(f"step {step_id} cannot be aborted: in flight are {ids or 'none'}")

    def abort(self, step_id: StepId) -> list[InFlightStep]:
        """Remove a step in flight and all after it; return them, oldest first. Their duplicates go to the open step."""
        aborted = [step for step in self.in_flight if step.plan.step_id >= step_id]
        for step in aborted:
            self.in_flight.pop()
            for waiting, parts in zip(self.duplicates, step.duplicates, strict=True):
                waiting.extend(parts)
        return aborted


def _filled_from(moves: Moves, sources: set[int]) -> set[int]:
    return {destination for destination, source in moves.items() if source in sources}


def read_only(array: Int32Array) -> Int32Array:
    """Make an array that belongs to a plan immutable."""
    array.flags.writeable = False
    return array
