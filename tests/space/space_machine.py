"""The state machine: every operation of a block space, in any order, against the model.

Rows are drawn as lists of small numbers and made to fit (``place % len(...)``), so that nearly every step does
something; tokens as lists; prompts from a bundle of those seen before. All of them shrink to few and small ones.
"""

from collections import Counter
from typing import Final, Literal

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, initialize, multiple, precondition, rule

from pagedkv import MediaSpan, RequestKeys, hash_request_tokens
from pagedkv.contract.keys import NO_KEYS
from pagedkv.errors import PagedKVError, StepError
from tests.space.misuse import misuses
from tests.space.mixes import Mix
from tests.space.operations import MOST_LOOKAHEAD, Digests, Prompt, Sabotage, SpaceOperations
from tests.space.sequence_model import ModelSequence

__all__ = ["Sabotage", "SpaceMachine", "WithoutWindows", "machine_of"]

MOST_IN_FLIGHT: Final = 4
NUM_HEIRS: Final = 4  # rows that share what one of them is to compute
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
NO_PROMPT: Final[Prompt] = ((), NO_KEYS)

PLACE: Final = st.integers(0, 5)
PLACES: Final = st.lists(PLACE, min_size=1, max_size=6)
TOKEN: Final = st.integers(0, 2)
TOKENS: Final = st.lists(TOKEN, max_size=8)
CHUNK: Final = st.lists(TOKEN, min_size=4, max_size=16)
COUNTS: Final = st.lists(st.integers(0, 3), min_size=1, max_size=6)
LENGTH: Final = st.integers(0, 24)
DRAFTS: Final = st.lists(st.integers(0, 3), min_size=1, max_size=3)
LOOKAHEAD: Final = st.sampled_from((0, 0, 0, 1, MOST_LOOKAHEAD))
INTENT: Final = st.sampled_from(("", "", "", "end", "end", "low", "high", "lease", "superseded"))
OTHER_KEYS: Final = st.none() | st.sampled_from(KEYS)
RUN: Final = st.sampled_from((1, 1, 2, 3))
TENANT: Final = st.sampled_from((0, 1, 1, 2, 2))

prompts: Final[Bundle[Prompt]] = Bundle("prompts")


class SpaceMachine(SpaceOperations):
    """Draws any operation."""

    def __init__(self, mix: Mix, seen: Counter[str], sabotage: Sabotage | None = None) -> None:
        """Prepare; the space is built by the first rule."""
        super().__init__(mix, seen, sabotage)
        self.epoch = ""
        self.last_reset = self.last_epoch = 0
        self.origins = {NO_PROMPT}

    @initialize(target=prompts, size=st.integers(0, 5))
    def build(self, size: int) -> Prompt:
        """Build the space; the first prompts begin with nothing."""
        self.build_space(size)
        return NO_PROMPT

    # Choosing

    @staticmethod
    def _choose(among: list[ModelSequence], places: list[int]) -> list[ModelSequence]:
        """Some different sequences, in any order."""
        return list(dict.fromkeys(among[place % len(among)] for place in places))

    def _prompt(self, origin: Prompt, cut: int, tokens: list[int], keys: RequestKeys | None) -> Prompt:
        """Continue the beginning of a prompt, with its extra keys or others."""
        most = self.model.config.max_tokens - MOST_LOOKAHEAD
        return (*origin[0][:cut], *tokens)[:most] or (0,), origin[1] if keys is None else keys

    def _as_origins(self, *known: Prompt) -> MultipleResults[Prompt]:
        """Keep prompts to be continued later, each once."""
        new = [prompt for prompt in dict.fromkeys(known) if prompt not in self.origins]
        self.origins.update(new)
        return multiple(*new)

    # Admission

    @rule(
        target=prompts,
        origin=prompts,
        cut=LENGTH,
        tokens=TOKENS,
        keys=OTHER_KEYS,
        num_lookahead=LOOKAHEAD,
        tenant=TENANT,
    )
    def allocate(  # noqa: PLR0913, PLR0917 - one draw for each argument
        self, origin: Prompt, cut: int, tokens: list[int], keys: RequestKeys | None, num_lookahead: int, tenant: int
    ) -> MultipleResults[Prompt]:
        """Admit a prompt: the beginning of one seen before, and new tokens."""
        prompt = self._prompt(origin, cut, tokens, keys)
        self.allocate_prompt(prompt, num_lookahead, tenant=self.payer(tenant))
        return self._as_origins(prompt)

    @rule(target=prompts, origin=prompts, tokens=st.lists(TOKEN, max_size=2), tenant=TENANT)
    def allocate_again(self, origin: Prompt, tokens: list[int], tenant: int) -> MultipleResults[Prompt]:
        """Admit a prompt seen before, perhaps with a turn more: in the same step, while it runs, or long after."""
        prompt = self._prompt(origin, len(origin[0]), tokens, None)
        self.allocate_prompt(prompt, tenant=self.payer(tenant))
        return self._as_origins(prompt)

    @rule(
        target=prompts,
        origins=st.lists(prompts, min_size=1, max_size=3),
        cut=LENGTH,
        tokens=TOKENS,
        num_lookahead=LOOKAHEAD,
        tenant=TENANT,
    )
    def allocate_several(
        self, origins: list[Prompt], cut: int, tokens: list[int], num_lookahead: int, tenant: int
    ) -> MultipleResults[Prompt]:
        """Ask how many of some prompts fit together, and admit these."""
        several = [self._prompt(origin, cut + place, [*tokens, place], None) for place, origin in enumerate(origins)]
        tenants = [self.payer(tenant + place) for place in range(len(several))]
        self.allocate_together(several, num_lookahead, tenants)
        return self._as_origins(*several)

    @precondition(lambda self: self.mix.tenants)
    @rule(number=st.integers(1, 2), cap=st.integers(1, 10), floor=st.integers(0, 4))
    def change_limits(self, number: int, cap: int, floor: int) -> None:
        """Add a tenant, or give one other limits."""
        self.set_tenant(list(self.mix.tenants)[number - 1], (cap, floor))

    @precondition(lambda self: self.mix.tenants)
    @rule(number=st.integers(1, 2))
    def drop_tenant(self, number: int) -> None:
        """Remove a tenant, if it has no sequences."""
        self.remove_tenant(list(self.mix.tenants)[number - 1])

    @precondition(lambda self: self.mix.keeps_states)
    @rule(
        target=prompts,
        origin=prompts,
        cut=LENGTH,
        tokens=TOKENS,
        keys=OTHER_KEYS,
        num_lookahead=LOOKAHEAD,
        tenant=TENANT,
    )
    def allocate_in_chunks(  # noqa: PLR0913, PLR0917 - one draw for each argument
        self, origin: Prompt, cut: int, tokens: list[int], keys: RequestKeys | None, num_lookahead: int, tenant: int
    ) -> MultipleResults[Prompt]:
        """Admit a prompt up to where its states are to be kept."""
        prompt = self._prompt(origin, cut, tokens, keys)
        self.allocate_prompt(prompt, num_lookahead, in_chunks=True, tenant=self.payer(tenant))
        return self._as_origins(prompt)

    @precondition(lambda self: self.mix.takes_digests)
    @rule(origin=prompts, cut=LENGTH, tokens=TOKENS, other=prompts, kind=st.sampled_from(("own", "another's", "zeros")))
    def allocate_with_digests(self, origin: Prompt, cut: int, tokens: list[int], other: Prompt, kind: str) -> None:
        """Admit a prompt with digests from elsewhere: the right ones, or another prompt's, or nonsense."""
        prompt = self._prompt(origin, cut, tokens, None)
        others = (*other[0], *prompt[0])[: len(prompt[0])]
        self.is_forged |= kind != "own"
        self.has_wrong_names |= kind != "own"
        self.allocate_prompt(prompt, 0, self._digests(others if kind == "another's" else prompt[0], prompt[1], kind))

    def _digests(self, tokens: tuple[int, ...], keys: RequestKeys, kind: str) -> Digests:
        block_size = next(group.block_size for group in self.mix.groups if group.prefix_caching)
        digests = hash_request_tokens(list(tokens), block_size, keys, self.epoch)
        if kind == "zeros":
            digests = [bytes(32)] * len(digests)
        return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)

    # Growth

    @precondition(lambda self: self.model.running)
    @rule(places=PLACES, counts=COUNTS, tokens=TOKENS, num_lookahead=LOOKAHEAD, num_drafts=DRAFTS)
    def append(
        self, places: list[int], counts: list[int], tokens: list[int], num_lookahead: int, num_drafts: list[int]
    ) -> None:
        """Append ragged numbers of tokens, the last ones perhaps drafts, to some rows."""
        batch = self._choose(self.model.running, places)
        new = [tokens[: counts[place % len(counts)]] for place in range(len(batch))]
        self.append_tokens(batch, new, num_lookahead, num_drafts)

    @precondition(lambda self: self.model.running)
    @rule(token=TOKEN)
    def decode(self, token: int) -> None:
        """Append one token to every running row."""
        self.append_tokens(self.model.running, [[token]] * len(self.model.running))

    @precondition(lambda self: self.model.running)
    @rule(place=PLACE, tokens=CHUNK)
    def append_chunk(self, place: int, tokens: list[int]) -> None:
        """Append the next chunk of a prompt to one row."""
        self.append_tokens(self._choose(self.model.running, [place]), [tokens])

    @precondition(lambda self: self.mix.keeps_states and self.model.running)
    @rule(place=PLACE, ahead=st.integers(-2, 14), tokens=CHUNK, more=TOKENS)
    def append_over_kept_states(self, place: int, ahead: int, tokens: list[int], more: list[int]) -> None:
        """Name a position before or inside the next chunk of a row, and append that."""
        (sequence,) = self._choose(self.model.running, [place])
        self.keep_state(sequence, max(1, len(sequence.tokens) + ahead))
        self.check()
        self.append_tokens([sequence], [tokens])
        if more:
            self.check()
            self.append_tokens([sequence], [more])

    @precondition(lambda self: self.mix.keeps_states)
    @rule(target=prompts, origin=prompts, tokens=CHUNK, position=LENGTH, tenant=TENANT)
    def allocate_over_kept_states(
        self, origin: Prompt, tokens: list[int], position: int, tenant: int
    ) -> MultipleResults[Prompt]:
        """Admit a prompt, and name a position inside of what it computes."""
        prompt, before = self._prompt(origin, len(origin[0]), tokens, None), set(self.model.sequences)
        self.allocate_prompt(prompt, tenant=self.payer(tenant))
        new = [sequence for sequence in self.model.running if sequence.row not in before]
        if new:
            self.check()
            self.keep_state(new[0], max(1, min(len(prompt[0]), position)))
        return self._as_origins(prompt, (prompt[0][: position + 1], prompt[1]))

    @precondition(lambda self: self.model.running)
    @rule(places=PLACES, back=st.integers(0, 7))
    def truncate(self, places: list[int], back: int) -> None:
        """Roll some rows back by up to a few tokens."""
        batch = self._choose(self.model.running, places)[:2]
        self.truncate_rows(batch, [len(sequence.tokens) - back // place for place, sequence in enumerate(batch, 1)])

    @precondition(lambda self: self.unplanned_drafts)
    @rule(places=PLACES, drafts=st.lists(TOKEN, min_size=1, max_size=3), count=st.integers(1, 3))
    def redraft(self, places: list[int], drafts: list[int], count: int) -> None:
        """Give drafts other ids, before a step computes them."""
        batch = self._choose(self.unplanned_drafts, places)
        self.replace_drafts(batch, [drafts if place % 2 else drafts[:count] for place in range(len(batch))])

    @property
    def unplanned_drafts(self) -> list[ModelSequence]:
        """Rows that have drafts, of which no plan computes any; the memory of the model is written with the plan."""
        return [
            sequence
            for sequence in self.model.running
            if len(sequence.tokens) > sequence.num_accepted >= sequence.num_planned
        ]

    # Sharing

    @precondition(lambda self: self.model.running)
    @rule(place=PLACE, num_children=st.integers(1, 3))
    def fork(self, place: int, num_children: int) -> None:
        """Fork a row into several."""
        (parent,) = self._choose(self.model.running, [place])
        self.fork_row(parent, num_children)

    @precondition(lambda self: self.model.running)
    @rule(place=PLACE, num_children=st.integers(1, 3), back=st.integers(1, 12))
    def fork_at(self, place: int, num_children: int, back: int) -> None:
        """Fork a row into several that begin with less than all of it."""
        (parent,) = self._choose(self.model.running, [place])
        if len(parent.tokens) > 1:
            self.branch_row(parent, num_children, max(1, len(parent.tokens) - back))

    @precondition(lambda self: self.model.sequences)
    @rule(target=prompts, places=PLACES, intent=INTENT, num_generated=st.sampled_from((None, 0, 5, 500)))
    def free(self, places: list[int], intent: str, num_generated: int | None) -> MultipleResults[Prompt]:
        """Give some sequences up, wherever they are; later prompts may continue them."""
        batch = self._choose(list(self.model.sequences.values()), places)
        self.free_rows(batch, intent, num_generated)
        return self._as_origins(*((tuple(sequence.tokens), sequence.keys) for sequence in batch[:2]))

    @rule(target=prompts, origin=prompts, chunk=CHUNK, cut=st.integers(0, 8), places=PLACES, swapped=st.booleans())
    def leave_to_heirs(
        self, origin: Prompt, chunk: list[int], cut: int, places: list[int], *, swapped: bool
    ) -> MultipleResults[Prompt]:
        """Rows share what one of them is to compute in the open step, beside a step in flight; some leave together."""
        if len(self.model.in_flight) < MOST_IN_FLIGHT:
            self.plan_step()
            self.check()
        self.free_rows(self.model.running[: max(0, NUM_HEIRS - self.model.num_vacant)])
        self.check()
        prompt, before = self._prompt(origin, len(origin[0]), chunk, None), list(self.model.sequences)
        for length in (len(prompt[0]), len(prompt[0]), max(1, len(prompt[0]) - cut)):
            self.allocate_prompt((prompt[0][:length], prompt[1]))
            self.check()
        tied = [sequence for sequence in self.model.running if sequence.row not in before]
        if tied and not self.model.is_recurrent:
            self.fork_row(tied[0], 1)
            self.check()
            self.append_tokens(self.model.running[-1:], [chunk[:1]])
            self.check()
        leaving = self._choose(tied, places[:2]) if tied else []
        if leaving and swapped and self.model.host_pools:
            self.swap_rows_out(leaving)
        elif leaving:
            self.free_rows(leaving)
        return self._as_origins(prompt)

    @precondition(lambda self: self.mix.keeps_states and self.model.running)
    @rule(target=prompts, place=PLACE, tokens=st.lists(TOKEN, min_size=1, max_size=3), settles=st.booleans())
    def next_turn(self, place: int, tokens: list[int], settles: bool) -> MultipleResults[Prompt]:  # noqa: FBT001
        """End a sequence, keep its state, and go on from there with another."""
        if settles:
            self.settle()
        (ended,) = self._choose(self.model.running, [place])
        prompt = self._prompt((tuple(ended.tokens), ended.keys), len(ended.tokens), tokens, None)
        self.free_rows([ended], "end")
        self.check()
        self.allocate_prompt(prompt, tenant=self.payer(0))
        return self._as_origins(prompt)

    # Time

    @rule(seconds=st.sampled_from((0, 1, 3, 30, 10_000)))
    def advance(self, seconds: int) -> None:
        """Let time pass: leases end, and ages grow."""
        self.advance_clock(seconds)

    # Content that is to stay, and content that is not

    @precondition(lambda self: self.model.config.leases)
    @rule(origin=prompts, cut=LENGTH, seconds=st.integers(1, 9))
    def lease(self, origin: Prompt, cut: int, seconds: int) -> None:
        """Keep what is cached of a prompt."""
        self.lease_prompt(self._prompt(origin, cut, [0], None), seconds)

    @rule(origin=prompts, tokens=st.lists(TOKEN, max_size=2))
    def touch(self, origin: Prompt, tokens: list[int]) -> None:
        """Touch a prompt, perhaps with a turn more."""
        self.touch_prompt(self._prompt(origin, len(origin[0]), tokens, None))

    @rule(count=st.sampled_from((1, 1, 2, 3, 50)), pool=st.integers(0, 1))
    def evict(self, count: int, pool: int) -> None:
        """Evict cached blocks now."""
        self.evict_blocks(count, pool)

    @rule(num_runs=st.integers(0, 3), run=RUN, pool=st.integers(0, 1))
    def shrink(self, num_runs: int, run: int, pool: int) -> None:
        """Give blocks of a pool back."""
        self.shrink_pool(num_runs, run, pool)

    @rule(num_runs=st.integers(0, 3), run=RUN, pool=st.integers(0, 1))
    def grow(self, num_runs: int, run: int, pool: int) -> None:
        """Take blocks back that were given away."""
        self.grow_pool(num_runs, run, pool)

    @precondition(lambda self: any(self.model.absent.values()))
    @rule()
    def grow_whole(self) -> None:
        """Take all blocks back, so that pools are not small for long."""
        for number, pool in enumerate(self.model.config.pool_names):
            self.grow_pool(len(self.model.absent[pool]), 1, number)

    @precondition(lambda self: self.num_steps - self.last_reset > CALM_STEPS)
    @rule(origin=prompts, cut=LENGTH, start=st.integers(0, 9))
    def forget_some(self, origin: Prompt, cut: int, start: int) -> None:
        """Forget a prompt, or its end."""
        self.forget_prompt(self._prompt(origin, cut, [], None), start)
        self.last_reset = self.num_steps

    @rule(target=prompts, origin=prompts, tokens=TOKENS, policy=st.sampled_from((False, "prompt")))
    def allocate_quietly(
        self, origin: Prompt, tokens: list[int], policy: "bool | Literal['prompt']"
    ) -> MultipleResults[Prompt]:
        """Admit a prompt that publishes nothing, or only itself."""
        prompt = self._prompt(origin, len(origin[0]), tokens, None)
        self.allocate_prompt(prompt, publish=policy)
        return self._as_origins(prompt)

    # Content from elsewhere

    @rule(origin=prompts, cut=LENGTH, tokens=TOKENS, keys=OTHER_KEYS, most=LENGTH, lag=st.integers(0, 2), tenant=TENANT)
    def load(  # noqa: PLR0913, PLR0917 - one draw for each argument
        self, origin: Prompt, cut: int, tokens: list[int], keys: RequestKeys | None, most: int, lag: int, tenant: int
    ) -> None:
        """Reserve blocks for a prefix that the caller brings, perhaps of older weights."""
        self.load_prefix(self._prompt(origin, cut, tokens, keys), most, lag, self.payer(tenant))

    @precondition(lambda self: self.model.loads)
    @rule(place=PLACE, num_tokens=LENGTH)
    def finish(self, place: int, num_tokens: int) -> None:
        """Bring it, or a part of it, or nothing."""
        load = self.model.loads[place % len(self.model.loads)]
        self.finish_load(load, min(num_tokens, load.answer.num_tokens))

    # Swapping

    @precondition(lambda self: self.model.host_pools and self.model.running)
    @rule(places=PLACES)
    def swap_out(self, places: list[int]) -> None:
        """Move some rows to the host pools."""
        self.swap_rows_out(self._choose(self.model.running, places))

    @precondition(lambda self: self.model.swapped)
    @rule(places=PLACES, counts=COUNTS, num_lookahead=LOOKAHEAD)
    def swap_in(self, places: list[int], counts: list[int], num_lookahead: int) -> None:
        """Move some rows back to the device pools, asking for room for their next tokens."""
        batch = self._choose(self.model.swapped, places)
        self.swap_rows_in(batch, [counts[place % len(counts)] for place in range(len(batch))], num_lookahead)

    # Steps

    @precondition(lambda self: len(self.model.in_flight) < MOST_IN_FLIGHT)
    @rule()
    def plan(self) -> None:
        """Close the open step; the device will run it later."""
        self.plan_step()

    @precondition(lambda self: self.model.planned)
    @rule()
    def run(self) -> None:
        """Let the device run the next plan."""
        self.run_step()

    @precondition(lambda self: self.model.ran)
    @rule()
    def acknowledge(self) -> None:
        """Acknowledge the oldest step."""
        self.acknowledge_step()

    @rule()
    def step(self) -> None:
        """Plan, run and acknowledge all there is: synchronous scheduling."""
        self.settle()

    @precondition(lambda self: self.model.in_flight)
    @rule(place=PLACE, num_parts=st.integers(0, 5), garbage=st.booleans())
    def abort(self, place: int, num_parts: int, *, garbage: bool) -> None:
        """Let a step in flight fail, with any part of its work done, right or wrong."""
        self.abort_step(place % len(self.model.in_flight), num_parts, garbage=garbage)

    @precondition(lambda self: self.model.running)
    @rule(places=PLACES)
    def mark_computed(self, places: list[int]) -> None:
        """Bring the content of some rows from elsewhere."""
        self.declare_computed(self._choose(self.model.running, places))

    # The cache as a whole, questions, misuse

    @precondition(lambda self: self.num_steps - self.last_reset > CALM_STEPS)
    @rule(new_weights=st.booleans())
    def forget(self, *, new_weights: bool) -> None:
        """Reset the prefix cache, or start a new weights epoch (now and then one that was there before)."""
        new_weights &= not self.model.config.counts_epochs
        self._note("start a new weights epoch" if new_weights else "reset the prefix cache")
        if new_weights:
            self.epoch = "" if self.epoch == "b" else chr(ord("a") + (self.epoch == "a"))
            self.space.set_weights_epoch(self.epoch)
            self.explaining.epochs.append(self.epoch)
        else:
            self.space.reset_prefix_cache()
        self.model.forgot_cache()
        self.last_reset = self.num_steps

    @precondition(lambda self: self.model.config.counts_epochs and self.num_steps - self.last_epoch > CALM_STEPS // 3)
    @rule(ahead=st.sampled_from((1, 1, 1, 2, 0, -1)))
    def next_epoch(self, ahead: int) -> None:
        """New weights, while rows run, wait, and are on the host; or an epoch that goes back."""
        self.begin_epoch(max(0, self.model.epoch + ahead))
        self.last_epoch = self.num_steps

    @precondition(lambda self: self.num_steps - self.last_reset > CALM_STEPS and not self.model.open_moves)
    @rule()
    def invalidate(self) -> None:
        """Give the device's memory back, and find garbage there afterwards."""
        self._note("give the device's memory back")
        if self.model.in_flight:
            with pytest.raises(StepError):
                self.space.invalidate_memory()
            self.model.require_unchanged()
            return
        self.model.invalidated(self.space.invalidate_memory())
        self.last_reset = self.num_steps

    @rule(origin=prompts, cut=LENGTH, tokens=TOKENS, keys=OTHER_KEYS, places=PLACES, num_lookahead=LOOKAHEAD)
    def ask(  # noqa: PLR0913, PLR0917 - one draw for each question's arguments
        self,
        origin: Prompt,
        cut: int,
        tokens: list[int],
        keys: RequestKeys | None,
        places: list[int],
        num_lookahead: int,
    ) -> None:
        """Call every question: nothing changes."""
        space, model = self.space, self.model
        prompt = self._prompt(origin, cut, tokens, keys)
        answer = self.answers[prompt] = self.match(list(prompt[0]), prompt[1])
        model.check_hit(len(prompt[0]), answer)
        each = space.match_each(list(prompt[0]), keys=prompt[1])
        whole = answer.num_whole_tokens - answer.num_replayed
        assert all(
            length >= whole - whole % group.block_size or group.stays_out or answer.num_replayed
            for length, group in zip(each, model.groups, strict=True)
        )
        told = space.explain(list(prompt[0]), keys=prompt[1])
        assert told.num_hit_tokens == answer.num_tokens or answer.num_replayed
        self.explaining.check(told, list(prompt[0]), prompt[1], is_forged=self.is_forged)
        space.can_allocate(list(prompt[0]), keys=prompt[1], num_lookahead=num_lookahead)
        if model.running:
            batch = self._choose(model.running, places)
            for sequence in batch:
                assert space.num_tokens(sequence.row) == len(sequence.tokens)
                model.check_computed(sequence)
            room = min(model.config.max_tokens - len(sequence.tokens) for sequence in batch)
            counts = [min(room, len(tokens))] * len(batch)
            num_lookahead = min(room - counts[0], num_lookahead)
            space.can_append([sequence.row for sequence in batch], counts, num_lookahead=num_lookahead)
            space.can_swap_out([sequence.row for sequence in batch])
        if model.swapped:
            space.can_swap_in([sequence.row for sequence in self._choose(model.swapped, places)])
        model.require_unchanged()

    @rule(kind=st.integers(0, 127), place=PLACE)
    def misuse(self, kind: int, place: int) -> None:
        """Do something wrong: a clear error of ours, and nothing changes."""
        possible = misuses(self.space, self.model, place)
        error, act = possible[kind % len(possible)]
        with pytest.raises(error) as caught:
            act()
        assert isinstance(caught.value, PagedKVError)
        self.model.require_unchanged()


class WithoutWindows(SpaceMachine):
    """Loses windows as well, in mixes where they can be computed again."""

    @rule(target=prompts, origin=prompts, cut=LENGTH, tokens=TOKENS, chunk=CHUNK, alone=st.booleans())
    def allocate_without_windows(
        self, origin: Prompt, cut: int, tokens: list[int], chunk: list[int], *, alone: bool
    ) -> MultipleResults[Prompt]:
        """Admit the beginning of a prompt whose windows have been evicted since it was computed."""
        first = self._prompt(origin, len(origin[0]), chunk, None)
        self.free_rows(list(self.model.sequences.values())[: None if alone else 2])
        self.check()
        self.allocate_prompt(first)
        self.check()
        self.settle()
        self.lose_windows()
        prompt = self._prompt(first, max(8, cut), tokens, None)
        self.allocate_prompt(prompt)
        return self._as_origins(first, prompt)


def machine_of(mix: Mix, seen: Counter[str], sabotage: Sabotage | None = None) -> type[SpaceMachine]:
    """Make the class of machines for one mix, as Hypothesis wants it: without arguments."""

    class Machine(SpaceMachine):
        def __init__(self) -> None:
            super().__init__(mix, seen, sabotage)

    class Replaying(WithoutWindows, Machine):
        pass

    return Replaying if mix.replays else Machine
