"""Eviction policies: any order of operations, beside a pool of lists and dicts; and models broken in one place."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

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

from pagedkv.blocks.eviction.adaptive import ADAPTIVE
from pagedkv.blocks.eviction.policy import LRU
from pagedkv.blocks.record import NULL_BLOCK
from tests.blocks.eviction_model import Block, Ghost, Model, NamedPool

pytestmark = pytest.mark.plain_only

FIRST = 2  # the first content
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)  # in a tree with two branches everywhere


@dataclass(slots=True)
class Held:
    """A sequence: its path in the tree, the blocks it holds of it, and how many of them it has named or found.

    Args:
        path: its contents; more of them than blocks, when the pool was too small.
        blocks: head first.
        num_named: leading blocks that it may continue; -1 when it will name none any more.
    """

    path: list[int]
    blocks: list[int]
    num_named: int


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run begins.

    Args:
        num_blocks: blocks that can be handed out.
        num_slots: of the ghost table; so few that digests collide, or none: LRU.
        clock: acquisitions so far.
        target: blocks to protect at most, in sixteenths of all.
        is_orderly: every sequence is released tail first.
        is_in_steps: steps are planned and settled.
    """

    num_blocks: int
    num_slots: int
    clock: int
    target: int
    is_orderly: bool
    is_in_steps: bool


class EvictionMachine(RuleBasedStateMachine):
    """Sequences that come, hit, grow, fork and go, in a pool and in its model."""

    model_class: ClassVar[type[Model]] = Model
    has_pool: ClassVar[bool] = True

    def __init__(self) -> None:
        """Start without a pool."""
        super().__init__()
        self.contents: dict[tuple[int, ...], int] = {}
        self.sequences: list[Held] = []

    @initialize(
        setting=st.builds(
            Setting,
            num_blocks=st.sampled_from([1, 2, 3, 5, 8, 12, 16, 20]),
            num_slots=st.sampled_from([0, 1, 2, 8, 64]),
            clock=st.sampled_from([0, 0, 2**32 - 7, 2**32 - 20]),
            target=st.sampled_from([2, 2, 0, 8, 15]),
            is_orderly=st.booleans(),
            is_in_steps=st.booleans(),
        )
    )
    def build(self, setting: Setting) -> None:
        """Build both."""
        if not self.has_pool:  # then it is about their order alone
            setting = replace(setting, num_slots=64, is_orderly=True)
        self.setting = setting
        num_blocks, num_slots = setting.num_blocks, setting.num_slots
        self.model = self.model_class(num_blocks, num_slots, setting.clock)
        self.pool = NamedPool(num_blocks, ADAPTIVE if num_slots else LRU, num_slots) if self.has_pool else None
        if self.pool is not None:
            self.pool.clock = setting.clock
        for side in self.both:
            side.target = setting.target * num_blocks if num_slots else 0

    @property
    def both(self) -> Iterator[Model | NamedPool]:
        """The model, and the pool if there is one."""
        yield self.model
        if self.pool is not None:
            yield self.pool

    @rule(paths=st.lists(PATHS, min_size=3, max_size=8), num_rounds=st.integers(1, 3))
    def serve(self, paths: list[list[int]], num_rounds: int) -> None:
        """Serve prompts in rounds, one at a time, each computed, named and given back before the next."""
        for path in num_rounds * paths:
            self.begin(path, len(path))
            self._release(self.sequences.pop().blocks[::-1])

    @rule(path=PATHS, num_named=st.integers(0, 6))
    def begin(self, path: list[int], num_named: int) -> None:
        """Hit the leading blocks of a prompt, acquire the rest while there is room, and name the first few."""
        contents = [self._content(path[: end + 1]) for end in range(len(path))]
        blocks: list[int] = []
        for content in contents:
            block = self.model.carrier(content)
            if block is None or block not in self.model.children(blocks[-1] if blocks else NULL_BLOCK):
                break
            blocks.append(block)
        for block in blocks:
            for side in self.both:
                side.reuse(block)
        sequence = Held(contents, blocks, len(blocks))
        while len(blocks) < len(contents) and self.model.free:
            blocks.append(self._acquire())
            if len(blocks) <= num_named:
                self._name_next(sequence)
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), num_blocks=st.integers(1, 3))
    def name_more(self, which: int, num_blocks: int) -> None:
        """Name more blocks of a sequence, as when a step has computed them."""
        for _ in range(num_blocks):
            self._name_next(self.sequences[which % len(self.sequences)])

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), length=st.integers(0, 6))
    def fork(self, which: int, length: int) -> None:
        """Share the leading blocks of a sequence."""
        parent = self.sequences[which % len(self.sequences)]
        shared = parent.blocks[:length]
        for block in shared:
            for side in self.both:
                side.share(block)
        self.sequences.append(Held(parent.path, shared, min(parent.num_named, len(shared))))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), length=st.integers(0, 6))
    def truncate(self, which: int, length: int) -> None:
        """Give back all but the leading blocks of a sequence, tail first."""
        sequence = self.sequences[which % len(self.sequences)]
        self._release(sequence.blocks[length:][::-1])
        del sequence.blocks[length:]
        sequence.num_named = min(sequence.num_named, length)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        """Give back a whole sequence, tail first."""
        self._release(self.sequences.pop(which % len(self.sequences)).blocks[::-1])

    @precondition(lambda self: self.sequences and not self.setting.is_orderly)
    @rule(which=st.integers(0, 99), random=st.randoms(use_true_random=False))
    def end_in_disorder(self, which: int, random: Random) -> None:
        """Give back a whole sequence in any order, as windows do."""
        blocks = self.sequences.pop(which % len(self.sequences)).blocks
        random.shuffle(blocks)
        self._release(blocks)

    @precondition(lambda self: self._named)
    @rule(which=st.integers(0, 99))
    def drop_name(self, which: int) -> None:
        """Make one block unfindable."""
        block = self._named[which % len(self._named)]
        for side in self.both:
            side.drop_name(block)

    @precondition(lambda self: len(self._named) > 4)
    @rule()
    def reset(self) -> None:
        """Make everything unfindable."""
        for side in self.both:
            side.drop_all_names()

    @precondition(lambda self: self.setting.is_in_steps)
    @rule()
    def plan_step(self) -> None:
        """Send a step on its way; what is released from now on waits for it."""
        for side in self.both:
            side.plan_step()

    @precondition(lambda self: self.model.open_step - 1 > self.model.settled_step)
    @rule(back=st.integers(0, 2))
    def settle(self, back: int) -> None:
        """End some of the steps in flight."""
        step = max(self.model.settled_step + 1, self.model.open_step - 1 - back)
        for side in self.both:
            side.settle(step)

    @invariant()
    def agree(self) -> None:
        """Lists, ranks, target, flows and ghosts are the same."""
        if self.pool is not None:
            self.pool.require_same(self.model)

    @property
    def _named(self) -> list[int]:
        return [block for block, state in self.model.blocks.items() if state.content is not None]

    def _content(self, path: list[int]) -> int:
        return self.contents.setdefault(tuple(path), FIRST + len(self.contents))

    def _acquire(self) -> int:
        victim = self.model.free[0]
        if self.model.blocks[victim].content is not None and self.setting.is_orderly:
            for side in self.both:
                assert side.children(victim) == [], "evicted while what continues it is cached"
        assert [side.acquire() for side in self.both] == [victim] * len(list(self.both))
        return victim

    def _name_next(self, sequence: Held) -> None:
        """Name the next block of a sequence, as publishing does; none after a duplicate or a name taken back."""
        index = sequence.num_named
        if not 0 <= index < len(sequence.blocks):
            return
        parent = sequence.blocks[index - 1] if index else NULL_BLOCK
        content = sequence.path[index]
        carrier = self.model.carrier(content)
        if (parent != NULL_BLOCK and self.model.blocks[parent].content is None) or (
            carrier is not None and carrier in self.model.children(parent)
        ):
            sequence.num_named = -1
            return
        for side in self.both:
            if carrier is not None:
                side.drop_name(carrier)
            side.name(sequence.blocks[index], content, parent)
        sequence.num_named += 1

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            for side in self.both:
                side.release(block)


def drive(
    model_class: type[Model], runs: int, *, has_pool: bool = True, phases: Sequence[Phase] = tuple(Phase)
) -> None:
    """Run a machine so many times."""
    machine = type("Machine", (EvictionMachine,), {"model_class": model_class, "has_pool": has_pool})
    profile = settings(settings.get_profile("pagedkv"), max_examples=runs, stateful_step_count=50)
    run_state_machine_as_test(machine, settings=settings(profile, phases=phases, database=None, print_blob=False))


def test_any_order_of_operations_evicts_as_the_model_does_and_never_a_parent_before_its_child() -> None:
    seen: Counter[str] = Counter()

    class Watched(Model):
        """Counts what is met."""

        def acquire(self) -> int:
            seen["a protected block is evicted"] += self.free[0] in self.protected
            return super().acquire()

        def _demote(self, block: int) -> None:
            seen["demoted"] += 1
            super()._demote(block)

        def _remember(self, content: int, *, was_reused: bool) -> None:
            seen["a ghost is overwritten"] += bool(self.num_slots) and self._slot(content) in self.ghosts
            super()._remember(content, was_reused=was_reused)

        def _halve_flows(self) -> None:
            seen["flows halved"] += 1
            super()._halve_flows()

        def _away(self, ghost: Ghost) -> int:
            away = super()._away(ghost)
            seen["away for too long" if away > self.num_blocks else "recalled"] += 1
            seen["after the clock wrapped"] += self.clock >= 2**32
            return away

        def _vote(self, ghost: Ghost) -> int:
            vote = super()._vote(ghost)
            seen["vote for the protected" if vote > 0 else "vote for the cold"] += 1
            seen["weighed"] += abs(vote) != 16  # what it is while flows are even
            return vote

        def settle(self, step: int) -> None:
            seen["deferred blocks freed"] += len(self.deferred) > 0
            super().settle(step)

    drive(Watched, max(200, 2 * settings().max_examples))  # in 60, some are not met
    assert len(seen) == 11


def test_any_order_of_operations_with_loops_as_plain_python() -> None:
    """Compiled here too; ``NUMBA_DISABLE_JIT=1`` makes the difference."""
    drive(Model, 30)


class DemotesToTheFront(Model):
    """Puts what is demoted where it goes next."""

    def _demote(self, block: int) -> None:
        self.cold.insert(0, block)


class ProtectsUnderAnyParent(Model):
    """Recalls content whatever it continues."""

    def _may_be_born_protected(self, parent: int) -> bool:
        return bool(self.num_slots) and parent >= NULL_BLOCK


class VotesTheOtherWay(Model):
    """Mixes up who wants which list to grow."""

    def _vote(self, ghost: Ghost) -> int:
        return -super()._vote(ghost)


class NeverForgets(Model):
    """Recalls content however long it was away."""

    def _away(self, ghost: Ghost) -> int:
        return min(super()._away(ghost), self.num_blocks)


class HasAClockThatDoesNotWrap(Model):
    """Counts acquisitions without end."""

    def _away(self, ghost: Ghost) -> int:
        return abs(self.clock - ghost.clock)


class NeverHalvesFlows(Model):
    """Lets evictions of long ago weigh as much as the last."""

    def _halve_flows(self) -> None:
        self.flows.countdown = self.num_blocks


class KeepsRanksOfDroppedNames(Model):
    """Leaves a block protected whose content is gone."""

    def _forget(self, state: Block) -> None:
        rank = state.is_protected, state.is_reused
        super()._forget(state)
        state.is_protected, state.is_reused = rank


class HasASlotForEachContent(Model):
    """Never overwrites a ghost with that of another content."""

    def _slot(self, content: int) -> int:
        return content


class EvictsTheProtectedFirst(Model):
    """Takes the lists in the wrong order."""

    @property
    def free(self) -> list[int]:
        """All free blocks."""
        return self.nameless + self.protected + self.cold


@pytest.mark.parametrize(
    "broken",
    [
        DemotesToTheFront,
        ProtectsUnderAnyParent,
        VotesTheOtherWay,
        NeverForgets,
        HasAClockThatDoesNotWrap,
        NeverHalvesFlows,
        KeepsRanksOfDroppedNames,
        HasASlotForEachContent,
        EvictsTheProtectedFirst,
    ],
)
def test_a_policy_that_differs_in_one_place_is_noticed(broken: type[Model]) -> None:
    with pytest.raises(AssertionError):
        drive(broken, 300, phases=[Phase.generate])


@pytest.mark.long
@pytest.mark.parametrize("broken", [DemotesToTheFront, ProtectsUnderAnyParent, EvictsTheProtectedFirst])
def test_an_order_that_is_not_prefix_closed_is_noticed_without_a_pool_beside_it(broken: type[Model]) -> None:
    with pytest.raises(AssertionError, match="evicted while what continues it is cached"):
        drive(broken, 1000, has_pool=False, phases=[Phase.generate])
