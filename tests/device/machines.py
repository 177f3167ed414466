"""The state machines of the space, with a body: every plan is carried out on tensors as well."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.device.body import Body, BodyDevice
from tests.space.mixes import Mix
from tests.space.overlap_machine import OverlapMachine, Planned, WithoutWindows as OverlapWithoutWindows
from tests.space.sequence_model import ModelSequence
from tests.space.space_machine import COUNTS, PLACE, PLACES, TOKEN, SpaceMachine, WithoutWindows as SpaceWithoutWindows

__all__ = ["overlap_machine_with_body", "space_machine_with_body"]


class SpaceMachineWithBody(SpaceMachine):
    """Any operation: swaps, copies, forks, aborts, loads, memory given back; several steps in flight."""

    device_name = "cpu"

    def build_space(self, size: int) -> None:
        super().build_space(size)
        model = self.model
        self.body = Body(model.config, model.groups, self.device_name)
        model.device = BodyDevice.beside(model.device, model.groups, self.body)

    # What moves blocks, drawn more often than in the machine of the core: a body is about moves.

    @precondition(lambda self: self.model.host_pools and self.model.running)
    @rule(places=PLACES, counts=COUNTS, is_late=st.booleans())
    def swap_there_and_back(self, places: list[int], counts: list[int], *, is_late: bool) -> None:
        """Swap some rows out, and those that went back in, perhaps in the same step; run what comes of it."""
        self.swap_out(places)
        self.check()
        if not is_late:
            self.settle()
            self.check()
        if self.model.swapped:
            self.swap_in(places, counts, 0)
            self.check()
        self.settle()

    @precondition(lambda self: self.model.running)
    @rule(place=PLACE, num_children=st.integers(1, 2), token=TOKEN)
    def fork_and_decode(self, place: int, num_children: int, token: int) -> None:
        """Let a row and its children write into the block that they share."""
        self.fork(place, num_children)
        self.check()
        self.decode(token)
        self.check()
        self.settle()

    def declare_computed(self, batch: list[ModelSequence]) -> None:
        """Write content from elsewhere behind the plans that hand out its blocks, since those zero them."""
        while self.model.planned:
            self.run_step()
            self.check()
        super().declare_computed(batch)

    def abort_step(self, position: int, num_parts: int, *, garbage: bool) -> None:
        step_ids = [step.plan.step_id for step in self.model.in_flight[position:]]
        super().abort_step(position, num_parts, garbage=garbage)
        self.body.abort(step_ids)


class OverlapMachineWithBody(OverlapMachine):
    """Unknown tokens: what was refused moves the ranges of later steps on the device."""

    device_name = "cpu"

    @initialize(size=st.integers(0, 5))
    def build(self, size: int) -> None:
        super().build(size)
        self.body = Body(self.config, self.groups, self.device_name)
        self.device = BodyDevice.beside(self.device, self.groups, self.body)

    @precondition(lambda self: self.planned)
    @rule(place=PLACE)
    def abort(self, place: int) -> None:
        step_ids = [each.plan.step_id for each in self.planned[place % len(self.planned) :]]
        super().abort(place)
        self.body.abort(step_ids)

    def _run(self, planned: Planned, luck: int) -> None:
        super()._run(planned, luck)
        refused = {}
        for seen in planned.rows:
            assert seen.mine.sample is not None
            tokens, shift = self._device_tokens(seen)
            num_guesses = max(0, seen.end - shift - len(tokens))
            refused[seen.row.number] = num_guesses + 1 - len(seen.mine.sample)
        if refused:
            self.body.refuse(planned.plan.step_id, refused)


def space_machine_with_body(mix: Mix, seen: Counter[str], device: str = "cpu") -> type[SpaceMachineWithBody]:
    """Make the class of machines for one mix, as Hypothesis wants it: without arguments."""

    class Machine(SpaceMachineWithBody):
        device_name = device

        def __init__(self) -> None:
            super().__init__(mix, seen)

    class Replaying(SpaceWithoutWindows, Machine):
        pass

    return Replaying if mix.replays else Machine


def overlap_machine_with_body(mix: Mix, seen: Counter[str], device: str = "cpu") -> type[OverlapMachineWithBody]:
    """Make the class of machines for one mix."""

    class Machine(OverlapMachineWithBody):
        device_name = device

        def __init__(self) -> None:
            super().__init__(mix, seen)

    class Replaying(OverlapWithoutWindows, Machine):
        pass

    return Replaying if mix.replays else Machine
