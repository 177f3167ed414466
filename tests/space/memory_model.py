"""A simulated device, which carries out plans, and whose memory has in every slot what was written there last.

The content of a slot is ``(group, number of the prefix that ends there)``, so reading a sequence back
through its table shows at once whose keys and values would be attended to. Plans are carried out in the
order that :mod:`pagedkv.contract.plan` documents, and everything documented there is asserted on the way.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from pagedkv.contract.plan import BlockMoves, StepPlan, TableWrites
from tests.space.epoch_labels import EpochLabels
from tests.space.replay_model import ReplayedRange, require_exact
from tests.space.sequence_model import GroupRule, ModelSequence

__all__ = ["UNDEFINED", "Device", "Move", "Place", "Step", "View", "host", "moves_of", "nonempty"]

Content: TypeAlias = tuple[int, int]
Place: TypeAlias = tuple[str, int]
"""A block: label of its pool, and its id."""

UNDEFINED: Final[Content] = (-1, -1)
NUM_PARTS: Final = 5


def host(pool: str) -> str:
    """Label of the host pool that belongs to a device pool."""
    return f"{pool} (host)"


class Move(NamedTuple):
    """A copy or a swap of one block.

    Args:
        kind: "copy", "swap out" or "swap in".
    """

    kind: str
    source: Place
    target: Place


@dataclass(frozen=True, slots=True)
class View:
    """A running sequence as it was when a plan was made: what the device is to see.

    Args:
        sequence: the sequence, which may have moved on since.
        era: its era then.
        prefixes: its prefixes then.
        tables: its block ids then, one list a group.
        accepted: its accepted tokens then; slots: the blocks of its draft states, one list a group.
    """

    sequence: ModelSequence
    era: int
    prefixes: list[int]
    tables: list[list[int]]
    accepted: int = sys.maxsize
    slots: list[list[int]] = field(default_factory=list)

    def number(self, group: GroupRule, position: int) -> int:
        """What stands for a position in a group."""
        return self.sequence.number(group, position, self.prefixes[position])

    def exact(self, group: GroupRule, positions: Iterable[int]) -> list[int]:
        """Those of some positions that are to hold their prefix."""
        return [position for position in positions if not self.sequence.is_inexact(group, position)]

    def block_of(self, group: GroupRule, position: int) -> int:
        """The block of a position: of an open one's state, that of its slot."""
        if group.num_draft_states and position >= self.accepted:
            return self.slots[group.index][position % group.num_draft_states]
        return self.tables[group.index][group.slot(position)[0]]


@dataclass(frozen=True, slots=True)
class Step:
    """A plan in flight.

    Args:
        views: every running sequence, by row.
        ranges: ``(row, start, end)`` that the plan computes.
        outside: the same for each group that has starts of its own.
        touched: blocks that the device may read or write for it.
        epoch: of the weights that were in force when it was planned; 0 where epochs are not counted.
    """

    plan: StepPlan
    views: dict[int, View]
    ranges: list[tuple[int, int, int]]
    outside: dict[int, list[tuple[int, int, int]]]
    touched: frozenset[Place]
    epoch: int = 0

    def ranges_in(self, group: GroupRule) -> list[tuple[int, int, int]]:
        """``(row, start, end)`` that the plan computes in a group."""
        return self.outside.get(group.index, self.ranges)

    def read_in(self, group: GroupRule, row: int, start: int, end: int) -> list[int]:
        """Positions that a row reads in a group; of windows that are computed again, from where that is exact."""
        sequence, positions = self.views[row].sequence, group.read(start, end)
        replay = sequence.replay if group.replays else None
        if replay is not None and start < replay.inexact[group.index].stop:
            first = replay.inexact[group.index].stop
            return [position for position in positions if position >= first or position < group.num_sink_tokens]
        return positions

    def masked_in(self, group: GroupRule, row: int, start: int) -> list[int]:
        """Positions in the windows of a row that are gone: a replay goes without."""
        replay = self.views[row].sequence.replay if group.replays else None
        if replay is None or start >= replay.inexact[group.index].stop:
            return []
        table = self.views[row].tables[group.index]
        return [position for position in group.kept(start) if not table[group.slot(position)[0]]]

    def replays(self, groups: list[GroupRule]) -> list[ReplayedRange]:
        """What is computed again, in windows alone."""
        windows = [group.index for group in groups if group.replays]
        found = []
        for place, (row, start, _) in enumerate(self.ranges if windows else []):
            starts = {index: self.outside[index][place][1] for index in windows}
            if min(starts.values()) < start:
                found.append(ReplayedRange(self.views[row].sequence, self.views[row].tables, starts, start))
        return found

    def first_open(self, row: int) -> int:
        """Return the position from which a row's states are in slots, by the plan; if none, the largest number."""
        states = self.plan.draft_states
        if states is None:
            return sys.maxsize
        return int(states.firsts[self.plan.compute.rows.tolist().index(row)])

    @property
    def moves(self) -> list[Move]:
        """What the plan copies and swaps."""
        return moves_of(self.plan)

    @property
    def swapped(self) -> set[Place]:
        """Blocks that the plan swaps, on either side."""
        return {place for move in self.moves if move.kind != "copy" for place in (move.source, move.target)}


def nonempty(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Those of some ranges that have any position."""
    return [(row, start, end) for row, start, end in ranges if start < end]


def pairs(moves: BlockMoves) -> list[tuple[int, int]]:
    """``(source, destination)`` of each move."""
    return list(zip(moves.src_ids.tolist(), moves.dst_ids.tolist(), strict=True))


def moves_of(plan: StepPlan) -> list[Move]:
    """What a plan swaps out, swaps in and copies, in this order."""
    return [
        Move(kind, (here(moves.pool), source), (there(moves.pool), target))
        for kind, parts, here, there in (
            ("swap out", plan.swaps_out, str, host),
            ("swap in", plan.swaps_in, host, str),
            ("copy", plan.copies, str, str),
        )
        for moves in parts
        for source, target in pairs(moves)
    ]


def sources(moves: Iterable[BlockMoves]) -> list[Place]:
    """Blocks that moves read, as if all were device blocks."""
    return [(move.pool, block) for move in moves for block in move.src_ids.tolist()]


def destinations(moves: Iterable[BlockMoves]) -> list[Place]:
    """Blocks that moves write, as if all were device blocks."""
    return [(move.pool, block) for move in moves for block in move.dst_ids.tolist()]


class Device:
    """Memory, the device's own copy of the block tables, and the five parts of a step.

    Attributes:
        memory: content of every block of every pool, by label and id.
        tables: block ids by group, row and logical block, from table writes; after the groups those of slots.
        slots_of: which of the tables has the slots of a group that keeps draft states.
        coming: content that the caller brings after a step: the step, and what :meth:`put` is to write then.
        labels: which weights wrote what is there.
        max_epoch_lag: how far back the weights may lie that a hit rests on.
    """

    def __init__(self, groups: list[GroupRule], num_blocks: dict[str, int]) -> None:
        """Make undefined memory; ``num_blocks`` has the device pools and, by label, the host pools."""
        self.groups = groups
        self.labels = EpochLabels(groups)
        self.max_epoch_lag = 0
        self.memory: dict[str, list[list[Content]]] = {}
        for label, count in num_blocks.items():
            slots = max(group.slots_per_block for group in groups if label in {group.pool, host(group.pool)})
            self.memory[label] = [[UNDEFINED] * slots for _ in range(count)]
        drafting = [group.index for group in groups if group.num_draft_states]
        self.slots_of = {index: number for number, index in enumerate(drafting, len(groups))}
        self.tables: list[dict[int, dict[int, int]]] = [{} for _ in range(len(groups) + len(drafting))]
        self.coming: list[tuple[int, GroupRule, list[int], list[int], list[int]]] = []

    def forget(self, place: Place) -> None:
        """Make a block's content undefined."""
        label, block = place
        self.memory[label][block] = [UNDEFINED] * len(self.memory[label][block])

    def content(self, group: GroupRule, block: int, position: int) -> Content:
        """The content of a device block at a position, once all that the caller brings is there."""
        offset = group.slot(position)[1]
        for _, other, table, prefixes, positions in reversed(self.coming):
            for brought in positions if other.pool == group.pool else ():
                index, slot = other.slot(brought)
                if (table[index], slot) == (block, offset):
                    return other.index, prefixes[brought]
        return self.memory[group.pool][block][offset]

    def put(self, group: GroupRule, table: list[int], prefixes: list[int], positions: Iterable[int]) -> None:
        """Write positions of a sequence through a table."""
        for position in positions:
            index, offset = group.slot(position)
            self.memory[group.pool][table[index]][offset] = (group.index, prefixes[position])

    def bring(
        self, step_id: int, group: GroupRule, table: list[int], prefixes: list[int], positions: list[int]
    ) -> None:
        """Write positions of a sequence behind a step, at :meth:`arrive`."""
        self.coming.append((step_id, group, list(table), list(prefixes), positions))

    def arrive(self, first_step_id: int) -> None:
        """Write everything that comes after steps before this one."""
        while self.coming and self.coming[0][0] < first_step_id:
            self.put(*self.coming.pop(0)[1:])
        self.labels.arrive(first_step_id)

    def expect(self, group: GroupRule, table: list[int], prefixes: list[int], positions: Iterable[int]) -> None:
        """Assert that a sequence's own tokens are there, or on their way."""
        for position in positions:
            index, _ = group.slot(position)
            assert self.content(group, table[index], position) == (group.index, prefixes[position]), (
                f"group {group.index}: position {position} in block {table[index]} is not the prefix "
                f"{prefixes[position]}"
            )

    def require(self, group: GroupRule, table: list[int], prefixes: list[int], positions: Iterable[int]) -> None:
        """Assert that reading positions through a table gives exactly a sequence's own tokens."""
        blocks = self.memory[group.pool]
        for position in positions:
            index, offset = group.slot(position)
            found = blocks[table[index]][offset]
            assert found == (group.index, prefixes[position]), (
                f"group {group.index}: position {position} in block {table[index]} holds {found}, "
                f"not the prefix {prefixes[position]}"
            )

    # Carrying a plan out

    def run(self, step: Step) -> None:
        """Carry a plan out, part by part, and check all that its forward pass reads."""
        self._require_order_free(step.plan)
        self._swap_out(step, garbage=False)
        self._swap_in(step, garbage=False)
        self._copy(step, garbage=False)
        self._write_tables(step.plan.table_writes)
        self._require_tables(step)
        self._label(step)
        for replayed in step.replays(self.groups):
            require_exact(self.groups, replayed)
        for group in self.groups:
            if group.is_state:
                self._require_one_owner(group, step)
                self._read(group, step)
                self._write(group, step, garbage=False)
            else:
                self._write(group, step, garbage=False)
                self._read(group, step)

    def fail(self, step: Step, num_parts: int, *, garbage: bool) -> None:
        """Carry out only the first parts of a plan; with ``garbage`` what they write is undefined."""
        if num_parts > 0:
            self._swap_out(step, garbage=garbage)
        if num_parts > 1:
            self._swap_in(step, garbage=garbage)
        if num_parts > 2:
            self._copy(step, garbage=garbage)
        if num_parts > 3:
            self._write_tables(step.plan.table_writes)
        if num_parts >= NUM_PARTS:
            self._label(step)
            for group in self.groups:
                self._write(group, step, garbage=garbage)

    @staticmethod
    def _require_order_free(plan: StepPlan) -> None:
        """Each part can be one parallel kernel, and swaps out read what nothing else in the plan moves into."""
        for part in (plan.swaps_out, plan.swaps_in, plan.copies):
            assert len(set(destinations(part))) == len(destinations(part)), "a destination appears twice"
        assert not set(sources(plan.copies)) & set(destinations(plan.copies)), "a block is source and destination"
        moved_into = {*destinations(plan.swaps_in), *destinations(plan.copies)}
        assert not set(sources(plan.swaps_out)) & moved_into, "a block swapped out is rewritten by its own plan"
        assert len(set(moved_into)) == len(destinations(plan.swaps_in)) + len(destinations(plan.copies))

    def _swap_out(self, step: Step, *, garbage: bool) -> None:
        for moves in step.plan.swaps_out:
            self._move(moves.pool, host(moves.pool), moves, garbage=garbage)

    def _swap_in(self, step: Step, *, garbage: bool) -> None:
        for moves in step.plan.swaps_in:
            self._move(host(moves.pool), moves.pool, moves, garbage=garbage)

    def _copy(self, step: Step, *, garbage: bool) -> None:
        for moves in step.plan.copies:
            self._move(moves.pool, moves.pool, moves, garbage=garbage)

    def _move(self, source: str, destination: str, moves: BlockMoves, *, garbage: bool) -> None:
        """Read all sources, then write all destinations."""
        self.labels.move(((source, here), (destination, there)) for here, there in pairs(moves))
        contents = [list(self.memory[source][block]) for block, _ in pairs(moves)]
        for (_, block), content in zip(pairs(moves), contents, strict=True):
            self.memory[destination][block] = [UNDEFINED] * len(content) if garbage else content

    def _write_tables(self, table_writes: tuple[TableWrites, ...]) -> None:
        for writes in table_writes:
            ids = iter(writes.block_ids.tolist())
            runs = zip(writes.rows.tolist(), writes.starts.tolist(), writes.counts.tolist(), strict=True)
            for row, start, count in runs:
                entries = self.tables[writes.group].setdefault(row, {})
                for index in range(start, start + count):
                    entries[index] = next(ids)
            assert next(ids, None) is None, "table writes bring more block ids than their runs take"

    def _require_tables(self, step: Step) -> None:
        """The device's tables agree with the space's wherever the forward pass looks."""
        for group in self.groups:
            for row, start, end in nonempty(step.ranges_in(group)):
                entries = self.tables[group.index].get(row, {})
                table = step.views[row].tables[group.index]
                read, written = self._in_table(group, step, row, start, end)
                for index in group.indices(step.masked_in(group, row, start)):
                    assert entries.get(index) == 0, f"group {group.index}, row {row}: the device cannot mask {index}"
                for index in group.indices([*read, *written]):
                    assert table[index], f"group {group.index}, row {row}: block {index} is read but gone"
                    assert entries.get(index) == table[index], (
                        f"group {group.index}, row {row}: the device has {entries.get(index)} as block {index}, "
                        f"the space {table[index]}"
                    )

    def _label(self, step: Step) -> None:
        """Label what the forward pass computes."""
        own = {group.index: {row: start for row, start, _ in step.ranges_in(group)} for group in self.groups}
        ranges = [
            (step.views[row].tables, [own[group.index][row] for group in self.groups], start, end)
            for row, start, end in step.ranges
        ]
        self.labels.compute(ranges, step.epoch)

    def _write(self, group: GroupRule, step: Step, *, garbage: bool) -> None:
        """Write what the forward pass computes.

        Two rows may write one slot of a block that they share only if they write the same keys and values, as happens
        when both have to compute these tokens for the sake of another block. No two rows advance one state. If a row
        was declared computed since, a step that fails does not change its content.
        """
        written: dict[tuple[int, int], int] = {}
        blocks = self.memory[group.pool]
        for row, start, end in nonempty(step.ranges_in(group)):
            view = step.views[row]
            if garbage and step.plan.step_id in view.sequence.marked_steps:
                continue
            for position, slot in self._slots_written(group, step, row, start, end):
                offset = slot[1]
                number = view.number(group, position)
                if slot in written:
                    assert not group.is_state, f"two rows advance the state in block {slot[0]}"
                    assert written[slot] == number, f"two rows write different tokens to slot {slot}"
                written[slot] = number
                blocks[slot[0]][offset] = UNDEFINED if garbage else (group.index, number)

    def _read(self, group: GroupRule, step: Step) -> None:
        """Every position that the rule lets this step's queries see holds the row's own prefix."""
        for row, start, end in nonempty(step.ranges_in(group)):
            view = step.views[row]
            read, _ = self._in_table(group, step, row, start, end)
            exact = view.exact(group, read)
            self.require(group, view.tables[group.index], view.prefixes, exact)
            self._require_fresh_hit(group, view, exact)
            for position in set(step.read_in(group, row, start, end)).difference(read):
                block = self._block_of_slot(group, row, position)
                found = self.memory[group.pool][block][0]
                assert found == (group.index, view.prefixes[position]), (
                    f"group {group.index}: the state of position {position} of row {row} is not in block {block}"
                )

    def _in_table(self, group: GroupRule, step: Step, row: int, start: int, end: int) -> tuple[list[int], list[int]]:
        """Positions that a step reads, and writes, by a group's first table."""
        if not group.num_draft_states:
            return step.read_in(group, row, start, end), group.written(start, end)
        first = step.first_open(row)
        read = [position for position in group.read(start, end) if position < first]
        return read, group.written_by(start, end, first)[0]

    def _block_of_slot(self, group: GroupRule, row: int, position: int) -> int:
        return self.tables[self.slots_of[group.index]][row][position % group.num_draft_states]

    def _slots_written(
        self, group: GroupRule, step: Step, row: int, start: int, end: int
    ) -> list[tuple[int, tuple[int, int]]]:
        """Positions that a step writes, each with its block and the offset there."""
        table = step.views[row].tables[group.index]
        _, in_table = self._in_table(group, step, row, start, end)
        places = [(position, group.slot(position)) for position in in_table]
        slots = [(position, (table[index], offset)) for position, (index, offset) in places]
        if group.num_draft_states:
            _, open_ones = group.written_by(start, end, step.first_open(row))
            slots += [(position, (self._block_of_slot(group, row, position), 0)) for position in open_ones]
        return slots

    def _require_fresh_hit(self, group: GroupRule, view: View, positions: list[int]) -> None:
        """What was hit rests on no weights that were too far back when the sequence began."""
        bound = view.sequence.first_epoch - self.max_epoch_lag
        for position in positions if not group.stays_out else ():
            if position < view.sequence.num_hit:
                oldest, _ = self.labels.of(group, view.tables[group.index], position)
                assert oldest >= bound, f"group {group.index}: epoch {oldest} at {position} was hit, beyond {bound}"
                view.sequence.oldest_hit = min(view.sequence.oldest_hit, oldest)

    def _require_one_owner(self, group: GroupRule, step: Step) -> None:
        """No row reads a state block that another row of the step writes."""
        writers: dict[int, int] = {}
        for row, start, end in nonempty(step.ranges_in(group)):
            for _, (block, _) in self._slots_written(group, step, row, start, end):
                assert writers.setdefault(block, row) == row, f"state block {block}: two rows write it"
        for row, start, end in nonempty(step.ranges_in(group)):
            for index in group.indices(self._in_table(group, step, row, start, end)[0]):
                block = step.views[row].tables[group.index][index]
                assert writers.get(block, row) == row, f"state block {block}: row {row} reads what another row writes"
