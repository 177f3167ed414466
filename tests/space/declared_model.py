"""Content that comes from elsewhere: when it may be declared computed, and what counts as computed."""

from collections.abc import Iterator

from pagedkv import EpochSpan, InvalidatedMemory
from tests.space.epoch_labels import Label
from tests.space.live_model import Refusal
from tests.space.memory_model import Place
from tests.space.sequence_model import GroupRule, ModelSequence, Status
from tests.space.step_model import StepModel

__all__ = ["DeclaredModel"]


class DeclaredModel(StepModel):
    """What declaring sequences computed, and asking what is computed, must answer and do."""

    def declaring_refusal(self, batch: list[ModelSequence]) -> Refusal:
        """Return whether declaring sequences computed must, or may, be refused."""
        moved = [sequence for sequence in batch if self.places(sequence) & self._written_by_moves()]
        is_open = self.keeps_draft_states and any(each.num_accepted < len(each.tokens) for each in batch)
        if (self.is_recurrent and self.in_flight) or moved or is_open:
            return Refusal(is_sure=True, is_possible=True)
        held = set().union(*(self.places(sequence) for sequence in batch))
        others = [sequence for sequence in self.running if sequence not in batch]
        if any(places & held for other in others for places in self._computed_in_flight(other)):
            return Refusal(is_sure=True, is_possible=True)
        read = {move.source for move in self.open_moves}
        surely = [self._surely_owed(sequence) & read for sequence in batch]
        surely += [self._surely_owed(sequence) & held for sequence in others]
        perhaps = [self._perhaps_owed(sequence) & read for sequence in batch]
        perhaps += [self._perhaps_owed(sequence) & held for sequence in others]
        return Refusal(is_sure=any(surely), is_possible=any(perhaps))

    def _written_by_moves(self) -> set[Place]:
        """Blocks that a plan, open or in flight, copies or swaps something into."""
        return self.open_written | {move.target for step in self.in_flight for move in step.moves}

    def _computed_in_flight(self, sequence: ModelSequence) -> Iterator[set[Place]]:
        """Blocks from where a step in flight computes a sequence on, unless the content came from elsewhere since."""
        for step in self.in_flight:
            if step.plan.step_id not in sequence.marked_steps:
                for group in self.groups:
                    for row, start, end in step.ranges_in(group):
                        if step.views[row].sequence is sequence and start < end:
                            yield self._blocks_from(sequence, group, start)

    def _surely_owed(self, sequence: ModelSequence) -> set[Place]:
        """Blocks that the open plan has to compute for a sequence."""
        return set().union(*(self._from(sequence, group, sequence.sure_in(group)) for group in self.groups))

    def _perhaps_owed(self, sequence: ModelSequence) -> set[Place]:
        """Blocks that the open plan may have to compute for a sequence."""
        is_planned = sequence.is_planned
        starts = {group: sequence.planned_in(group) if is_planned else 0 for group in self.groups}
        return set().union(*(self._from(sequence, group, start) for group, start in starts.items()))

    def _from(self, sequence: ModelSequence, group: GroupRule, start: int) -> set[Place]:
        """Blocks of a sequence in a group from a position on, if there is any token left to compute."""
        return self._blocks_from(sequence, group, start) if start < len(sequence.tokens) else set()

    def _blocks_from(self, sequence: ModelSequence, group: GroupRule, start: int) -> set[Place]:
        table = sequence.tables[group.index]
        return {(self.label(group, sequence), block) for block in table[start // group.block_size :] if block}

    def marked_computed(self, batch: list[ModelSequence]) -> None:
        """The caller wrote the keys and values of sequences, up to their last token, and declared them computed."""
        self.new_blocks.filled(batch)
        for sequence in batch:
            self._label_declared(sequence)
            for group, table in zip(self.groups, sequence.tables, strict=True):
                present = group.present(table, len(sequence.tokens))
                self.device.bring(self._last_before(), group, table, sequence.prefixes, present)
            if self.receipts:
                num_declared = self.space.receipt(sequence.row).num_declared
                self.receipts.declared(sequence, num_declared, sequence.sure_from)
            sequence.plan_all()
            sequence.is_planned = True
            sequence.marked_steps |= {step.plan.step_id for step in self.in_flight}
            sequence.era += 1
            self.follow_changes(sequence, sequence.num_accepted)
        self.device_moved_on()
        self.seen["declared"] += 1

    def _label_declared(self, sequence: ModelSequence) -> None:
        """What nothing has computed is of the weights in force; what steps in flight compute, of theirs.

        What is there already, though not known to be computed, a failed step may have left, or another row computes it.
        """
        sequence.is_plain = False
        labels = self.device.labels
        labels.is_doubted |= sequence.num_hit > 0 and self.epoch > 0  # it may continue what older weights computed
        for group in labels.groups:
            table = sequence.tables[group.index]
            for position in group.present(table, len(sequence.tokens)):
                block, offset = table[group.slot(position)[0]], group.slot(position)[1]
                slot, label = (group.pool, block, offset), self._label_in_flight(group, sequence, position)
                if self.device.content(group, block, position) != (group.index, sequence.prefixes[position]):
                    labels.bring(self._last_before(), slot, label)
                elif position >= sequence.planned_in(group):
                    labels.doubt(slot, label)

    def _label_in_flight(self, computing: GroupRule, sequence: ModelSequence, position: int) -> Label:
        """With which weights a step in flight computes a position; those in force if none does.

        The block may have been another's that has ended, so that the step computed, or will, what is overwritten.
        """
        label = self.epoch, self.epoch
        for step in self.in_flight:
            for row, start, end in step.ranges_in(computing):
                view = step.views[row]
                if start <= position < end and self._holds_same(view.tables, sequence, position):
                    is_certain = view.sequence is sequence or view.sequence in self.running
                    label = (step.epoch, step.epoch) if is_certain else (self.epoch, step.epoch)
                    self.device.labels.is_doubted |= label[0] != label[1]
        return label

    def _holds_same(self, tables: list[list[int]], sequence: ModelSequence, position: int) -> bool:
        """Whether a sequence holds the blocks of a position that are in other tables."""
        group = self.device.labels.groups[0]
        index, _ = group.slot(position)
        table, own = tables[group.index], sequence.tables[group.index]
        return index < min(len(table), len(own)) and table[index] == own[index]

    def began(self, epoch: int) -> None:
        """Weights of a new epoch are in force: what was planned before is computed with those of before."""
        self.epoch = epoch
        self.seen["new weights"] += 1

    def check_epochs(self) -> None:
        """When all is computed, the epochs of rows cover the weights of their tokens; those of plain rows are exact."""
        if not self.config.counts_epochs or self.device.coming:
            return
        for sequence in self.running:
            spans = self.space.epochs(sequence.row)
            assert spans, f"row {sequence.row} has no epochs"
            assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
            assert (spans[0].start, spans[-1].stop) == (0, len(sequence.tokens))
            for group in self.device.labels.groups:
                self._check_epochs_in(group, sequence, spans)

    def _check_epochs_in(self, group: GroupRule, sequence: ModelSequence, spans: tuple[EpochSpan, ...]) -> None:
        table, num_tokens = sequence.tables[group.index], len(sequence.tokens)
        for position in group.present(table, num_tokens):
            span = next(span for span in spans if span.start <= position < span.stop)
            oldest, epoch = self.device.labels.of(group, table, position)
            is_told = span.oldest <= oldest and epoch <= span.newest
            assert is_told, (
                f"row {sequence.row}, group {group.index}: position {position} is of epochs {oldest} to {epoch}, "
                f"but the answer was {span}"
            )
            is_exact = sequence.is_plain and not self.device.labels.is_doubted
            if position == num_tokens - 1 and is_exact:
                assert (span.oldest, span.newest) == (oldest, epoch), f"row {sequence.row}: {span} claims too much"

    def _last_before(self) -> int:
        """The step behind which content comes: in order, all that are planned may still write where it goes."""
        return self.num_plans if self.config.in_order else 0

    def forgot_cache(self) -> None:
        """The prefix cache was reset: nothing known before may ever hit."""
        self.generation += 1
        assert all(pool.num_named == pool.num_cached == 0 for pool in self.space.statistics().pools)

    def invalidated(self, answer: InvalidatedMemory) -> None:
        """The device's memory was given back: everything there is undefined, and whoever ran is lost."""
        assert set(answer.failed_loads) == {load.answer for load in self.loads}
        assert set(answer.lost_rows) == {sequence.row for sequence in self.running}
        assert all(pool.num_named == pool.num_cached == 0 for pool in self.space.statistics().pools)
        for pool in self.config.pool_names:
            for block in range(1, self.num_usable[pool] + 1):
                self.device.forget((pool, block))
        assert not self.device.coming
        for sequence in self.running:
            sequence.status = Status.LOST
            sequence.era += 1
        self.seen["invalidated"] += 1

    def check_computed(self, sequence: ModelSequence) -> None:
        """Blocks that the space lists as computed are, or a planned swap brings them; at the end it lists all."""
        awaited = {place for step in self.planned for place in step.touched} | self.open_written
        for group, table in zip(self.groups, sequence.tables, strict=True):
            listed = self.space.computed_block_ids(sequence.row, group.index)
            assert listed == sequence.sure_blocks(group, table)[: len(listed)]
            for index, block in enumerate(listed):
                if block and (group.pool, block) not in awaited:
                    start, stop = index * group.block_size, (index + 1) * group.block_size
                    written = [each for each in group.written(start, stop) if not sequence.is_inexact(group, each)]
                    self.device.expect(group, table, sequence.prefixes, written)
            is_computed = sequence.is_planned and sequence.planned_in(group) == len(sequence.tokens)
            if is_computed and not self.in_flight and self._is_alone(group, sequence):
                num_tokens = sequence.num_accepted if group.num_draft_states else len(sequence.tokens)
                assert len(listed) == num_tokens // group.block_size

    def _is_alone(self, group: GroupRule, sequence: ModelSequence) -> bool:
        """Whether no other sequence holds a block of this one, so that no other sequence computes any of them."""
        return all(
            not block or self.holders(group, sequence, index) == 1
            for index, block in enumerate(sequence.tables[group.index])
        )

    def check_findable(self) -> None:
        """With nothing left to compute, every full block that a running sequence holds is found by its prefix.

        Only for mixes of full attention: windows and states release what a hit would need. Sequences from before the
        last reset are never found. For a sequence that fills ``max_tokens``, no prompt can be one token longer.
        """
        assert not self.in_flight
        for sequence in self.running:
            num_tokens = sequence.num_accepted
            if sequence.generation == self.generation and num_tokens < self.config.max_tokens:
                hit = self.space.match([*sequence.tokens[:num_tokens], 0], keys=sequence.keys)
                inside = [group for group in self.groups if not group.stays_out]
                full = min(num_tokens // group.block_size * group.block_size for group in inside)
                if len(inside) == 1:
                    assert hit.num_tokens >= full, f"row {sequence.row} holds {full} tokens that cannot be found"
                self.seen["findable"] += full > 0
