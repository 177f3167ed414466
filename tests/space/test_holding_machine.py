"""Holds against a model: tickets come and go in any order while rows are served, swapped, rolled back and aborted.

The model is a bag of references, those of the rows' tables and those of the tickets, and what each ticket has read.
"""

from collections import Counter

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedkv import Allocation, AllocStatus, RequestKeys, Shortage, StepPlan, Ticket
from pagedkv.blocks.record import NEW, OPEN_STEP, PENDING_STEP, QUEUE
from pagedkv.errors import BlockError, SharedPrefixError
from tests.space.spaces import held, new_space, only_pool, tokens

NOTHING = ""


class Holds(RuleBasedStateMachine):
    """A small pool, four rows, and tickets for whatever blocks are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.space = new_space(num_blocks=13, num_host_blocks=7, max_sequences=4, max_tokens=40)
        self.rows: list[int] = []
        self.swapped: list[int] = []
        self.in_flight: list[StepPlan] = []
        self.tickets: dict[Ticket, dict[int, list[int]]] = {}
        self.moved_into: set[int] = set()  # by copies and swaps of the open step

    @rule(first=st.sampled_from([0, 50]), length=st.integers(1, 18), salt=st.sampled_from([b"", b"x"]))
    def allocate(self, first: int, length: int, salt: bytes) -> None:
        """Admit a prompt, or get a shortage, as ``can_allocate`` has answered."""
        if len(self.rows) + len(self.swapped) == 4:
            return
        status = self.space.can_allocate(tokens(length, first), keys=RequestKeys(salt=salt))
        answer = self.space.allocate(tokens(length, first), keys=RequestKeys(salt=salt))
        assert (status is AllocStatus.OK) == isinstance(answer, Allocation)
        if isinstance(answer, Allocation):
            self.rows.append(answer.row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(0, 6), num_lookahead=st.integers(0, 3))
    def append(self, data: st.DataObject, count: int, num_lookahead: int) -> None:
        """Grow, or get a shortage, as ``can_append`` has answered."""
        row = data.draw(st.sampled_from(self.rows))
        if self.space.num_tokens(row) + count + num_lookahead <= 40:
            fits = self.space.can_append(row, [count], num_lookahead=num_lookahead)
            before = self.space.block_ids(row)
            answer = self.space.append(row, tokens(count, 90), [count], num_lookahead=num_lookahead)
            assert fits == (answer is None)
            after = self.space.block_ids(row)
            self.moved_into |= {new for old, new in zip(before, after, strict=False) if old != new}  # copied on write

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), length=st.integers(1, 20))
    def truncate(self, data: st.DataObject, length: int) -> None:
        """Roll back, but not into blocks that have another reference."""
        row = data.draw(st.sampled_from(self.rows))
        num_tokens = self.space.num_tokens(row)
        if length > num_tokens:
            return
        cut = held(self.space, row)[length // 4 : -(-num_tokens // 4)] if length < num_tokens else []
        references = self._references()
        is_shared = any(references[block] > 1 for block in cut)
        try:
            self.space.truncate(row, [length])
        except SharedPrefixError:
            assert is_shared
        else:
            assert not is_shared

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Share a row."""
        if len(self.rows) + len(self.swapped) < 4:
            self.rows += self.space.fork(data.draw(st.sampled_from(self.rows))).tolist()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Give a row up."""
        row = data.draw(st.sampled_from(self.rows))
        self.rows.remove(row)
        self.space.free(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        """Move a row to the host."""
        row = data.draw(st.sampled_from(self.rows))
        if self.space.can_swap_out(row) is AllocStatus.OK:
            assert not isinstance(self.space.swap_out(row), Shortage)
            self.rows.remove(row)
            self.swapped.append(row)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        """Bring a row back."""
        row = data.draw(st.sampled_from(self.swapped))
        before = {block: only_pool(self.space).block(block) for block in range(1, 13)}
        if not isinstance(self.space.swap_in(row), Shortage):
            self.swapped.remove(row)
            self.rows.append(row)
            for block in self.space.block_ids(row):
                digest = only_pool(self.space).block(block).digest
                if before[block].place == "free" and (digest is None or before[block].digest != digest):
                    self.moved_into.add(block)

    @precondition(lambda self: len(self.in_flight) < 3)
    @rule()
    def plan(self) -> None:
        """Close the open step."""
        self.in_flight.append(self.space.plan_step())
        self.moved_into.clear()

    @precondition(lambda self: self.in_flight)
    @rule()
    def acknowledge(self) -> None:
        """The oldest step has run."""
        self.space.acknowledge(self.in_flight.pop(0).step_id)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """What a ticket that is named has read is void; all others have what they had."""
        place = data.draw(st.integers(0, len(self.in_flight) - 1))
        aborted = self.space.abort(self.in_flight[place].step_id)
        del self.in_flight[place:]
        for ticket in aborted.undefined_tickets:
            self.tickets[ticket] = {block: [] for block in self.tickets[ticket]}
        for row in aborted.lost_rows:
            (self.rows if row in self.rows else self.swapped).remove(row)
            self.space.free(row)

    @rule(is_meant=st.sampled_from([False, False, False, True]))
    def reset(self, *, is_meant: bool) -> None:
        """Drop all names."""
        if is_meant:
            self.space.reset_prefix_cache()

    @rule(data=st.data(), wanted=st.lists(st.integers(1, 12), max_size=3))
    def hold(self, data: st.DataObject, wanted: list[int]) -> None:
        """Hold blocks: refused if one has nothing that is computed, or planned to be."""
        kept = [block for block in range(1, 13) if self._obstacle(block) == NOTHING]
        if kept and not data.draw(st.sampled_from([False, False, False, True]), "any blocks"):
            wanted = data.draw(st.lists(st.sampled_from(kept), min_size=1, max_size=5))
        obstacles = {self._obstacle(block) for block in wanted} - {NOTHING}
        if obstacles:
            with pytest.raises(BlockError, match="|".join(obstacles)):
                self.space.hold(wanted)
        else:
            ticket = self.space.hold(wanted)
            self.tickets[ticket] = {block: self._content(block) for block in wanted}

    def _obstacle(self, block: int) -> str:
        """Text of the error if holding a block is refused; "" if it may be held."""
        pool = only_pool(self.space)
        record, seen = pool.arrays.records[block], pool.block(block)
        if seen.place == "free" and seen.digest is None:
            return "free and has no content"
        if block in self.moved_into:
            return "the open step"
        is_open = record[PENDING_STEP] == pool.arrays.counts[OPEN_STEP] or record[QUEUE] == NEW
        return "in the open step" if is_open else NOTHING

    def _content(self, block: int) -> list[int]:
        """The tokens that rows have in a block, or all of them if it is named."""
        lengths = [
            min(4, self.space.num_tokens(row) - 4 * index)
            for row in self.rows
            for index, entry in enumerate(self.space.block_ids(row))
            if entry == block
        ]
        num_tokens = max(lengths, default=4 if only_pool(self.space).block(block).digest else 0)
        content: list[int] = only_pool(self.space).arrays.tokens[block, : max(0, num_tokens)].tolist()
        return content

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Give any ticket back."""
        ticket = data.draw(st.sampled_from(sorted(self.tickets, key=lambda ticket: ticket.number)))
        del self.tickets[ticket]
        self.space.release(ticket)

    def _references(self) -> Counter[int]:
        references = Counter(block for row in self.rows for block in self.space.block_ids(row))
        references.update(block for contents in self.tickets.values() for block in contents)
        return references

    @invariant()
    def references_are_those_of_rows_and_tickets(self) -> None:
        """Tables and tickets account for every reference, and for every block in use."""
        self.space.check()
        expected = self._references()
        ref_counts = self.space.ref_counts()
        assert {block: int(count) for block, count in enumerate(ref_counts) if count} == expected
        statistics = self.space.statistics().pools[0]
        assert statistics.num_in_use == len(expected)
        assert statistics.num_held == len({block for contents in self.tickets.values() for block in contents})

    @invariant()
    def held_content_stays(self) -> None:
        """What a ticket has read is still there."""
        arrays = only_pool(self.space).arrays
        for contents in self.tickets.values():
            for block, expected in contents.items():
                assert arrays.tokens[block, : len(expected)].tolist() == expected


TestHolds = Holds.TestCase
TestHolds.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
