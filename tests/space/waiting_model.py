"""Which blocks wait for a step before they are handed out again: those that it may still touch, and no others."""

from typing import Protocol

from tests.space.memory_model import Move, Place

__all__ = ["Holder", "WaitingModel"]


class Holder(Protocol):
    """Whoever holds blocks: a sequence, or a load."""

    last_step: int
    """The last step that may touch its blocks for its sake."""


class WaitingModel:
    """For each unreferenced block, the step that it waits for.

    A sequence that gives a block up may have it touched by the last step that computes the sequence; a move by the
    plan that it is in. A block waits for the latest of all these, whoever gave it up last. In order, it waits only for
    swaps, and for a copy until the plan is taken that makes it.
    """

    def __init__(self, in_use: dict[str, set[int]], *, in_order: bool) -> None:
        """Expect nothing; ``in_use`` has a key for each pool."""
        self._in_order = in_order
        self._until: dict[str, dict[int, int]] = {label: {} for label in in_use}
        self._held: dict[Holder, set[Place]] = {}
        self._copied: set[Place] = set()

    def follow(self, held: dict[Holder, set[Place]], moves: list[Move], open_step: int) -> None:
        """See what sequences hold after an operation, and what the open plan moves."""
        for sequence, places in self._held.items():
            for place in places - held.get(sequence, set()) if not self._in_order else ():
                self._wait(place, sequence.last_step)
        self._copied.clear()
        for move in moves:
            for place in (move.source, move.target):
                if self._in_order and move.kind == "copy":
                    self._copied.add(place)
                else:
                    self._wait(place, open_step)
        self._held = held

    def cleared(self, places: set[Place], step: int) -> None:
        """A plan names blocks as new, and may have them cleared: they wait for it, whoever gives them up."""
        for place in places if not self._in_order else ():
            self._wait(place, step)

    def handed_out(self, place: Place) -> None:
        """A block begins a new life."""
        label, block = place
        self._until[label].pop(block, None)

    def blocks(self, label: str, num_settled: int) -> set[int]:
        """Unreferenced blocks of a pool that wait for a step, when all steps up to ``num_settled`` are over."""
        in_use = {block for places in self._held.values() for where, block in places if where == label}
        waiting = {block for block, step in self._until[label].items() if step > num_settled}
        return (waiting | {block for where, block in self._copied if where == label}) - in_use

    def _wait(self, place: Place, step: int) -> None:
        label, block = place
        self._until[label][block] = max(step, self._until[label].get(block, 0))
