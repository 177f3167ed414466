"""Which blocks a plan must call new: handed out since the plan before, in use, and with nobody's content."""

from collections.abc import Iterable

from pagedkv.plan import StepPlan
from tests.space.memory_model import Place, Step
from tests.space.sequence_model import GroupRule, ModelSequence

__all__ = ["NewBlocksModel"]


class NewBlocksModel:
    """Blocks without content, by pool.

    Attributes:
        open: handed out since the last plan; some of them may be in use no more.
    """

    def __init__(self, groups: list[GroupRule]) -> None:
        """Expect nothing."""
        self.groups = groups
        self.open: set[Place] = set()

    def filled(self, batch: list[ModelSequence]) -> None:
        """Somebody brought the content of all tokens of these sequences."""
        for sequence in batch:
            self.open -= self._from(sequence, 0) - self._from(sequence, len(sequence.tokens))

    def close(self, plan: StepPlan, running: Iterable[ModelSequence], written: set[Place]) -> None:
        """A plan names exactly the new blocks that running sequences hold and that no move of it fills."""
        held = set().union(*(self._from(sequence, 0) for sequence in running))
        told = [(new.pool, block) for new in plan.new_blocks for block in new.block_ids.tolist()]
        assert len(set(told)) == len(told), "a new block is named twice"
        assert set(told) == (self.open & held) - written, "the new blocks of a plan are not those handed out empty"
        self.open.clear()

    def aborted(self, steps: list[Step], running: Iterable[ModelSequence], written: set[Place]) -> None:
        """What failed plans handed out is new again where nothing in it counts as computed."""
        handed_out = {
            (new.pool, block) for step in steps for new in step.plan.new_blocks for block in new.block_ids.tolist()
        }
        for sequence in running:
            self.open |= (self._from(sequence, sequence.num_planned) & handed_out) - written

    def _from(self, sequence: ModelSequence, position: int) -> set[Place]:
        """Blocks of a sequence that hold nothing before a position."""
        return {
            (group.pool, block)
            for group, table in zip(self.groups, sequence.tables, strict=True)
            for block in table[-(-position // group.block_size) :]
            if block
        }
