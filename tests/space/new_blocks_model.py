"""Which blocks a plan must call new: allocated since the plan before, in use, and without content."""

from collections.abc import Iterable

from pagedkv.contract.plan import StepPlan
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
        """The caller brought the content of all tokens of these sequences."""
        for sequence in batch:
            self.open -= self._all(sequence) - self._behind(sequence, dict.fromkeys(self.groups, len(sequence.tokens)))

    def close(self, plan: StepPlan, running: Iterable[ModelSequence], written: set[Place]) -> None:
        """A plan names exactly the new blocks that running sequences hold and that no move of it fills."""
        held = set().union(*(self._all(sequence) for sequence in running))
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
            planned = {group: sequence.planned_in(group) for group in self.groups}
            self.open |= (self._behind(sequence, planned) & handed_out) - written

    def _all(self, sequence: ModelSequence) -> set[Place]:
        return self._behind(sequence, dict.fromkeys(self.groups, 0))

    @staticmethod
    def _behind(sequence: ModelSequence, positions: dict[GroupRule, int]) -> set[Place]:
        """Blocks of a sequence that hold nothing before a position of their group."""
        return {
            (group.pool, block)
            for group, position in positions.items()
            for block in sequence.tables[group.index][-(-position // group.block_size) :]
            if block
        }
