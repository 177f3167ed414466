"""The machine of :mod:`tests.blocks.test_eviction_machine`, for policies that act when a sequence ends."""

from collections.abc import Sequence
from typing import ClassVar

from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from pagedkv.blocks.eviction.policy import EvictionPolicy
from tests.blocks.eviction_model import Model, NamedPool
from tests.blocks.test_eviction_machine import PATHS, EvictionMachine, Setting

__all__ = ["EndingModel", "EndingPool", "drive_endings"]


class EndingModel(Model):
    """A model that is told which blocks a sequence ends with."""

    def end(self, blocks: list[int], number: int) -> None:
        """Note that a sequence with these blocks, head first, is about to be released."""
        raise NotImplementedError

    def require_same(self, pool: NamedPool) -> None:
        """Hold the pool against the model."""
        raise NotImplementedError


class EndingPool(NamedPool):
    """A pool that is told so."""

    def end(self, blocks: list[int], number: int) -> None:
        """Note that a sequence with these blocks, head first, is about to be released."""
        raise NotImplementedError


class EndingMachine(EvictionMachine):
    """Sequences that come, hit, fork and end, each with a number."""

    endings: ClassVar[tuple[type[EndingModel], type[EndingPool], EvictionPolicy]]

    @initialize(
        num_blocks=st.sampled_from([1, 2, 3, 5, 8, 12, 16, 20]), is_orderly=st.booleans(), is_in_steps=st.booleans()
    )
    def build(self, num_blocks: int, *, is_orderly: bool, is_in_steps: bool) -> None:
        """Build both."""
        model_class, pool_class, policy = self.endings
        self.setting = Setting(num_blocks, 0, 0, 0, is_orderly, is_in_steps)
        self.model: EndingModel = model_class(num_blocks, 0)
        self.pool: EndingPool = pool_class(num_blocks, policy)
        self.policy = policy

    @rule(paths=st.lists(PATHS, min_size=3, max_size=8), numbers=st.lists(st.integers(-2, 2), min_size=1))
    def serve(self, paths: list[list[int]], numbers: list[int]) -> None:
        """Serve prompts, one at a time, each computed, named and ended before the next."""
        for place, path in enumerate(paths):
            self.begin(path, len(path))
            self._end(-1, numbers[place % len(numbers)])

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), number=st.integers(-2, 2))
    def end(self, which: int, number: int) -> None:
        """End a sequence."""
        self._end(which % len(self.sequences), number)

    @precondition(lambda self: self.sequences and not self.setting.is_orderly)
    @rule(which=st.integers(0, 99), length=st.integers(0, 6))
    def truncate(self, which: int, length: int) -> None:
        """Give back all but the leading blocks of a sequence, which then have no number yet."""
        sequence = self.sequences[which % len(self.sequences)]
        self._release(sequence.blocks[length:][::-1])
        del sequence.blocks[length:]
        sequence.num_named = min(sequence.num_named, length)

    def _end(self, which: int, number: int) -> None:
        sequence = self.sequences.pop(which)
        for side in (self.model, self.pool):
            side.end(sequence.blocks, number)
        self._release(sequence.blocks[::-1])

    @invariant()
    def agree(self) -> None:
        """Lists and ranks are the same, and the policy's own check passes."""
        self.model.require_same(self.pool)
        num_cold = len(self.model.nameless) + len(self.model.cold)
        self.policy.check("device", self.pool.arrays, self.pool.free[:num_cold], self.pool.protected)


def drive_endings(
    model: type[EndingModel],
    pool: type[EndingPool],
    policy: EvictionPolicy,
    runs: int,
    phases: Sequence[Phase] = tuple(Phase),
) -> None:
    """Run the machine of a policy so many times."""
    machine = type("Machine", (EndingMachine,), {"endings": (model, pool, policy)})
    profile = settings(settings.get_profile("pagedkv"), max_examples=runs, stateful_step_count=40)
    run_state_machine_as_test(machine, settings=settings(profile, phases=phases, database=None, print_blob=False))
