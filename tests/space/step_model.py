"""Steps: what a plan must contain, what the device does with it, and what acknowledging or aborting it changes."""

from collections import Counter
from dataclasses import replace

from pagedkv.contract.answers import AbortedSteps
from pagedkv.contract.plan import StepPlan, TokenRanges
from tests.plan_packing import as_plain, pack_like, parts_of
from tests.space.live_model import LiveModel
from tests.space.memory_model import Place, Step, View, destinations, host, moves_of, nonempty, sources
from tests.space.sequence_model import GroupRule, ModelSequence, Status

__all__ = ["StepModel"]


def ranges_of(told: TokenRanges) -> list[tuple[int, int, int]]:
    """``(row, start, end)`` of ranges of a plan."""
    return list(zip(told.rows.tolist(), told.starts.tolist(), told.ends.tolist(), strict=True))


class StepModel(LiveModel):
    """What planning, running, acknowledging and aborting steps must answer and do."""

    def close_step(self, plan: StepPlan) -> None:
        """The open step was planned: it leaves no token of a running sequence uncomputed."""
        self.num_plans += 1
        assert plan.step_id == self.num_plans
        restored = StepPlan.from_buffer(plan.buffer.tobytes())
        assert as_plain(parts_of(restored)) == as_plain(parts_of(plan))
        assert pack_like(parts_of(plan), plan) == plan.buffer.tobytes()
        ranges = ranges_of(plan.compute)
        outside = {group.index: ranges_of(plan.compute_in(group.index)) for group in self.groups if group.has_own_start}
        assert len({row for row, _, _ in ranges}) == len(ranges), "a plan computes a row twice"
        views = {
            sequence.row: View(
                sequence,
                sequence.era,
                list(sequence.prefixes),
                list(map(list, sequence.tables)),
                sequence.num_accepted,
                list(map(list, sequence.slots)),
            )
            for sequence in self.running
        }
        self._require_firsts(plan, views)
        for row, start, end in ranges:
            assert 0 <= start < end == len(views[row].prefixes)
        for sequence in self.running:
            sequence.plan_all()
            sequence.is_planned = True
        for row, _, _ in ranges:
            views[row].sequence.last_step = plan.step_id
        for told in outside.values():
            assert [(row, end) for row, _, end in told] == [(row, end) for row, _, end in ranges]
            assert all(0 <= start <= end for _, start, end in told)
        for index in (group.index for group in self.groups if group.replays):
            begun = zip(outside[index], ranges, strict=True)
            assert all(here <= start for (_, here, _), (_, start, _) in begun), "a token goes through some layers only"
        if self.receipts:
            self.receipts.planned((views[row].sequence, start, end) for row, start, end in ranges)
        step = Step(plan, views, ranges, outside, frozenset(), self.epoch)
        if self.receipts:
            self.receipts.replayed(step.replays(self.groups))
        touched = self._touched(step)
        new = {(part.pool, block) for part in plan.new_blocks for block in part.block_ids.tolist()}
        self.waiting.cleared(new, plan.step_id)
        assert sorted(moves_of(plan)) == sorted(self.open_moves), "the moves of a plan are not those of its operations"
        self.new_blocks.close(plan, self.running, self.open_written)
        kept = self._plan_kept_states(plan.step_id, ranges)
        self.planned.append(replace(step, touched=frozenset(touched | new | kept)))
        self._require_covered(views)
        self.open_moves.clear()
        self.seen["several steps in flight"] += len(self.in_flight) > 1

    def _plan_kept_states(self, step_id: int, ranges: list[tuple[int, int, int]]) -> set[Place]:
        """Kept states are those of accepted positions that the plan computes; return their blocks."""
        computed = {row: range(start + 1, end + 1) for row, start, end in ranges}
        places = set()
        for kept in self.kept_states:
            if kept.step_id or kept.ticket not in self.space._state.held:
                continue
            sequence = kept.sequence
            assert self.sequences.get(sequence.row) is sequence, "a state is kept of a sequence that is gone"
            assert kept.position in computed[sequence.row], "a state is kept that the plan does not compute"
            assert kept.position <= sequence.num_accepted, "a state of drafts is kept"
            kept.step_id = step_id
            places.add(kept.place)
            self.seen["state kept inside"] += 1
        return places

    def _write_kept_states(self, step: Step) -> None:
        """The forward pass writes the states inside chunks into their blocks."""
        for kept in self.kept_states:
            if kept.step_id == step.plan.step_id:
                view, group, last = step.views[kept.sequence.row], kept.group, kept.position - 1
                index, offset = group.slot(last)
                number = view.number(group, last)
                self.device.memory[group.pool][kept.block][offset] = (group.index, number)
                own = view.tables[group.index][index]
                self.device.labels.write(group.pool, kept.block, offset, self.device.labels.at(group.pool, own, offset))

    def _require_firsts(self, plan: StepPlan, views: dict[int, View]) -> None:
        """The plan has the position from which each row has draft states, if any row of it has them."""
        rows = plan.compute.rows.tolist()
        is_any = any(views[row].accepted < len(views[row].prefixes) for row in rows)
        firsts = plan.draft_states.firsts.tolist() if plan.draft_states else None
        assert firsts == ([views[row].accepted for row in rows] if is_any and self.keeps_draft_states else None)

    def _touched(self, step: Step) -> set[Place]:
        """Blocks that the device may read or write for a plan."""
        plan = step.plan
        touched = {
            *sources(plan.swaps_out),
            *destinations(plan.swaps_in),
            *sources(plan.copies),
            *destinations(plan.copies),
        }
        touched |= {(host(pool), block) for pool, block in destinations(plan.swaps_out)}
        touched |= {(host(pool), block) for pool, block in sources(plan.swaps_in)}
        for group in self.groups:
            for row, start, end in nonempty(step.ranges_in(group)):
                positions = [*group.read(start, end), *group.written(start, end)]
                if group.num_draft_states:
                    positions += range(max(start, step.views[row].accepted), end)
                touched |= {(group.pool, step.views[row].block_of(group, position)) for position in positions}
        return touched

    def run_step(self) -> None:
        """The device runs the next plan; afterwards every sequence that stayed as it was reads back right."""
        step = self.planned.pop(0)
        self.ran.append(step)
        for new in step.plan.new_blocks if self.config.in_order else ():
            for block in new.block_ids.tolist():
                self.device.forget((new.pool, block))
        self.device.run(step)
        self._write_kept_states(step)
        self.device_moved_on()
        for view in step.views.values():
            is_alive = self.sequences.get(view.sequence.row) is view.sequence
            if is_alive and view.sequence.era == view.era and view.sequence.status is Status.RUNNING:
                self._require_held(view)
            self.seen["older weights hit"] += view.sequence.oldest_hit < view.sequence.first_epoch

    def device_moved_on(self) -> None:
        """Write what was brought after the steps that are over."""
        self.device.arrive(self.planned[0].plan.step_id if self.planned else self.num_plans + 1)

    def _require_held(self, view: View) -> None:
        """After the step, blocks contain the tokens of the plan's view, and all that the next token reads.

        Blocks that left the row's table since then, and that the plan does not touch, may have any content.
        """
        for group in self.groups:
            table, now = view.tables[group.index], view.sequence.tables[group.index]
            num_tokens = len(view.prefixes)
            self._require_open_states(group, view)
            accepted = min(view.accepted, num_tokens) if group.num_draft_states else num_tokens
            for position in {*group.kept(accepted), *group.present(table, accepted)}:
                index, _ = group.slot(position)
                is_inexact = view.sequence.is_inexact(group, position)
                if (not table[index] or table[index] == now[index]) and not is_inexact:
                    self.device.expect(group, table, view.prefixes, [position])

    def _require_open_states(self, group: GroupRule, view: View) -> None:
        """The state of every draft is in its slot."""
        for position in range(view.accepted, len(view.prefixes)) if group.num_draft_states else ():
            block = view.block_of(group, position)
            if block == view.sequence.slots[group.index][position % group.num_draft_states]:
                assert self.device.content(group, block, position) == (group.index, view.prefixes[position])

    def _require_covered(self, views: dict[int, View]) -> None:
        """Every token of a running sequence is in memory, or a plan that has yet to run brings or computes it."""
        moved = {move.target for step in self.planned for move in step.moves}
        for group in self.groups:
            computed = self._computed_slots(group)
            for view in views.values():
                table = view.tables[group.index]
                last = view.accepted if group.num_draft_states else len(view.prefixes)
                for position in view.exact(group, group.present(table, last)):
                    index, offset = group.slot(position)
                    is_coming = (group.pool, table[index]) in moved or (table[index], offset) in computed
                    assert is_coming or self.device.content(group, table[index], position) == (
                        group.index,
                        view.prefixes[position],
                    ), f"row {view.sequence.row}, group {group.index}: no row computes position {position}"

    def _computed_slots(self, group: GroupRule) -> set[tuple[int, int]]:
        """Block and offset of everything that plans still to run compute in a group."""
        return {
            (step.views[row].block_of(group, position), group.slot(position)[1])
            for step in self.planned
            for row, start, end in nonempty(step.ranges_in(group))
            for positions in group.written_by(start, end, step.views[row].accepted)
            for position in positions
        }

    def acknowledged(self) -> None:
        """The oldest step was acknowledged: windows slid, and duplicates gave way to equal content."""
        step = self.ran.pop(0)
        computed = {row: end for row, _, end in step.ranges}
        if self.receipts:
            self.receipts.acknowledged({sequence: self._num_held(sequence) for sequence in self.sequences.values()})
        for sequence in self.running:
            view = step.views.get(sequence.row)
            is_same = view is not None and view.sequence is sequence and sequence.row in computed
            query = min(computed[sequence.row], sequence.num_accepted) if is_same else self._waited(sequence)
            self.follow_changes(sequence, query)
            if view is not None and is_same and view.era == sequence.era:
                self._require_slid(sequence, min(computed[sequence.row], sequence.num_accepted))

    def _num_held(self, sequence: ModelSequence) -> Counter[str]:
        """Blocks of a sequence's tables, by the label of their pool."""
        held: Counter[str] = Counter()
        for group, table, slots in zip(self.groups, sequence.tables, sequence.slots, strict=True):
            held[self.label(group, sequence)] += sum(block > 0 for block in (*table, *slots))
        return held

    def _waited(self, sequence: ModelSequence) -> int:
        """Up to where a sequence is computed that no step in flight computes: others may have done it for it."""
        is_in_flight = any(step.views[row].sequence is sequence for step in self.in_flight for row, _, _ in step.ranges)
        return 0 if is_in_flight else min(sequence.num_planned, sequence.num_accepted)

    def follow_changes(self, sequence: ModelSequence, query: int) -> None:
        """Entries became null where computing ``query`` does not read, or another block of the same content."""
        before, sequence.tables = sequence.tables, self.read_tables(sequence.row)
        if before == sequence.tables:
            return
        for group, old, table in zip(self.groups, before, sequence.tables, strict=True):
            assert len(table) == len(old)
            for index, (left, right) in enumerate(zip(old, table, strict=True)):
                if left == right:
                    continue
                positions = range(index * group.block_size, (index + 1) * group.block_size)
                if right:
                    self.seen["merge"] += 1
                    written = group.written(positions.start, positions.stop)
                    self.device.expect(group, table, sequence.prefixes, written)
                else:
                    self.seen["slide"] += 1
                    assert not set(positions) & set(group.kept(query)), "a window has slid too far"
                    assert positions.stop <= query, "a window has slid beyond what is computed"

    def _require_slid(self, sequence: ModelSequence, query: int) -> None:
        """Blocks wholly below what computing ``query`` reads have been given back, sinks apart."""
        for group in self.groups:
            num_sink_blocks = -(-group.num_sink_tokens // group.block_size)
            table = sequence.tables[group.index]
            stale = range(num_sink_blocks, group.first_kept(query) // group.block_size)
            assert not any(table[index] for index in stale), "blocks below the window are still held"

    def aborted(self, answer: AbortedSteps, position: int, num_parts: int, *, garbage: bool) -> None:
        """Steps failed from ``in_flight[position]`` on; of those not run some parts happened, maybe as garbage.

        The device takes steps in order: nothing of them happened while one before them has yet to run.
        """
        steps = self.in_flight[position:]
        for step in steps if position <= len(self.ran) else ():
            if step in self.planned:
                self.device.fail(step, num_parts, garbage=garbage)
        self.ran = self.ran[:position]
        self.planned = self.planned[: max(0, position - len(self.ran))]
        self.device_moved_on()
        assert answer.step_ids == tuple(step.plan.step_id for step in steps)
        assert not set(answer.rewound_rows) & set(answer.lost_rows)
        spoilt = {place for step in steps for place in step.touched} | self.open_touched
        if self.receipts:
            self.receipts.aborted(len(steps))
        self._rewind(answer, steps)
        for sequence in self.running:
            sequence.is_planned = False  # what a row leaves uncomputed may fall to whoever shares it
        self._lose(answer, spoilt)
        self.new_blocks.aborted(steps, self.running, self.open_written)
        self.seen["abort"] += 1

    def _rewind(self, answer: AbortedSteps, steps: list[Step]) -> None:
        for step in steps:
            for row, start, _ in step.ranges:
                sequence = step.views[row].sequence
                is_marked = step.plan.step_id in sequence.marked_steps
                if self.sequences.get(row) is sequence and not sequence.is_lost and not is_marked:
                    assert row in {*answer.rewound_rows, *answer.lost_rows}, (
                        "an aborted row is neither rewound nor lost"
                    )
                    sequence.is_plain = False
                    sequence.num_planned = min(sequence.num_planned, start)
                    sequence.sure_from = min(sequence.sure_from, start)
                    for index, ranges in step.outside.items():
                        begin = next(begin for other, begin, _ in ranges if other == row)
                        if self.groups[index].replays:
                            sequence.planned_replayed = min(sequence.planned_replayed, begin)
                            sequence.sure_replayed = min(sequence.sure_replayed, begin)
                            continue
                        sequence.planned_outside = min(sequence.planned_outside, begin)
                        sequence.sure_outside = min(sequence.sure_outside, begin)
        for row in answer.rewound_rows:
            assert not self.sequences[row].is_lost
            self.sequences[row].era += 1

    def _lose(self, answer: AbortedSteps, spoilt: set[Place]) -> None:
        """Only rows are lost that hold a block which an aborted step works on, or that once shared another's."""
        for row in answer.lost_rows:
            sequence = self.sequences[row]
            assert not sequence.is_lost
            is_concerned = sequence.is_sharer or self.places(sequence) & spoilt
            assert is_concerned, f"row {row} was declared lost, but nothing it holds was aborted"
            sequence.status = Status.LOST
            sequence.era += 1
            self.seen["lost"] += 1
