"""The receipts that a block space must give: every plan's ranges once more, on a list of steps and with plain sums.

Written from decision 17. A *life* is one sequence from its first blocks until it is freed; what is in flight for it
stands in the list of steps until these end, or until it has nothing to do with them any more.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pagedkv import Receipt
from tests.space.replay_model import ReplayedRange
from tests.space.sequence_model import ModelSequence

__all__ = ["ReceiptsModel"]

ZERO = Receipt()


@dataclass(eq=False)
class Life:
    """What one sequence has taken, and what it was given that no step has relied on yet."""

    receipt: Receipt
    num_reached: int = 0
    found: int = 0
    found_whole: int = 0
    shared: int = 0
    returned: int = 0
    returned_in: int = 0


@dataclass(eq=False)
class Work:
    """A range of a step in flight: as planned, and how much of it remains."""

    sequence: ModelSequence
    start: int
    end: int
    num_replayed: int = 0
    remaining_end: int = field(init=False)

    def __post_init__(self) -> None:
        self.remaining_end = self.end


class ReceiptsModel:
    """The expected receipts of all live sequences, and of all that were freed.

    Args:
        pools, hosts: the device pools and the host pools, in the order of the statistics.
    """

    def __init__(self, pools: Iterable[str], hosts: Iterable[str]) -> None:
        """Expect nothing."""
        self.pools, self.hosts = tuple(pools), tuple(hosts)
        self.lives: dict[ModelSequence, Life] = {}
        self.steps: list[list[Work]] = []
        self.num_planned = 0
        self.zero = Receipt(block_steps=(0,) * len(self.pools), host_block_steps=(0,) * len(self.hosts))
        self.freed_sum = self.zero

    def check(self, told: Receipt | None, rows: Mapping[int, Receipt]) -> None:
        """Compare every live sequence's receipt, and the sum of all there ever were with the statistics."""
        expected = {sequence.row: life.receipt for sequence, life in self.lives.items()}
        assert dict(rows) == expected, f"the receipts are {rows}, not {expected}"
        for sequence, life in self.lives.items():
            assert rows[sequence.row].num_reached == life.num_reached, f"row {sequence.row} has not reached that far"
        assert told == sum(rows.values(), self.freed_sum), "the receipts do not add up to the statistics"

    # What happens

    def admitted(self, sequence: ModelSequence, num_hit: int, num_whole: int, earlier: Receipt | None) -> None:
        """A sequence begins; of its hit so many tokens are in whole blocks."""
        reached = earlier.num_reached if earlier else 0
        self.lives[sequence] = Life(self.zero, reached, found=num_hit, found_whole=num_whole)

    def forked(self, parent: ModelSequence, child: ModelSequence) -> None:
        """A sequence begins with tokens of another."""
        num_tokens = len(child.tokens)
        self.lives[child] = Life(self.zero, min(num_tokens, self.lives[parent].num_reached), shared=num_tokens)

    def planned(self, ranges: Iterable[tuple[ModelSequence, int, int]]) -> None:
        """A plan computes some ranges."""
        self.num_planned += 1
        self.steps.append([Work(*each) for each in ranges])

    def replayed(self, ranges: Iterable[ReplayedRange]) -> None:
        """The plan made last computes some ranges again, in windows alone."""
        for computed in ranges:
            work = next(work for work in self.steps[-1] if work.sequence is computed.sequence)
            work.num_replayed = computed.end - min(computed.starts.values())

    def acknowledged(self, tables: Mapping[ModelSequence, Mapping[str, int]]) -> None:
        """The oldest step is over; ``tables``: the number of blocks of each sequence in each pool, by label."""
        step_id = self.num_planned - len(self.steps) + 1
        for work in self.steps.pop(0):
            life = self.lives[work.sequence]
            again = len(set(range(work.start, work.remaining_end)) & set(range(life.num_reached)))
            has_returned = life.returned_in <= step_id
            life.receipt += Receipt(
                num_computed=work.end - work.start,
                num_recomputed=again,
                num_hit=min(life.found, work.start),
                num_hit_inside=len(range(life.found_whole, min(life.found, work.start))),
                num_forked=min(life.shared, work.start),
                num_swapped_in=min(life.returned, work.start) if has_returned else 0,
                num_replayed=work.num_replayed,
            )
            life.num_reached = max(life.num_reached, work.remaining_end)
            life.found = life.found_whole = life.shared = 0
            life.returned = 0 if has_returned else life.returned
        for sequence, held in tables.items():
            on_device = tuple(held.get(pool, 0) for pool in self.pools)
            on_host = tuple(held.get(pool, 0) for pool in self.hosts)
            self.lives[sequence].receipt += Receipt(block_steps=on_device, host_block_steps=on_host)

    def aborted(self, num_steps: int) -> None:
        """The newest steps in flight have failed."""
        for works in self.steps[len(self.steps) - num_steps :]:
            for work in works:
                self.lives[work.sequence].receipt += Receipt(num_aborted=work.end - work.start)
        del self.steps[len(self.steps) - num_steps :]

    def freed(self, sequence: ModelSequence) -> Receipt:
        """A sequence ends; return its last receipt."""
        life = self.lives.pop(sequence)
        receipt = life.receipt + Receipt(num_abandoned=self._take_out(sequence))
        self.freed_sum += receipt
        return receipt

    def declared(self, sequence: ModelSequence, num_declared_so_far: int, sure_from: int) -> None:
        """The caller computed all of a sequence that no step has computed yet, and nothing that is computed.

        The space decides which of several rows is to compute what they share: from ``sure_from`` on it was this row,
        before it may have been another.
        """
        life, num_tokens = self.lives[sequence], len(sequence.tokens)
        in_flight = self._take_out(sequence)
        num_declared = num_declared_so_far - life.receipt.num_declared
        assert num_tokens - sure_from <= num_declared - in_flight <= num_tokens
        life.receipt += Receipt(num_declared=num_declared)
        life.num_reached = max(life.num_reached, num_tokens)

    def _take_out(self, sequence: ModelSequence) -> int:
        """Remove what is in flight for a sequence; return the number of tokens."""
        mine = [work for works in self.steps for work in works if work.sequence is sequence]
        self.steps = [[work for work in works if work.sequence is not sequence] for works in self.steps]
        return sum(work.end - work.start for work in mine)

    def truncated(self, sequence: ModelSequence, length: int) -> None:
        """A sequence is rolled back to fewer tokens."""
        life = self.lives[sequence]
        life.num_reached = min(life.num_reached, length)
        for work in (work for works in self.steps for work in works if work.sequence is sequence):
            work.remaining_end = min(work.remaining_end, length)

    def returned(self, sequence: ModelSequence, num_tokens: int) -> None:
        """A sequence comes back from the host, in the open step, with so many tokens computed."""
        life = self.lives[sequence]
        life.returned, life.returned_in = num_tokens, self.num_planned + 1
