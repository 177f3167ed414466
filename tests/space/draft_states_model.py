"""Draft states: where the state of each position is, and what accepting, refusing and growing do to that.

Written from promise 23: a position that is not accepted has its state in a slot of its own; what is accepted becomes
current by changing places with what the table has, and nothing is copied.
"""

from tests.space.live_model import LiveModel
from tests.space.sequence_model import GroupRule, ModelSequence

__all__ = ["DraftStatesModel"]


class DraftStatesModel(LiveModel):
    """What becomes of the blocks of draft states."""

    def accept_states(self, sequence: ModelSequence, accepted: int) -> None:
        """The states of positions that are accepted, and planned, change places with those of the table."""
        for group in self.groups:
            if group.num_draft_states:
                table, slots = self.accepted_places(sequence, group, accepted)
                sequence.tables[group.index], sequence.slots[group.index] = table, slots

    def accepted_places(self, sequence: ModelSequence, group: GroupRule, accepted: int) -> tuple[list[int], list[int]]:
        """Return a sequence's table and slots in a group as they will be once so many tokens are accepted.

        A block of the table that others hold as well is given up by this sequence: it is no slot's.
        """
        table, slots = list(sequence.tables[group.index]), list(sequence.slots[group.index])
        stop = self._last_state(sequence, group, accepted)
        for index in group.indices(range(sequence.num_accepted, stop)):
            slot = (min((index + 1) * group.block_size, stop) - 1) % group.num_draft_states
            left = 0 if self.holders(group, sequence, index) > 1 else table[index]
            table[index], slots[slot] = slots[slot], left
        return table, slots

    @staticmethod
    def _last_state(sequence: ModelSequence, group: GroupRule, accepted: int) -> int:
        """Up to where positions that become accepted have states: as far as they are planned."""
        return max(sequence.num_accepted, min(accepted, sequence.planned_in(group)))

    def accepts_states(self, sequence: ModelSequence, group: GroupRule) -> bool:
        """Whether a state of a draft becomes current when all tokens of a sequence are accepted."""
        num_tokens = len(sequence.tokens)
        return group.num_draft_states > 0 and self._last_state(sequence, group, num_tokens) > sequence.num_accepted

    def lacking_slots(self, sequence: ModelSequence, group: GroupRule, count: int, num_draft: int) -> int:
        """Count the blocks that growing by known tokens takes for the states of drafts."""
        if not group.num_draft_states:
            return 0
        end = len(sequence.tokens) + count
        _, slots = self.accepted_places(sequence, group, len(sequence.tokens))
        wanted = {position % group.num_draft_states for position in range(end - num_draft, end)}
        num_idle = sum(block > 0 for slot, block in enumerate(slots) if slot not in wanted)
        return max(0, sum(not slots[slot] for slot in wanted) - num_idle)

    def took_slots(self, sequence: ModelSequence, num_draft: int) -> dict[str, int]:
        """A sequence has grown, and has a block for the state of each draft; count the blocks taken, by pool."""
        taken = dict.fromkeys(self.config.pool_names, 0)
        before, sequence.slots = sequence.slots, self.read_slots(sequence.row)
        for group in self.groups:
            old, slots = before[group.index], sequence.slots[group.index]
            end = len(sequence.tokens)
            wanted = {position % group.num_draft_states for position in range(end - num_draft, end)} if old else set()
            for slot, (left, right) in enumerate(zip(old, slots, strict=True)):
                assert left == right or ((not left) == (slot in wanted)), (
                    "a slot has changed that was not empty, or idle"
                )
                if right and right not in old:
                    self.hand_out(group.pool, right)
                    self.new_blocks.open.discard((group.pool, right))  # it need not be cleared
                    taken[group.pool] += 1
            assert set(filter(None, old)) <= set(slots), "a block of a draft's state was given up"
        return taken

    def require_slots(self, sequence: ModelSequence) -> None:
        """Every position that is not accepted has a slot, and no slot has a block that the table has."""
        for group in self.groups:
            slots = sequence.slots[group.index]
            for position in range(sequence.num_accepted, len(sequence.tokens)) if slots else ():
                assert slots[position % group.num_draft_states], f"the state of position {position} has no block"
            assert not set(filter(None, slots)) & set(sequence.tables[group.index])
