"""The steps of a space: what the open step's plan has gathered, and which steps are in flight.

Owns copies and swaps until their step is acknowledged. A copy whose source is itself written by a copy of
the same plan is led back to the origin, so that a plan's copies are independent of each other.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pagedkv.core.blocks import Int32Array
from pagedkv.errors import StepError
from pagedkv.plan import BlockMoves, StepPlan
from pagedkv.spec import StepId

__all__ = ["Duplicate", "InFlightStep", "StepLedger", "read_only"]

NO_SEQUENCE: Final = -1
Moves = dict[int, int]  # destination -> source, in order


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A row's block whose content another block is named for: to be replaced by it when that is safe.

    Both are noted with their lives, since either may have other content by then.
    """

    group: int
    row: int
    serial: int
    index: int
    block: int
    block_life: int
    carrier: int
    carrier_life: int


@dataclass(slots=True)
class InFlightStep:
    """A planned step that is not acknowledged yet.

    Args:
        ends: our own copy of the plan's ends, lowered when a row is rolled back meanwhile.
        serials: which sequence each row of the plan served.
    """

    plan: StepPlan
    serials: Int32Array
    ends: Int32Array
    duplicates: list[Duplicate]


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
        duplicates: found since the last plan.
        shares_pending: rows share blocks that the open step still has to compute.
    """

    def __init__(self) -> None:
        """Start with an open step and none in flight."""
        self.in_flight: deque[InFlightStep] = deque()
        self.duplicates: list[Duplicate] = []
        self.shares_pending = False
        self._open = OpenMoves()

    def add_copies(self, pool: str, pairs: Int32Array) -> list[tuple[int, int]]:
        """Add copies on write (``[n, 2]``: source, destination); return them, led back to their origins."""
        copies = self._open.copies.setdefault(pool, {})
        added = []
        for source, destination in pairs.tolist():
            origin = copies.get(source, source)
            copies[destination] = origin
            added.append((origin, destination))
        return added

    def add_swaps_out(self, pool: str, pairs: Int32Array) -> None:
        """Add moves from device blocks to host blocks, ``[n, 2]``."""
        self._open.swaps_out.setdefault(pool, {}).update((host, device) for device, host in pairs.tolist())

    def add_swaps_in(self, pool: str, pairs: Int32Array) -> None:
        """Add moves from host blocks to device blocks, ``[n, 2]``."""
        self._open.swaps_in.setdefault(pool, {}).update((device, host) for host, device in pairs.tolist())

    def is_written(self, pool: str, block_ids: Iterable[int]) -> bool:
        """Tell whether the open plan copies or swaps something into one of these device blocks."""
        copies = self._open.copies.get(pool, {})
        swaps_in = self._open.swaps_in.get(pool, {})
        return bool(copies or swaps_in) and any(block in copies or block in swaps_in for block in block_ids)

    def spread(self, pool: str, on_device: set[int], on_host: set[int]) -> tuple[set[int], set[int]]:
        """Tell where the content of these blocks gets to by the moves of the open plan, in their order."""
        on_host = on_host | _filled_from(self._open.swaps_out.get(pool, {}), on_device)
        on_device = on_device | _filled_from(self._open.swaps_in.get(pool, {}), on_host)
        return on_device | _filled_from(self._open.copies.get(pool, {}), on_device), on_host

    @property
    def has_device_writes(self) -> bool:
        """Whether the open plan writes device blocks at all, before the forward pass."""
        return bool(self._open.copies or self._open.swaps_in)

    def take_moves(self) -> tuple[tuple[BlockMoves, ...], tuple[BlockMoves, ...], tuple[BlockMoves, ...]]:
        """Close the open step: swaps out, swaps in and copies as the plan carries them."""
        moves, self._open = self._open, OpenMoves()
        return _as_moves(moves.swaps_out), _as_moves(moves.swaps_in), _as_moves(moves.copies)

    def close(self, step: InFlightStep) -> None:
        """Note that a plan was handed out."""
        step.duplicates = self.duplicates
        self.duplicates = []
        self.shares_pending = False
        self.in_flight.append(step)

    def take_out(self, row: int) -> None:
        """Note that what steps in flight compute for a row is certain already: aborting them does not concern it."""
        for step in self.in_flight:
            step.serials[step.plan.compute.rows == row] = NO_SEQUENCE

    def lower_ends(self, row: int, length: int) -> None:
        """Note that a row was rolled back: what steps in flight compute beyond ``length`` does not count."""
        for step in self.in_flight:
            step.ends[(step.plan.compute.rows == row) & (step.ends > length)] = length

    def acknowledge(self, step_id: StepId) -> InFlightStep:
        """Take the oldest step in flight, which must be this one.

        Raises:
            StepError: another step is the oldest, or none is in flight.
        """
        if not self.in_flight:
            raise StepError(f"step {step_id} cannot be acknowledged: no step is in flight")
        oldest = self.in_flight[0].plan.step_id
        if oldest != step_id:
            raise StepError(f"step {step_id} cannot be acknowledged before step {oldest}, the oldest in flight")
        return self.in_flight.popleft()

    def abort(self, step_id: StepId) -> list[InFlightStep]:
        """Take a step in flight and all after it, oldest first.

        Raises:
            StepError: the step is not in flight.
        """
        ids = [step.plan.step_id for step in self.in_flight]
        if step_id not in ids:
            raise StepError(f"step {step_id} cannot be aborted: in flight are {ids or 'none'}")
        aborted = [step for step in self.in_flight if step.plan.step_id >= step_id]
        for _ in aborted:
            self.in_flight.pop()
        return aborted


def _filled_from(moves: Moves, sources: set[int]) -> set[int]:
    return {destination for destination, source in moves.items() if source in sources}


def _as_moves(by_pool: dict[str, Moves]) -> tuple[BlockMoves, ...]:
    return tuple(
        BlockMoves(
            pool, read_only(np.array(list(moves.values()), np.int32)), read_only(np.array(list(moves), np.int32))
        )
        for pool, moves in by_pool.items()
        if moves
    )


def read_only(array: Int32Array) -> Int32Array:
    """Make an array that belongs to a plan immutable."""
    array.flags.writeable = False
    return array
