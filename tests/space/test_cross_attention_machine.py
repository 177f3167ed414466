"""Promise 32 in any order of operations, on a simulated memory.

An entry of a sequence's own is its encoder and its tokens up to there, since a decoder's layers see both; an entry of
an encoder is the encoder and a position. Whatever a row that computes can read is compared with what it should be. How
many blocks encoders take is counted by the families of rows that share them.
"""

from collections.abc import Iterator
from itertools import count
from typing import Final

import numpy as np
import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedkv import (
    Allocation,
    AllocStatus,
    BlockSpace,
    CrossAttention,
    FullAttention,
    GroupSpec,
    MediaSpan,
    RequestKeys,
    Shortage,
    SlidingWindow,
    SpaceConfig,
    StepPlan,
)
from pagedkv.errors import SharedPrefixError, StepError, TruncationError

pytestmark = pytest.mark.interpreted

OWN: Final = FullAttention(4)
CROSS: Final = CrossAttention(10, 4)
MOST_TOKENS: Final = 30
MOST_ROWS: Final = 6
MOST_IN_FLIGHT: Final = 3
ENCODERS: Final = {0: 0, 1: 1, 2: 7, 3: 10}
"""Tokens of each encoder; number 0 stands for none."""
STALE: Final = ("stale",)
Place = tuple[str, int, int]
"""Pool, block, offset."""
Entry = tuple[object, ...]


class Sequence:
    """A row: its encoder, its tokens, those that are certain, and the number of its family."""

    def __init__(self, encoder: int, token_ids: list[int], family: int) -> None:
        self.encoder, self.tokens, self.family = encoder, token_ids, family


class EncoderMachine(RuleBasedStateMachine):
    """A space with a simulated memory, and a count of the families of rows that share an encoder's blocks."""

    groups: tuple[GroupSpec, ...] = (OWN, CROSS)

    @initialize(num_blocks=st.sampled_from((12, 20, 60)), in_order=st.booleans(), caches=st.booleans())
    def build(self, num_blocks: int, *, in_order: bool, caches: bool) -> None:
        """Build a space."""
        pools = dict.fromkeys((group.pool for group in self.groups), num_blocks)
        self.space = BlockSpace(
            SpaceConfig(
                self.groups,
                num_blocks=pools,
                num_host_blocks=dict.fromkeys(pools, 14),
                max_sequences=MOST_ROWS,
                max_tokens=MOST_TOKENS,
                watermark=0.0,
                in_order=in_order,
                prefix_caching=caches,
                receipts=True,
            )
        )
        self.crossing = self.space.config.crossing
        self.own = range(len(self.groups) - len(self.crossing))
        self.memory: dict[Place, Entry] = {}
        self.rows: dict[int, Sequence] = {}
        self.swapped: dict[int, Sequence] = {}
        self.in_flight: list[StepPlan] = []
        self.touched: dict[int, set[Place]] = {}  # what each step in flight wrote
        self.families = count()
        self.writes: dict[tuple[str, int], int] = {}  # block of an encoder -> the step that wrote it
        self.prompts: list[list[int]] = [[]]

    def keys(self, encoder: int) -> RequestKeys:
        """The keys of a sequence; a broken machine has others."""
        return RequestKeys(media=(MediaSpan(0, 1, b"encoder %d" % encoder),))

    def ranges(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """The positions of encoders that the device writes in every group of cross-attention, by row."""
        found = {tuple(zip(*self._in(plan, group), strict=True)) for group in self.crossing}
        assert len(found) == 1, "all groups of cross-attention have the same ranges"
        return list(*found)

    def _in(self, plan: StepPlan, group: int) -> tuple[list[int], list[int], list[int]]:
        ranges = plan.compute_in(group)
        return ranges.rows.tolist(), ranges.starts.tolist(), ranges.ends.tolist()

    # What the device does

    def _places(self, row: int, group: int, num_positions: int) -> Iterator[tuple[int, Place]]:
        """The positions of a row in a group whose blocks it holds, with their places."""
        spec, table = self.groups[group], self.space.block_ids(row, group)
        for position in range(num_positions):
            block = table[position // spec.block_size]
            if block:
                yield position, (spec.pool, block, position % spec.block_size)

    def _write(self, place: Place, entry: Entry) -> None:
        self.memory[place] = entry
        if self.in_flight:
            self.touched.setdefault(self.in_flight[-1].step_id, set()).add(place)

    def _write_own(self, group: int, row: int, start: int, end: int) -> None:
        sequence = self.rows[row]
        for position, place in self._places(row, group, end):
            if position >= start:
                self._write(place, (sequence.encoder, *sequence.tokens[: position + 1]))

    def _write_encoder(self, row: int, end: int) -> None:
        for group in self.crossing:
            for position, place in self._places(row, group, end):
                self._write(place, ("encoder", self.rows[row].encoder, position))

    def _move(self, plan: StepPlan) -> None:
        sizes = {group.pool: max(each.block_size for each in self.groups) for group in self.groups}
        for moves, source, target in (
            (plan.swaps_out, "", "host "),
            (plan.swaps_in, "host ", ""),
            (plan.copies, "", ""),
        ):
            for move in moves:
                for src, dst in zip(move.src_ids.tolist(), move.dst_ids.tolist(), strict=True):
                    self.writes.pop((target + move.pool, dst), None)
                    if (source + move.pool, src) in self.writes:
                        self.writes[target + move.pool, dst] = self.writes[source + move.pool, src]
                    for offset in range(sizes[move.pool]):
                        entry = self.memory.get((source + move.pool, src, offset), STALE)
                        self._write((target + move.pool, dst, offset), entry)
        for new in plan.new_blocks:
            for block in new.block_ids.tolist():
                self.writes.pop((new.pool, block), None)
                for offset in range(sizes[new.pool]):
                    self._write((new.pool, block, offset), STALE)

    @precondition(lambda self: len(self.in_flight) < MOST_IN_FLIGHT)
    @rule()
    def launch(self) -> None:
        """Plan a step; the device carries it out at once."""
        plan = self.space.plan_step()
        assert StepPlan.from_buffer(plan.buffer.tobytes()) == plan
        self.in_flight.append(plan)
        self._move(plan)
        for row, start, end in self.ranges(plan):
            assert end == ENCODERS[self.rows[row].encoder], "kernels read all of the encoder"
            assert start in {0, end}, "written whole or not at all"
            if start < end:
                for group in self.crossing:
                    for block in self.space.block_ids(row, group):
                        earlier = self.writes.setdefault((self.groups[group].pool, block), plan.step_id)
                        assert earlier == plan.step_id, f"row {row}: its encoder is written twice"
                self._write_encoder(row, end)
        for group in self.own:
            for row, start, end in zip(*self._in(plan, group), strict=True):
                self._write_own(group, row, start, end)
        for row, end in zip(plan.compute.rows.tolist(), plan.compute.ends.tolist(), strict=True):
            self._verify(row, end)

    def _verify(self, row: int, end: int) -> None:
        """Whatever a row reads is its own."""
        sequence = self.rows[row]
        for group in range(len(self.groups)):
            is_cross = group in self.crossing
            for position, place in self._places(row, group, ENCODERS[sequence.encoder] if is_cross else end):
                own: Entry = (sequence.encoder, *sequence.tokens[: position + 1])
                expected = ("encoder", sequence.encoder, position) if is_cross else own
                assert self.memory.get(place, STALE) == expected, f"row {row}, group {group}, position {position}"

    @precondition(lambda self: self.in_flight)
    @rule()
    def settle(self) -> None:
        """Acknowledge the oldest step."""
        plan = self.in_flight.pop(0)
        self.touched.pop(plan.step_id, None)
        self.space.acknowledge(plan.step_id)

    @rule()
    def step(self) -> None:
        """Run everything."""
        if len(self.in_flight) < MOST_IN_FLIGHT:
            self.launch()
        while self.in_flight:
            self.settle()

    @precondition(lambda self: self.in_flight)
    @rule(place=st.integers(0, 2))
    def fail(self, place: int) -> None:
        """Steps fail: whatever they wrote is undefined, and rows that are lost are freed."""
        failed = self.in_flight[place % len(self.in_flight) :]
        del self.in_flight[-len(failed) :]
        for plan in failed:
            for where in self.touched.pop(plan.step_id, ()):
                self.memory[where] = STALE
                self.writes.pop(where[:2], None)
        aborted = self.space.abort(failed[0].step_id)
        for lost in aborted.lost_rows:
            self.space.free([lost])
            self.rows.pop(lost, None)
            self.swapped.pop(lost, None)

    # What the scheduler does

    @rule(
        origin=st.integers(0, 30),
        cut=st.integers(0, 20),
        new=st.lists(st.integers(0, 1), max_size=9),
        encoder=st.sampled_from(list(ENCODERS)),
    )
    def admit(self, origin: int, cut: int, new: list[int], encoder: int) -> None:
        """Admit the beginning of a prompt seen before and new tokens, with an encoder, if both fit."""
        prompt = [*self.prompts[origin % len(self.prompts)][:cut], *new][: MOST_TOKENS - 8] or [0]
        if len(self.rows) + len(self.swapped) == MOST_ROWS:
            return
        keys, length = self.keys(encoder), ENCODERS[encoder]
        status = self.space.can_allocate(prompt, keys=keys, num_encoder_tokens=length)
        answer = self.space.allocate(prompt, keys=keys, num_encoder_tokens=length)
        assert isinstance(answer, Allocation) == (status is AllocStatus.OK)
        self.prompts.append(prompt)
        if isinstance(answer, Allocation):
            self._begin(answer.row, encoder, prompt)

    def _begin(self, row: int, encoder: int, prompt: list[int]) -> None:
        """Note a new family, whose blocks nobody has written, though they may move before they are in a plan."""
        self.rows[row] = Sequence(encoder, prompt, next(self.families))
        for group in self.crossing:
            for block in self.space.block_ids(row, group):
                self.writes.pop((self.groups[group].pool, block), None)

    def _row(self, place: int) -> int:
        return list(self.rows)[place % len(self.rows)]

    @precondition(lambda self: self.rows and len(self.rows) + len(self.swapped) < MOST_ROWS)
    @rule(place=st.integers(0, 5), num_children=st.integers(1, 2), back=st.integers(0, 5))
    def fork(self, place: int, num_children: int, back: int) -> None:
        """Fork a row at its end, or some tokens before."""
        row = self._row(place)
        sequence = self.rows[row]
        num_children = min(num_children, MOST_ROWS - len(self.rows) - len(self.swapped))
        length = max(1, len(sequence.tokens) - back)
        children = self.space.fork(row, num_children, at=length)
        for child in children.tolist() if isinstance(children, np.ndarray) else ():
            self.rows[child] = Sequence(sequence.encoder, sequence.tokens[:length], sequence.family)

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 5), new=st.lists(st.integers(0, 1), min_size=1, max_size=6), num_draft=st.integers(0, 2))
    def append(self, place: int, new: list[int], num_draft: int) -> None:
        """Append tokens, the last ones perhaps drafts."""
        row = self._row(place)
        sequence = self.rows[row]
        if len(sequence.tokens) + len(new) > MOST_TOKENS:
            return
        if self.space.append([row], new, counts=[len(new)], num_draft=min(num_draft, len(new))) is None:
            sequence.tokens = sequence.tokens + new
            self.prompts.append(sequence.tokens)

    @precondition(lambda self: self.rows)
    @rule(token=st.integers(0, 1))
    def decode(self, token: int) -> None:
        """Append a token to each row."""
        for place in range(len(self.rows)):
            self.append(place, [token], 0)

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 5), back=st.integers(0, 6))
    def truncate(self, place: int, back: int) -> None:
        """Roll a row back, unless it is refused."""
        row = self._row(place)
        sequence = self.rows[row]
        length = max(1, len(sequence.tokens) - back)
        try:
            self.space.truncate([row], [length])
        except (SharedPrefixError, TruncationError):
            return
        sequence.tokens = sequence.tokens[:length]

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 5))
    def end(self, place: int) -> None:
        """Free a row."""
        row = self._row(place)
        self.space.free([row])
        del self.rows[row]

    @precondition(lambda self: self.rows)
    @rule(place=st.integers(0, 5))
    def recompute(self, place: int) -> None:
        """Preempt a row: free it, and admit it again at once, if it fits."""
        row = self._row(place)
        sequence = self.rows.pop(row)
        (receipt,) = self.space.free([row])
        encoder = sequence.encoder
        answer = self.space.allocate(
            sequence.tokens, keys=self.keys(encoder), num_encoder_tokens=ENCODERS[encoder], continues=receipt
        )
        if isinstance(answer, Allocation):
            self._begin(answer.row, encoder, sequence.tokens)

    @precondition(lambda self: self.rows)
    @rule(places=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def declare(self, places: list[int]) -> None:
        """Bring the content of some rows from elsewhere, once all that is planned has run."""
        self.step()
        batch = list(dict.fromkeys(self._row(place) for place in places))
        try:
            self.space.mark_computed(batch)
        except StepError:
            return
        for row in batch:
            for group in self.own:
                self._write_own(group, row, 0, len(self.rows[row].tokens))
            self._write_encoder(row, ENCODERS[self.rows[row].encoder])

    @rule(number=st.integers(1, 5))
    def evict(self, number: int) -> None:
        """Evict cached blocks."""
        for pool in self.space.config.pool_names:
            self.space.evict(number, pool=pool)

    def _regroup(self, batch: list[Sequence]) -> None:
        """Rows that move together stay families among themselves."""
        numbers: dict[int, int] = {}
        for sequence in batch:
            sequence.family = numbers.setdefault(sequence.family, next(self.families))

    @precondition(lambda self: self.rows)
    @rule(places=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def swap_out(self, places: list[int]) -> None:
        """Move rows to the host."""
        batch = list(dict.fromkeys(self._row(place) for place in places))
        if self.space.can_swap_out(batch) is AllocStatus.OK:
            assert not isinstance(self.space.swap_out(batch), Shortage)
            self.swapped |= {row: self.rows.pop(row) for row in batch}
            self._regroup([self.swapped[row] for row in batch])

    @precondition(lambda self: self.swapped)
    @rule(places=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def swap_in(self, places: list[int]) -> None:
        """Move them back."""
        batch = list(dict.fromkeys(list(self.swapped)[place % len(self.swapped)] for place in places))
        if self.space.can_swap_in(batch) is AllocStatus.OK:
            assert not isinstance(self.space.swap_in(batch), Shortage)
            self.rows |= {row: self.swapped.pop(row) for row in batch}
            self._regroup([self.rows[row] for row in batch])

    def num_encoder_blocks(self, rows: dict[int, Sequence], group: int) -> int:
        """The blocks that families take, each once."""
        families = {sequence.family: ENCODERS[sequence.encoder] for sequence in rows.values()}
        return sum(-(-length // self.groups[group].block_size) for length in families.values())

    @invariant()
    def holds(self) -> None:
        """Every invariant of the space holds, and encoders take the blocks of their families."""
        if not hasattr(self, "space"):
            return
        self.space.check()
        for group in self.crossing:
            for rows in (self.rows, self.swapped):
                blocks = {block for row in rows for block in self.space.block_ids(row, group)}
                assert len(blocks) == self.num_encoder_blocks(rows, group), f"group {group}"


MIXES: Final[tuple[tuple[GroupSpec, ...], ...]] = (
    (OWN, CROSS),
    (SlidingWindow(6, 2), OWN, CrossAttention(10, 3, pool="cross")),
    (OWN, FullAttention(2, prefix_caching=False), CROSS, CrossAttention(12, 5, pool="cross")),
)


def machine_of(base: type[EncoderMachine], groups: tuple[GroupSpec, ...]) -> type[EncoderMachine]:
    """Make the class of machines of some groups, as Hypothesis wants it: without arguments."""
    return type("Machine", (base,), {"groups": groups})


@pytest.mark.parametrize("groups", MIXES, ids=str)
def test_promise_32_whatever_happens_every_row_reads_its_own_encoder_whole(groups: tuple[GroupSpec, ...]) -> None:
    machine = machine_of(EncoderMachine, groups)
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))


# Broken machines


class SilentKeys(EncoderMachine):
    """Keys do not say which encoder's: all sequences begin with the same medium."""

    def keys(self, encoder: int) -> RequestKeys:
        """Say nothing of the encoder."""
        del encoder
        return RequestKeys(media=(MediaSpan(0, 1, b"all"),))


class OnlyFirstLives(EncoderMachine):
    """The device writes an encoder in the step after its row was admitted, and never for a row that inherits that."""

    def ranges(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """Leave out what rows inherit."""
        admitted = {row for row, sequence in self.rows.items() if not hasattr(sequence, "was_seen")}
        for sequence in self.rows.values():
            sequence.was_seen = True  # type: ignore[attr-defined]
        return [(row, start if row in admitted else end, end) for row, start, end in super().ranges(plan)]

    def fork(self, place: int, num_children: int, back: int) -> None:
        """Note which rows are forks."""
        before = set(self.rows)
        super().fork(place, num_children, back)
        for row in set(self.rows) - before:
            self.rows[row].was_seen = True  # type: ignore[attr-defined]


class CountsEachRow(EncoderMachine):
    """Each row is expected to have blocks of its own."""

    def num_encoder_blocks(self, rows: dict[int, Sequence], group: int) -> int:
        """Count as if nothing were shared."""
        size = self.groups[group].block_size
        return sum(-(-ENCODERS[sequence.encoder] // size) for sequence in rows.values())


class CutsShort(EncoderMachine):
    """The device writes all positions of an encoder but the last."""

    def _write_encoder(self, row: int, end: int) -> None:
        super()._write_encoder(row, end - 1)


SEARCH: Final = settings(max_examples=500, deadline=None, database=None, phases=[Phase.generate])


@pytest.mark.plain_only
@pytest.mark.parametrize("broken", [SilentKeys, OnlyFirstLives, CountsEachRow, CutsShort])
def test_promise_32_broken_machines_are_found_out(broken: type[EncoderMachine]) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine_of(broken, (OWN, CROSS)), settings=SEARCH)
