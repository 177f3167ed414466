"""A state machine of overlapped steps: planned before the last ones were sampled, with drafts accepted and refused.

Written from promise 20 alone, beside the model of everything else. The device of :mod:`tests.space.memory_model` runs
each plan late, when the samples of the steps before are there: it moves ranges and slots down by what was refused,
computes guesses at unknown tokens, and samples. The host fills the tokens in, perhaps much later. What any row reads
must be its own tokens, whatever was accepted, rolled back, or lost with a failed step.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv import Allocation, BlockSpace, PrefixGone, PrefixHit, Shortage, StepPlan
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import SequenceError, SharedPrefixError, TokenError, TruncationError
from pagedkv.space.rows import NUM_ACCEPTED
from tests.space.memory_model import Device, Step, View, host
from tests.space.mixes import Mix
from tests.space.replay_model import MOST_REPLAYED, evict_windows, with_replay
from tests.space.sequence_model import GroupRule, ModelSequence, Prefixes, Replayed

__all__ = ["OverlapMachine", "WithoutWindows", "overlap_machine_of"]

MOST_IN_FLIGHT: Final = 4
PLACE: Final = st.integers(0, 5)
TOKEN: Final = st.integers(0, 1)


@dataclass(eq=False)
class Stretch:
    """What one planned step computes of a row, in positions as they are now.

    Args:
        step_id: the step; start, end: its range, moved down by what was refused since.
        sample: the tokens that follow what it found accepted: those of its guesses that it accepts, and one more; None
            until it has run.
    """

    step_id: int
    start: int
    end: int
    sample: list[int] | None = None


class Replay(NamedTuple):
    """What a replay leaves: which positions hold something else, and from which one on it is approximate."""

    left: Replayed | None
    approximate_from: int


NO_REPLAY: Final = Replay(None, sys.maxsize)


@dataclass(eq=False)
class Row:
    """A sequence: its tokens on the host, None where they are unknown there."""

    number: int
    tokens: list[int | None]
    num_certain: int
    replay: Replay = NO_REPLAY
    is_overlapped: bool = False
    num_computed: int = 0
    num_aborted: int = 0
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        """Leading tokens that are no guesses."""
        return [token for token in self.tokens[: self.num_certain] if token is not None]

    @property
    def has_unknown(self) -> bool:
        """Whether tokens wait for a sample."""
        return self.num_certain < len(self.tokens) and self.is_overlapped

    def sampler(self) -> Stretch | None:
        """The step that samples the first unknown token, if it is planned."""
        return next((stretch for stretch in self.stretches if stretch.end >= self.num_certain), None)


@dataclass(eq=False)
class Seen:
    """A row as it was when a plan was made.

    Args:
        waiting: the steps before whose samples were not filled in then; lengths: how many tokens each may sample.
        mine: what the plan itself computes; start, end: as planned; outside: starts by group outside prefix caching.
    """

    row: Row
    known: list[int]
    drafts: list[int]
    waiting: list[Stretch]
    lengths: list[int]
    mine: Stretch
    start: int
    end: int
    outside: dict[int, int]
    tables: list[list[int]]


@dataclass(eq=False)
class Planned:
    """A plan in flight, and the rows that it computes."""

    plan: StepPlan
    rows: list[Seen]
    has_run: bool = False


class OverlapMachine(RuleBasedStateMachine):
    """Draws overlapped steps."""

    def __init__(self, mix: Mix, seen: Counter[str]) -> None:
        """Prepare; the space is built by the first rule."""
        super().__init__()
        self.mix = mix
        self.seen = seen
        self.num_replays = 0
        self.rows: list[Row] = []
        self.planned: list[Planned] = []

    @initialize(size=st.integers(0, 5))
    def build(self, size: int) -> None:
        """Build a space where little is short."""
        self.config = self.mix.roomy.config(size)
        self.space = BlockSpace(self.config)
        caching, longest = self.config.prefix_caching, self.config.max_tokens
        self.groups = [
            GroupRule(index, spec, caching=caching, max_tokens=longest) for index, spec in enumerate(self.config.groups)
        ]
        host_blocks = {host(pool): count for pool, count in self.config.host_blocks_by_pool().items() if count}
        self.device = Device(self.groups, self.config.blocks_by_pool() | host_blocks)
        self.prefixes = Prefixes()
        self.root = self.prefixes.root(NO_KEYS, 0)

    @invariant()
    def check(self) -> None:
        """The space is sound, and as long as the host thinks."""
        self.space.check()
        for row in self.rows:
            assert self.space.num_tokens(row.number) == len(row.tokens)
            if self.config.receipts:
                self._check_receipt(row)
        self.seen["steps"] += 1

    def _check_receipt(self, row: Row) -> None:
        """What was planned counts whole, whatever was refused of it; what comes in its place is not computed again."""
        receipt = self.space.receipt(row.number)
        assert (receipt.num_computed, receipt.num_aborted) == (row.num_computed, row.num_aborted)
        assert receipt.num_recomputed == 0

    def teardown(self) -> None:
        """Everything ends, everything is given back."""
        if not hasattr(self, "space") or sys.exception() is not None:
            return
        self.plan()
        while self.planned:
            self._end_oldest()
        self.space.free([row.number for row in self.rows])
        self.space.check()
        assert all(pool.num_free == pool.num_blocks for pool in self.space.statistics().pools), "blocks leaked"

    def _end_oldest(self) -> None:
        if not self.planned[0].has_run:
            self._run(self.planned[0], 0)
        self.acknowledge()

    # Rows

    @precondition(lambda self: len(self.rows) < 4)
    @rule(tokens=st.lists(TOKEN, min_size=1, max_size=12), again=PLACE)
    def allocate(self, tokens: list[int], again: int) -> None:
        """Admit a prompt: a new one, or what another row is known to hold, and more."""
        prompt = [*self.rows[again].known, *tokens][:20] if again < len(self.rows) else tokens
        hit = self.space.match(prompt, max_replay_tokens=MOST_REPLAYED)
        answer = self.space.allocate(prompt, match=hit)
        if isinstance(answer, Allocation):
            row = Row(answer.row, list(prompt), len(prompt), self._replay_of(prompt, hit))
            self.rows.append(row)
            self.seen["hit"] += answer.num_hit_tokens > 0
            self.seen["replay"] += hit.num_replayed > 0

    def _replay_of(self, prompt: list[int], hit: PrefixHit) -> Replay:
        """What a replay leaves, and from which prefix on a row has others, since it is only approximate."""
        self.num_replays += 1
        sequence = ModelSequence(0, NO_KEYS, self.root)
        sequence.extend(self.prefixes, prompt)
        with_replay(sequence, self.groups, hit, self.prefixes, self.num_replays)
        return Replay(sequence.replay, sys.maxsize if hit.is_exact else hit.num_tokens)

    @precondition(lambda self: self.rows)
    @rule(place=PLACE, counts=st.lists(st.integers(0, 4), min_size=4, max_size=4), everybody=st.booleans())
    def append_unknown(self, place: int, counts: list[int], *, everybody: bool) -> None:
        """Let rows grow by unknown tokens."""
        batch = self.rows[: len(counts)] if everybody else [self.rows[place % len(self.rows)]]
        wanted = [self._bounded(row, count) for row, count in zip(batch, counts, strict=False)]
        try:
            answer = self.space.append([row.number for row in batch], None, wanted)
        except SharedPrefixError:
            drafts = [row for row in batch if not row.is_overlapped and row.num_certain < len(row.tokens)]
            assert drafts, "no drafts that another row may share"
            assert len(self.rows) > 1
            return
        if isinstance(answer, Shortage):
            return
        for row, count in zip(batch, wanted, strict=True):
            if count:
                row.tokens += [None] * count
                row.is_overlapped = True
                self.seen["unknown"] += 1

    def _bounded(self, row: Row, count: int) -> int:
        """A state takes one token a step, once all before it is planned."""
        room = max(0, self.config.max_tokens - len(row.tokens))
        if not any(each.start < row.num_certain for each in row.stretches):
            return 0  # a fork that no step has computed: whoever forks late samples itself
        if not row.is_overlapped and any(self._is_unjudged(row, planned) for planned in self.planned):
            return 0
        if self.mix.num_draft_states:
            return max(0, min(count, room, self.mix.num_draft_states - self._num_open(row)))
        if self.mix.takes_drafts:
            return min(count, room)
        is_planned = bool(row.stretches) and row.stretches[-1].end == len(row.tokens)
        return min(count, 1, room) if is_planned else 0

    def _num_open(self, row: Row) -> int:
        """Tokens that the space has not accepted: each has a state of its own."""
        return len(row.tokens) - int(self.space._state.rows[row.number, NUM_ACCEPTED])

    @staticmethod
    def _is_unjudged(row: Row, planned: "Planned") -> bool:
        """Whether a plan computes nothing of a row but drafts: its range begins with what another step samples."""
        return any(seen.row is row and row.num_certain <= seen.mine.start < seen.mine.end for seen in planned.rows)

    @precondition(lambda self: any(not row.has_unknown for row in self.rows))
    @rule(place=PLACE, tokens=st.lists(TOKEN, min_size=1, max_size=4), num_draft=st.integers(0, 3))
    def append(self, place: int, tokens: list[int], num_draft: int) -> None:
        """Append known tokens, the last ones perhaps drafts: behind a certain token, whose step judges them."""
        able = [row for row in self.rows if not row.has_unknown and len(row.tokens) + len(tokens) <= 36]
        if not able:
            return
        row = able[place % len(able)]
        drafts = min(num_draft, len(tokens) - 1) if self.mix.takes_drafts else 0
        if not isinstance(self.space.append(row.number, tokens, num_draft=drafts), Shortage):
            row.tokens += tokens
            row.num_certain, row.is_overlapped = len(row.tokens) - drafts, False

    @rule(places=st.lists(PLACE, min_size=1, max_size=4))
    def fill(self, places: list[int]) -> None:
        """Fill in what the device has sampled, for some rows."""
        ready = [row for row in self.rows if row.has_unknown and self._sample(row) is not None]
        batch = list(dict.fromkeys(ready[place % len(ready)] for place in places)) if ready else []
        given = [self._sample(row) or [] for row in batch]
        for row in batch:
            stretch = row.sampler()
            if stretch is not None and stretch.end == len(row.tokens):
                self.seen["filled without a slot behind"] += 1
                with pytest.raises(TokenError):
                    self.space.fill(
                        row.number, [0] * (stretch.end + 1 - row.num_certain), [stretch.end + 1 - row.num_certain]
                    )
        if batch:
            flat = [token for tokens in given for token in tokens]
            self.space.fill([row.number for row in batch], flat, [len(tokens) for tokens in given])
        for row, tokens in zip(batch, given, strict=True):
            self._filled(row, tokens)

    @staticmethod
    def _sample(row: Row) -> list[int] | None:
        """What the host may fill in now; the token behind the drafts only if the row has a slot for it."""
        stretch = row.sampler()
        if stretch is None or stretch.sample is None:
            return None
        return stretch.sample[: min(stretch.end + 1, len(row.tokens)) - row.num_certain]

    def _filled(self, row: Row, tokens: list[int]) -> None:
        stretch = row.sampler()
        assert stretch is not None
        length, limit = stretch.end - row.num_certain + 1, stretch.end
        num_refused = length - len(tokens)
        row.tokens[row.num_certain : row.num_certain + length] = tokens
        row.num_certain += len(tokens)
        for other in row.stretches:
            if other.end >= limit:
                other.start -= num_refused if other.end > limit else 0
                other.end -= num_refused
        self.seen["refused"] += num_refused > 0
        self.seen["refused behind a step in flight"] += num_refused > 0 and row.stretches[-1] is not stretch
        self.seen["filled"] += 1

    @precondition(lambda self: self.rows)
    @rule(place=PLACE, back=st.integers(0, 3))
    def truncate(self, place: int, back: int) -> None:
        """Roll a row back to what is known of it, or less: it has ended, perhaps steps ago."""
        row = self.rows[place % len(self.rows)]
        length = max(1, (row.num_certain if row.is_overlapped else len(row.tokens)) - back)
        try:
            self.space.truncate([row.number], [length])
        except (SharedPrefixError, TruncationError):
            assert back or any(other is not row for other in self.rows) or not self.mix.takes_drafts
            return
        self.seen["rolled back in flight"] += row.has_unknown and any(not each.has_run for each in self.planned)
        del row.tokens[length:]
        row.num_certain = len(row.tokens)
        for stretch in row.stretches:
            stretch.end = min(stretch.end, length)
            stretch.start = min(stretch.start, length)
        row.stretches = [each for each in row.stretches if each.start < each.end]

    @precondition(lambda self: any(not row.has_unknown for row in self.rows) and len(self.rows) < 5)
    @rule(place=PLACE)
    def fork(self, place: int) -> None:
        """Fork a row whose tokens are all known."""
        able = [row for row in self.rows if not row.has_unknown]
        row = able[place % len(able)]
        is_planned = bool(row.stretches) and row.stretches[-1].end == len(row.tokens)
        is_recurrent = not self.mix.takes_drafts or self.mix.num_draft_states > 0
        if is_recurrent and not is_planned:
            return
        if self.mix.num_draft_states and self._num_open(row):
            with pytest.raises(SequenceError, match="not accepted yet"):
                self.space.fork(row.number)
            return
        (number,) = self.space.fork(row.number).tolist()
        self.rows.append(Row(number, list(row.tokens), row.num_certain, row.replay))

    @precondition(lambda self: 0 < len(self.rows) < 5)
    @rule(place=PLACE, back=st.integers(0, 5))
    def fork_at(self, place: int, back: int) -> None:
        """Fork a row at a prefix that is known, whatever is unknown or in flight behind it."""
        row = self.rows[place % len(self.rows)]
        length = max(1, (row.num_certain if row.has_unknown else len(row.tokens) - 1) - back)
        if length >= len(row.tokens):
            return
        answer = self.space.fork(row.number, at=length)
        if isinstance(answer, Shortage | PrefixGone):
            return
        (number,) = answer.tolist()
        self.rows.append(Row(number, row.tokens[:length], min(row.num_certain, length), row.replay))
        self.seen["forked at a prefix"] += 1
        self.seen["forked before unknown tokens"] += row.has_unknown

    @precondition(lambda self: self.rows)
    @rule(place=PLACE)
    def free(self, place: int) -> None:
        """Give a row up, whatever is unknown or in flight."""
        self.space.free(self.rows.pop(place % len(self.rows)).number)

    # Steps

    @precondition(lambda self: len(self.planned) < MOST_IN_FLIGHT)
    @rule()
    def plan(self) -> None:
        """Plan the open step; the plan has the rows with unknown tokens, and the step whose sample fills the first."""
        plan = self.space.plan_step()
        by_number = {row.number: row for row in self.rows}
        ranges = zip(plan.compute.rows.tolist(), plan.compute.starts.tolist(), plan.compute.ends.tolist(), strict=True)
        told = plan.unknown
        rows = []
        for place, (number, start, end) in enumerate(ranges):
            row = by_number[number]
            assert end == len(row.tokens)
            num_unknown = len(row.tokens) - row.num_certain if row.is_overlapped else 0
            assert (int(told.counts[place]) if told else 0) == num_unknown
            seen = self._seen(row, plan, place, start, end)
            if told and num_unknown and seen.waiting:
                self._require_sampler(plan.step_id - int(told.steps_back[place]), seen.waiting[0].step_id)
            rows.append(seen)
        self.planned.append(Planned(plan, rows))

    def _require_sampler(self, told: int, expected: int) -> None:
        """The plan names the step whose sample fills the first unknown token; any that is over, if that one is."""
        in_flight = {each.plan.step_id for each in self.planned}
        assert told == expected or not {told, expected} & in_flight

    def _seen(self, row: Row, plan: StepPlan, place: int, start: int, end: int) -> Seen:
        waiting = [each for each in row.stretches if each.end >= row.num_certain] if row.has_unknown else []
        firsts = [row.num_certain, *(each.end + 1 for each in waiting)]
        lengths = [each.end - first + 1 for each, first in zip(waiting, firsts, strict=False)]
        if not row.is_overlapped and start >= row.num_certain:
            for each in row.stretches:  # what it samples was guessed: the step of the drafts answers for it
                each.end = min(each.end, row.num_certain - 1)
        mine = Stretch(plan.step_id, start, end)
        row.stretches.append(mine)
        outside = {group: int(told.starts[place]) for group, told in plan.compute_outside.items()}
        drafts = [token for token in row.tokens[row.num_certain :] if token is not None]
        tables = [self.space.block_ids(row.number, group.index) for group in self.groups]
        return Seen(row, row.known, drafts, waiting, lengths, mine, start, end, outside, tables)

    @precondition(lambda self: any(not each.has_run for each in self.planned))
    @rule(luck=st.integers(0, 11))
    def run(self, luck: int) -> None:
        """Let the device run the next plan."""
        self._run(next(each for each in self.planned if not each.has_run), luck)

    def _run(self, planned: Planned, luck: int) -> None:
        for new in planned.plan.new_blocks:
            for block in new.block_ids.tolist():
                self.device.forget((new.pool, block))
        views, ranges = {}, []
        outside: dict[int, list[tuple[int, int, int]]] = {index: [] for index in planned.plan.compute_outside}
        for seen in planned.rows:
            tokens, shift = self._device_tokens(seen)
            end = seen.end - shift
            num_certain = len(tokens)
            tokens += seen.drafts[: end - len(tokens)] if not seen.waiting else []
            tokens += [(luck + position) % 2 for position in range(len(tokens), end)]
            seen.mine.sample = self._sampled(tokens, num_certain, end, luck)
            number = seen.row.number
            sequence = ModelSequence(number, NO_KEYS, self.root, replay=seen.row.replay.left)
            prefixes = self._prefixes_of(seen.row.replay, tokens[:end])
            views[number] = View(sequence, 0, prefixes, seen.tables)
            ranges.append((number, seen.start - shift, end))
            for group, start in seen.outside.items():
                outside[group].append((number, start - shift if start == seen.start else start, end))
        self.device.run(Step(planned.plan, views, ranges, outside, frozenset()))
        planned.has_run = True

    def _prefixes_of(self, replay: Replay, tokens: list[int]) -> list[int]:
        first = min(replay.approximate_from, len(tokens))
        exact = self.prefixes.extend(self.root, NO_KEYS, 0, tokens[:first])
        if first == len(tokens) or replay.left is None:
            return exact
        other = self.prefixes.follow(exact[-1], ("approximate", replay.left.ident))
        return exact + self.prefixes.extend(other, NO_KEYS, first, tokens[first:])

    @staticmethod
    def _device_tokens(seen: Seen) -> tuple[list[int], int]:
        """The tokens of a row on the device by now, and by how many positions its range has moved down."""
        tokens, shift = list(seen.known), 0
        for stretch, length in zip(seen.waiting, seen.lengths, strict=True):
            assert stretch.sample is not None, "a step runs before one whose sample it takes"
            sample = stretch.sample[:length]  # of a row that was rolled back, only what its range still samples
            tokens += sample
            shift += length - len(sample)
        return tokens, shift

    @staticmethod
    def _sampled(tokens: list[int], num_certain: int, end: int, luck: int) -> list[int]:
        """Accept some of the guesses, and sample one token more."""
        guesses = tokens[num_certain:end]
        return [*guesses[: luck % (len(guesses) + 1)], (luck // 2) % 2]

    @precondition(lambda self: self.planned and self.planned[0].has_run)
    @rule()
    def acknowledge(self) -> None:
        """Acknowledge the oldest step."""
        over = self.planned.pop(0)
        self.space.acknowledge(over.plan.step_id)
        for seen in over.rows:
            seen.row.num_computed += seen.end - seen.start

    @precondition(lambda self: self.rows and len(self.planned) < MOST_IN_FLIGHT)
    @rule(counts=st.lists(st.integers(0, 4), min_size=4, max_size=4), luck=st.integers(0, 11), late=st.booleans())
    def decode(self, counts: list[int], luck: int, *, late: bool) -> None:
        """One round of an overlapped engine: plan the next step, run the last one, fill in what it has sampled."""
        self.append_unknown(0, counts, everybody=True)
        self.plan()
        for planned in self.planned[:-1] if late else self.planned:
            if not planned.has_run:
                self._run(planned, luck)
        self.fill([0, 1, 2, 3, 4])
        if self.planned[0].has_run:
            self.acknowledge()

    @rule(luck=st.integers(0, 11))
    def settle(self, luck: int) -> None:
        """Plan, run and acknowledge all there is."""
        self.plan()
        for planned in self.planned:
            if not planned.has_run:
                self._run(planned, luck)
        while self.planned:
            self.acknowledge()

    @precondition(lambda self: self.planned)
    @rule(place=PLACE)
    def abort(self, place: int) -> None:
        """Let steps fail; what they have sampled and was not filled in is gone."""
        aborted = self.planned[place % len(self.planned) :]
        del self.planned[place % len(self.planned) :]
        answer = self.space.abort(aborted[0].plan.step_id)
        ids = {each.plan.step_id for each in aborted}
        for seen in (seen for each in aborted for seen in each.rows):
            seen.row.num_aborted += seen.end - seen.start
        for row in list(self.rows):
            failed = [each for each in row.stretches if each.step_id in ids]
            row.stretches = [each for each in row.stretches if each.step_id not in ids]
            if row.number in answer.lost_rows:
                self.space.free(row.number)
                self.rows.remove(row)
            elif failed and row.has_unknown:
                del row.tokens[max(row.num_certain, failed[0].start + 1) :]
                self.seen["lost with a step"] += 1


class WithoutWindows(OverlapMachine):
    """Loses windows as well, in mixes where they can be computed again."""

    @precondition(lambda self: len(self.rows) < 4)
    @rule(tokens=st.lists(TOKEN, min_size=10, max_size=16), cut=st.integers(7, 12), more=st.lists(TOKEN, max_size=3))
    def allocate_without_windows(self, tokens: list[int], cut: int, more: list[int]) -> None:
        """Admit the beginning of a prompt whose windows have been evicted since it was computed."""
        self.allocate(tokens, MOST_IN_FLIGHT)
        self.check()
        self.settle(0)
        evict_windows(self.space)
        self.check()
        self.allocate([*tokens[:cut], *more], MOST_IN_FLIGHT)


def overlap_machine_of(mix: Mix, seen: Counter[str]) -> type[OverlapMachine]:
    """Make the class of machines for one mix, as Hypothesis wants it: without arguments."""

    class Machine(OverlapMachine):
        def __init__(self) -> None:
            super().__init__(mix, seen)

    class Replaying(WithoutWindows, Machine):
        pass

    return Replaying if mix.replays else Machine
