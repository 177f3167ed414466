"""The state machine: every operation of a block space, in any order, against the model.

Arguments are drawn as small numbers and made to fit (``pick % len(...)``), so that nearly every step does
something and failures shrink to zeros. Questions are asked before each action and must agree with it.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv import AllocStatus, BlockSpace, MediaSpan, RequestKeys, Shortage, hash_request_tokens
from pagedkv.errors import PagedKVError, SequenceError, StepError, TooManySequencesError
from pagedkv.keys import NO_KEYS
from tests.space.misuse import misuses
from tests.space.mixes import Mix
from tests.space.sequence_model import ModelSequence
from tests.space.space_model import SpaceModel

__all__ = ["Sabotage", "SpaceMachine", "machine_of"]

Sabotage = Callable[[BlockSpace], None]

NUM_TOKEN_IDS: Final = 3
MOST_IN_FLIGHT: Final = 4
CALM_STEPS: Final = 20  # between resets, so that there is something to reset
KEYS: Final = (
    NO_KEYS,
    RequestKeys(salt=b"a"),
    RequestKeys(lora_name="a"),
    RequestKeys(lora_name="a", lora_version="2"),
    RequestKeys(media=(MediaSpan(1, 3, b"x"),)),
    RequestKeys(media=(MediaSpan(2, 3, b"x"), MediaSpan(9, 6, b"y"))),
    RequestKeys(salt=b"a", media=(MediaSpan(1, 3, b"y"),)),
)

PICK: Final = st.integers(0, 63)
TOKENS: Final = st.integers(0, NUM_TOKEN_IDS**8 - 1)
MOST_LOOKAHEAD: Final = 4
LOOKAHEAD: Final = st.sampled_from((0, 0, 0, 1, MOST_LOOKAHEAD))


class PromptDraw(NamedTuple):
    """A prompt, by numbers.

    Args:
        origin: an earlier sequence, counted from the latest, whose beginning it shares.
        cut: how many tokens it shares.
        num_new: how many follow; tail: which.
        key: the origin's extra keys, or some of ``KEYS``.
    """

    origin: int
    cut: int
    num_new: int
    tail: int
    key: int


PROMPTS: Final = st.builds(
    PromptDraw,
    origin=PICK,
    cut=st.integers(0, 24),
    num_new=st.integers(0, 9),
    tail=TOKENS,
    key=st.integers(0, 2 * len(KEYS) - 1),
)


def digits(number: int, base: int, count: int) -> list[int]:
    """The ``count`` lowest digits of a number, lowest first: a cheap way to draw short lists."""
    return [number // base**place % base for place in range(count)]


class SpaceMachine(RuleBasedStateMachine):
    """Drives one space of a group mix.

    Args:
        mix: the groups.
        seen: counts rules and interesting events over all runs.
        sabotage: breaks the space, for negative controls.
    """

    def __init__(self, mix: Mix, seen: Counter[str], sabotage: Sabotage | None = None) -> None:
        """Prepare; the space is built by the first rule."""
        super().__init__()
        self.mix = mix
        self.seen = seen
        self.sabotage = sabotage
        self.epoch = ""
        self.is_started = False  # building the space is no step
        self.calm = 0  # steps since the cache was reset
        self.origins: deque[tuple[list[int], RequestKeys]] = deque([([], NO_KEYS)], maxlen=6)

    @initialize(size=st.integers(0, 5))
    def build(self, size: int) -> None:
        """Build the space and expect it to be empty."""
        config = self.mix.config(size)
        self.space = BlockSpace(config)
        self.model = SpaceModel(config, self.space, self.seen)
        if self.sabotage:
            self.sabotage(self.space)

    @invariant()
    def check(self) -> None:
        """All counts agree and the space's own audit passes, after every rule."""
        self.model.check()
        self.seen["steps"] += self.is_started
        self.is_started = True
        self.calm += 1

    def teardown(self) -> None:
        """Let every run end with everything computed, read back, given up and free again."""
        if sys.exception() is None and hasattr(self, "model"):
            self._settle()
            rows = list(self.model.sequences)
            self.space.free(rows)
            self.model.freed(rows)
            self.model.check()
            for pool in (*self.model.statistics.pools, *self.model.statistics.host_pools):
                assert pool.num_free == pool.num_blocks, f"{pool.name}: blocks leaked"

    # Choosing

    def _choose(self, among: list[ModelSequence], mask: int) -> list[ModelSequence]:
        """A subset, not empty if there is any to choose from."""
        chosen = [sequence for place, sequence in enumerate(among) if mask >> place & 1]
        return chosen or among[mask % len(among) :][:1]

    # Admission

    @rule(draw=PROMPTS, num_lookahead=LOOKAHEAD)
    def allocate(self, draw: PromptDraw, num_lookahead: int) -> None:
        """Admit a prompt: the beginning of one seen before, and new tokens."""
        tokens, keys = self._prompt(draw)
        self._allocate(tokens, keys, num_lookahead, None)

    @rule(origin=PICK, num_new=st.integers(0, 2), tail=TOKENS)
    def allocate_again(self, origin: int, num_new: int, tail: int) -> None:
        """Admit a prompt seen before, perhaps with a turn more: in the same step, while it runs, or long after."""
        tokens, keys = self._prompt(PromptDraw(origin, self.model.config.max_tokens, num_new, tail, 0))
        self._allocate(tokens, keys, 0, None)

    @precondition(lambda self: self.mix.takes_digests)
    @rule(draw=PROMPTS, forgery=st.integers(0, 4))
    def allocate_with_digests(self, draw: PromptDraw, forgery: int) -> None:
        """Admit a prompt with digests from elsewhere: the right ones, or another prompt's, or nonsense."""
        tokens, keys = self._prompt(draw)
        others, _ = self._prompt(draw._replace(origin=forgery, cut=len(tokens), num_new=len(tokens)))
        digested = tokens if forgery < 2 else others[: len(tokens)]
        digests = hash_request_tokens(digested, self.mix.groups[0].block_size, keys, self.epoch)
        if forgery == 4:
            digests = [bytes([draw.cut % 2]) * 32] * len(digests)
        self._allocate(tokens, keys, 0, np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32))

    def _prompt(self, draw: PromptDraw) -> tuple[list[int], RequestKeys]:
        tokens, keys = self.origins[-1 - draw.origin % len(self.origins)]
        tokens = tokens[: draw.cut] + digits(draw.tail, NUM_TOKEN_IDS, draw.num_new)
        tokens = tokens[: self.model.config.max_tokens - MOST_LOOKAHEAD] or [0]
        return tokens, KEYS[draw.key - len(KEYS)] if draw.key >= len(KEYS) else keys

    def _allocate(
        self, tokens: list[int], keys: RequestKeys, num_lookahead: int, digests: npt.NDArray[np.uint8] | None
    ) -> None:
        space, model = self.space, self.model
        if (tokens, keys) not in self.origins:
            self.origins.append((tokens, keys))
        hit = space.match(tokens, keys=keys, digests=digests).num_tokens
        model.check_hit(len(tokens), hit)
        status = space.can_allocate(tokens, keys=keys, digests=digests, num_lookahead=num_lookahead)
        most = model.prompt_blocks(len(tokens), num_lookahead)
        is_possible = all(count <= model.num_usable[pool] for pool, count in most.items())
        assert status is not AllocStatus.NEVER or not is_possible
        assert status is not AllocStatus.LATER or is_possible
        try:
            answer = space.allocate(tokens, keys=keys, digests=digests, num_lookahead=num_lookahead)
        except TooManySequencesError:
            assert model.num_vacant == 0
            assert status is not AllocStatus.OK
            model.require_unchanged()
            return
        if isinstance(answer, Shortage):
            assert status is not AllocStatus.OK
            model.require_admission_shortage(answer, len(tokens), num_lookahead, hit)
            return
        assert answer.num_hit_tokens == hit
        needed = {pool: model.num_free(pool) - space.num_free_blocks(pool) for pool in most}
        is_ok = all(count <= model.num_free(pool) - model.kept_free(pool) for pool, count in needed.items())
        assert (status is AllocStatus.OK) == is_ok or not is_possible  # possible only by hits in windows
        model.allocated(answer.row, tokens, keys, num_lookahead, hit)

    # Growth

    @precondition(lambda self: self.model.running)
    @rule(
        mask=PICK, counts=st.integers(0, 4**6 - 1), tokens=TOKENS, num_lookahead=LOOKAHEAD, num_draft=st.integers(0, 3)
    )
    def append(self, mask: int, counts: int, tokens: int, num_lookahead: int, num_draft: int) -> None:
        """Append ragged numbers of tokens, the last ones perhaps drafts, to some rows."""
        batch = self._choose(self.model.running, mask)
        self._append(batch, digits(counts, 4, len(batch)), tokens, num_lookahead, num_draft)

    @precondition(lambda self: self.model.running)
    @rule(tokens=TOKENS)
    def decode(self, tokens: int) -> None:
        """Append one token to every running row."""
        self._append(self.model.running, [1] * len(self.model.running), tokens, 0, 0)

    @precondition(lambda self: self.model.running)
    @rule(pick=PICK, count=st.integers(4, 16), tokens=TOKENS)
    def append_chunk(self, pick: int, count: int, tokens: int) -> None:
        """Append the next chunk of a prompt to one row."""
        running = self.model.running
        self._append([running[pick % len(running)]], [count], tokens, 0, 0)

    def _append(
        self, batch: list[ModelSequence], counts: list[int], tokens: int, num_lookahead: int, num_draft: int
    ) -> None:
        space, model = self.space, self.model
        room = [model.config.max_tokens - len(sequence.tokens) for sequence in batch]
        num_lookahead = min(num_lookahead, *room)
        counts = [min(count, left - num_lookahead) for count, left in zip(counts, room, strict=True)]
        num_draft = min(num_draft, *counts) if self.mix.takes_drafts else 0
        new = digits(tokens, NUM_TOKEN_IDS, max(counts))
        appended = [new[:count] for count in counts]
        flat = [token for tokens_of_row in appended for token in tokens_of_row]
        rows = [sequence.row for sequence in batch]
        needed = model.growth(batch, counts, num_lookahead)
        fits = all(count <= model.num_free(pool) for pool, count in needed.items())
        assert space.can_append(rows, counts, num_lookahead=num_lookahead) == fits
        answer = space.append_with_copies(rows, flat, counts, num_lookahead=num_lookahead, num_draft=num_draft)
        assert isinstance(answer, Shortage) == (not fits)
        if isinstance(answer, Shortage):
            model.require_shortage(answer, needed)
            return
        copied = model.appended(batch, appended, num_lookahead, num_draft)
        first = self.mix.groups[0].pool
        assert sorted(block for _, block in answer) == sorted(block for pool, block in copied if pool == first)

    @precondition(lambda self: self.model.running)
    @rule(mask=PICK, back=st.integers(0, 7))
    def truncate(self, mask: int, back: int) -> None:
        """Roll some rows back by up to a few tokens: rejected drafts, or what the space must refuse."""
        batch = self._choose(self.model.running, mask)[:2]
        lengths = [len(sequence.tokens) - back // place for place, sequence in enumerate(batch, 1)]
        errors = {
            error
            for sequence, length in zip(batch, lengths, strict=True)
            for error in self.model.truncation_errors(sequence, length)
        }
        rows = [sequence.row for sequence in batch]
        if errors:
            with pytest.raises(tuple(errors)):
                self.space.truncate(rows, lengths)
            self.model.require_unchanged()
            return
        self.space.truncate(rows, lengths)
        for sequence, length in zip(batch, lengths, strict=True):
            self.model.truncated(sequence, length)

    # Sharing

    @precondition(lambda self: self.model.running)
    @rule(pick=PICK, num_children=st.integers(1, 3))
    def fork(self, pick: int, num_children: int) -> None:
        """Fork a row into several."""
        model = self.model
        parent = model.running[pick % len(model.running)]
        is_uncomputed = model.is_recurrent and parent.num_planned < len(parent.tokens)
        if is_uncomputed or num_children > model.num_vacant:
            with pytest.raises(SequenceError if is_uncomputed else TooManySequencesError):
                self.space.fork(parent.row, num_children)
            model.require_unchanged()
            return
        model.forked(parent, self.space.fork(parent.row, num_children).tolist())

    @precondition(lambda self: self.model.sequences)
    @rule(mask=PICK)
    def free(self, mask: int) -> None:
        """Give some sequences up, wherever they are."""
        batch = self._choose(list(self.model.sequences.values()), mask)
        self.origins += [(sequence.tokens, sequence.keys) for sequence in batch[:2]]
        rows = [sequence.row for sequence in batch]
        self.space.free(rows)
        self.model.freed(rows)

    @precondition(lambda self: self.model.sequences)
    @rule(pick=PICK)
    def free_one(self, pick: int) -> None:
        """Give one sequence up."""
        sequences = list(self.model.sequences.values())
        sequence = sequences[pick % len(sequences)]
        self.origins.append((sequence.tokens, sequence.keys))
        self.space.free(sequence.row)
        self.model.freed([sequence.row])

    # Swapping

    @precondition(lambda self: self.model.host_pools and self.model.running)
    @rule(mask=PICK)
    def swap_out(self, mask: int) -> None:
        """Move some rows to the host pools."""
        model = self.model
        batch = self._choose(model.running, mask)
        rows = [sequence.row for sequence in batch]
        needed = model.swap_out_needs(batch)
        status = self.space.can_swap_out(rows)
        fits = all(count <= model.num_free(label) for label, count in needed.items())
        is_possible = all(count <= model.num_usable[label] for label, count in needed.items())
        if not is_possible:
            assert status is AllocStatus.NEVER
        else:
            assert (status is AllocStatus.OK) == (fits and not model.is_moved_into(batch))
            assert status is not AllocStatus.NEVER
        if model.is_moved_into(batch):
            with pytest.raises(SequenceError):
                self.space.swap_out(rows)
            model.require_unchanged()
            return
        answer = self.space.swap_out(rows)
        assert isinstance(answer, Shortage) == (not fits)
        if isinstance(answer, Shortage):
            model.require_shortage(answer, needed)
        else:
            model.swapped_over(batch, answer, to_host=True)

    @precondition(lambda self: self.model.swapped)
    @rule(mask=PICK)
    def swap_in(self, mask: int) -> None:
        """Move some rows back to the device pools."""
        model = self.model
        batch = self._choose(model.swapped, mask)
        rows = [sequence.row for sequence in batch]
        needed = model.swap_in_needs(batch)
        status = self.space.can_swap_in(rows)
        if not all(count <= model.num_usable[pool] for pool, count in needed.items()):
            assert status is AllocStatus.NEVER
        else:
            is_ok = all(count <= model.num_free(pool) - model.kept_free(pool) for pool, count in needed.items())
            assert status is (AllocStatus.OK if is_ok else AllocStatus.LATER)
        answer = self.space.swap_in(rows)
        assert isinstance(answer, Shortage) == any(count > model.num_free(pool) for pool, count in needed.items())
        if isinstance(answer, Shortage):
            model.require_shortage(answer, needed)
        else:
            model.swapped_over(batch, answer, to_host=False)

    # Steps

    @precondition(lambda self: len(self.model.in_flight) < MOST_IN_FLIGHT)
    @rule()
    def plan(self) -> None:
        """Close the open step; the device will run it later."""
        self.model.close_step(self.space.plan_step())

    @precondition(lambda self: self.model.planned)
    @rule()
    def run(self) -> None:
        """Let the device run the next plan."""
        self.model.run_step()

    @precondition(lambda self: self.model.ran)
    @rule()
    def acknowledge(self) -> None:
        """Acknowledge the oldest step."""
        self.space.acknowledge(self.model.ran[0].plan.step_id)
        self.model.acknowledged()

    @rule()
    def step(self) -> None:
        """Plan, run and acknowledge all there is: synchronous scheduling."""
        self._settle()

    def _settle(self) -> None:
        self.model.close_step(self.space.plan_step())
        while self.model.planned:
            self.model.run_step()
        while self.model.ran:
            self.space.acknowledge(self.model.ran[0].plan.step_id)
            self.model.acknowledged()

    @precondition(lambda self: self.model.in_flight)
    @rule(pick=PICK, num_parts=st.integers(0, 5), garbage=st.booleans())
    def abort(self, pick: int, num_parts: int, *, garbage: bool) -> None:
        """Let a step in flight fail, with any part of its work done, right or wrong."""
        position = pick % len(self.model.in_flight)
        answer = self.space.abort(self.model.in_flight[position].plan.step_id)
        self.model.aborted(answer, position, num_parts, garbage=garbage)

    @precondition(lambda self: self.model.running)
    @rule(mask=PICK)
    def mark_computed(self, mask: int) -> None:
        """Bring the content of some rows from elsewhere."""
        if self.model.is_recurrent and self.model.in_flight:
            with pytest.raises(StepError):
                self.space.mark_computed([sequence.row for sequence in self._choose(self.model.running, mask)])
            self.model.require_unchanged()
            return
        batch = [sequence for sequence in self._choose(self.model.running, mask) if self.model.may_be_marked(sequence)]
        self.space.mark_computed([sequence.row for sequence in batch])
        self.model.marked_computed(batch)

    # The cache as a whole, questions, misuse

    @precondition(lambda self: self.calm > CALM_STEPS)
    @rule(new_weights=st.booleans())
    def forget(self, *, new_weights: bool) -> None:
        """Reset the prefix cache, or start a new weights epoch (now and then one that was there before)."""
        if new_weights:
            self.epoch = "" if self.epoch == "b" else chr(ord("a") + (self.epoch == "a"))
            self.space.set_weights_epoch(self.epoch)
        else:
            self.space.reset_prefix_cache()
        self.model.forgot_cache()
        self.calm = 0

    @rule(draw=PROMPTS, mask=PICK, num_lookahead=LOOKAHEAD)
    def ask(self, draw: PromptDraw, mask: int, num_lookahead: int) -> None:
        """Ask everything that can be asked: nothing changes."""
        space, model = self.space, self.model
        tokens, keys = self._prompt(draw)
        model.check_hit(len(tokens), space.match(tokens, keys=keys).num_tokens)
        space.can_allocate(tokens, keys=keys, num_lookahead=num_lookahead)
        if model.running:
            batch = self._choose(model.running, mask)
            for sequence in batch:
                assert space.num_tokens(sequence.row) == len(sequence.tokens)
                model.check_computed(sequence)
            room = min(model.config.max_tokens - len(sequence.tokens) for sequence in batch)
            counts = [min(room, draw.tail % 7)] * len(batch)
            num_lookahead = min(room - counts[0], num_lookahead)
            space.can_append([sequence.row for sequence in batch], counts, num_lookahead=num_lookahead)
            space.can_swap_out([sequence.row for sequence in batch])
        if model.swapped:
            space.can_swap_in([sequence.row for sequence in self._choose(model.swapped, mask)])
        model.require_unchanged()

    @rule(kind=st.integers(0, 127), pick=PICK)
    def misuse(self, kind: int, pick: int) -> None:
        """Do something wrong: a clear error of ours, and nothing changes."""
        possible = misuses(self.space, self.model, pick)
        error, act = possible[kind % len(possible)]
        with pytest.raises(error) as caught:
            act()
        assert isinstance(caught.value, PagedKVError)
        self.model.require_unchanged()


def machine_of(mix: Mix, seen: Counter[str], sabotage: Sabotage | None = None) -> type[SpaceMachine]:
    """Make the class of machines for one mix, as Hypothesis wants it: without arguments."""

    class Machine(SpaceMachine):
        def __init__(self) -> None:
            super().__init__(mix, seen, sabotage)

    return Machine
