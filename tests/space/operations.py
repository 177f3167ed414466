"""The operations of a block space, each carried out on space and model together.

Questions are asked before each action and must agree with it; what must be refused is tried and must change nothing.
Which operations with which arguments is for the machines to draw (:mod:`tests.space.space_machine`,
:mod:`tests.space.tangled_machine`); the model defines what an operation must do. A failure shows the operations
that led to it, and rows, tables and plans as the model has them (:mod:`tests.space.description`).
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence as AbstractSequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant

from pagedkv import AllocStatus, BlockHolders, BlockSpace, PrefixGone, PrefixHit, Receipt, RequestKeys, Shortage
from pagedkv.blocks.block_pool import BlockPool
from pagedkv.blocks.free_queue import blocks_of_list, spare_sentinel
from pagedkv.contract.keys import NO_KEYS
from pagedkv.contract.space_config import LARGEST_PRIORITY
from pagedkv.errors import (
    ConfigurationError,
    SequenceError,
    SharedPrefixError,
    StepError,
    TokenError,
    TooManySequencesError,
    TruncationError,
)
from tests.space.description import describe
from tests.space.explaining_model import ExplainingModel
from tests.space.live_model import ModelLoad
from tests.space.mixes import Mix, limits_of
from tests.space.replay_model import MOST_REPLAYED, check_replay, evict_windows
from tests.space.sequence_model import ModelSequence
from tests.space.space_model import SpaceModel
from tests.space.tenant_model import Tenant, added

__all__ = ["MOST_LOOKAHEAD", "Digests", "Prompt", "Sabotage", "SpaceOperations"]

Digests: TypeAlias = npt.NDArray[np.uint8]
Prompt: TypeAlias = tuple[tuple[int, ...], RequestKeys]
Sabotage: TypeAlias = Callable[[BlockSpace], None]

MOST_LOOKAHEAD: Final = 4


class SpaceOperations(RuleBasedStateMachine):
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
        self.num_steps = -1  # building the space is no step
        self.is_forged = False  # whether content may have no name, or not its own
        self.has_wrong_names = False  # whether digests were brought that are not the prompt's
        self.history: list[str] = []
        self.now_s = 0.0
        self.answers: dict[Prompt, PrefixHit] = {}
        self.ended: dict[Prompt, Receipt] = {}

    def build_space(self, size: int) -> None:
        """Build the space and expect it to be empty."""
        config = self.mix.config(size)
        self.space = BlockSpace(config)
        self.model = SpaceModel(config, self.space, self.seen)
        self.explaining = ExplainingModel(config, self.space, self.seen)
        self._note(f"{config}")
        if self.sabotage:
            self.sabotage(self.space)

    @invariant()
    def check(self) -> None:
        """All counts agree and the space's own audit passes, after every rule."""
        self.model.check()
        self.explaining.follow(self.history[-1])
        self.num_steps += 1
        self.seen["steps"] += self.num_steps > 0

    def teardown(self) -> None:
        """End every run with everything computed, read back, freed and unreferenced; or describe its failure."""
        error = sys.exception()
        if not hasattr(self, "model"):
            return
        if error is None:
            try:
                self._finish()
            except AssertionError as failure:
                failure.add_note(describe(self.model, self.history))
                raise
        elif isinstance(error, (Exception, pytest.fail.Exception)):
            error.add_note(describe(self.model, self.history))

    def _finish(self) -> None:
        self.settle()
        for load in list(self.model.loads):
            self.finish_load(load, load.answer.num_tokens)
        rows = list(self.model.sequences)
        self.model.freed(rows, self.space.free(rows))
        self.model.check()
        for pool in (*self.model.statistics.pools, *self.model.statistics.host_pools):
            assert pool.num_free == pool.num_blocks - pool.num_absent, f"{pool.name}: blocks leaked"

    def _note(self, operation: str) -> None:
        self.history.append(operation)

    def _answered(self, answer: object) -> None:
        self.history[-1] += f" -> {answer}"

    # Admission

    def allocate_prompt(  # noqa: PLR0913 - one prompt, and its arguments
        self,
        prompt: Prompt,
        num_lookahead: int = 0,
        digests: Digests | None = None,
        *,
        in_chunks: bool = False,
        publish: bool | Literal["prompt"] = True,
        tenant: Tenant = None,
    ) -> None:
        """Admit a prompt; in chunks, only up to where its states are to be kept."""
        space, model = self.space, self.model
        tokens, keys = list(prompt[0]), prompt[1]
        whole = space.match(tokens, keys=keys) if in_chunks else None
        if whole is not None and whole.checkpoint:
            assert whole.num_tokens < whole.checkpoint < len(tokens)
            tokens = tokens[: whole.checkpoint]
            self.seen["chunk to a checkpoint"] += 1
        self._note(f"allocate {tokens}, {keys}, {num_lookahead} lookahead" if keys != NO_KEYS else f"allocate {tokens}")
        self.history[-1] += f" for {tenant}" if tenant else ""
        question = self.match(tokens, keys, digests) if whole is None else whole
        hit = question.num_tokens
        model.check_hit(len(tokens), question)
        asked = partial(
            space.can_allocate, tokens, keys=keys, digests=digests, num_lookahead=num_lookahead, tenant=tenant
        )
        status = asked(match=question)
        assert status is asked() or question.num_replayed
        earlier = self.answers.get(prompt, question) if whole is None else whole  # perhaps of long ago
        most = model.prompt_blocks(len(tokens), num_lookahead)
        is_possible = model.tenants.fit_empty({tenant: most})
        assert status is not AllocStatus.NEVER or not is_possible
        assert status is not AllocStatus.LATER or is_possible or hit
        continues = self.ended.get(prompt)
        told = space.explain(list(prompt[0]) if whole is not None else tokens, keys=keys, digests=digests)
        self.explaining.check(told, list(prompt[0]), keys, is_forged=self.is_forged)
        try:
            answer = space.allocate(
                tokens,
                keys=keys,
                digests=digests,
                num_lookahead=num_lookahead,
                match=earlier,
                continues=continues,
                publish=publish,
                tenant=tenant,
            )
        except TooManySequencesError:
            assert model.num_vacant == 0
            assert status is not AllocStatus.OK
            model.require_unchanged()
            return
        self._answered(answer)
        if isinstance(answer, Shortage):
            assert status is not AllocStatus.OK
            model.require_admission_shortage(answer, len(tokens), num_lookahead, hit)
            return
        assert status is not AllocStatus.NEVER, "what could never be was done"
        assert answer.num_hit_tokens == hit
        assert answer.checkpoint == question.checkpoint
        if space.config.explain and not question.num_replayed:
            self.explaining.check_recorded(told, space.explanation(answer.row))
        needed = {pool: model.num_free(pool) - space.num_free_blocks(pool) for pool in most}
        is_ok = model.lacks({tenant: needed}, beside_watermark=True) is None
        assert (status is AllocStatus.OK) == is_ok or not is_possible  # possible only by hits in windows
        model.allocated(answer.row, tokens, keys, num_lookahead, question, continues, tenant)
        if publish is not True:
            model.sequences[answer.row].generation = -1  # what it holds need not be found

    def allocate_together(self, prompts: list[Prompt], num_lookahead: int, tenants: list[Tenant]) -> None:
        """Admit as many of some prompts as fit beside one another, by one question."""
        space = self.space
        self._note(f"how many of {prompts} for {tenants} fit with {num_lookahead} lookahead")
        answers = [self.match(list(tokens), keys) for tokens, keys in prompts]
        count = space.num_allocatable(answers, num_lookahead=num_lookahead, tenants=tenants if any(tenants) else None)
        self._answered(count)
        self.model.require_unchanged()
        is_exact, is_shared = True, False  # whether each still hits what it did, and whether any shares more
        for place, (prompt, answer, tenant) in enumerate(zip(prompts[: count + 1], answers, tenants, strict=False)):
            now = self.match(list(prompt[0]), prompt[1])
            is_exact &= now.num_tokens == answer.num_tokens or self.mix.has_whole_prefixes
            is_shared |= now.num_tokens > answer.num_tokens
            status = space.can_allocate(
                list(prompt[0]), keys=prompt[1], num_lookahead=num_lookahead, match=now, tenant=tenant
            )
            if place == count:
                assert status is not AllocStatus.OK or is_shared or not is_exact, "one more fits"
                self.seen["one fewer fits"] += status is not AllocStatus.OK
                return
            assert status is AllocStatus.OK or not is_exact, "fewer fit"
            self.allocate_prompt(prompt, num_lookahead, tenant=tenant)
            self.check()
        self.seen["all fit"] += len(prompts) > 1

    def match(self, tokens: list[int], keys: RequestKeys, digests: Digests | None = None) -> PrefixHit:
        """Match a prompt: how much is cached, or can be computed again where windows are gone."""
        answer = self.space.match(tokens, keys=keys, digests=digests, max_replay_tokens=MOST_REPLAYED)
        plain = self.space.match(tokens, keys=keys, digests=digests)
        check_replay(self.model.groups, answer, plain, MOST_REPLAYED)
        return answer

    def lose_windows(self) -> None:
        """The cache evicts the unreferenced windows, and keeps full attention."""
        self._note("windows are evicted")
        evict_windows(self.space)
        self.check()

    # Growth

    def append_tokens(
        self,
        batch: list[ModelSequence],
        appended: list[list[int]],
        num_lookahead: int = 0,
        num_drafts: AbstractSequence[int] = (0,),
    ) -> None:
        """Append tokens to rows, cut to what ``max_tokens`` leaves room for; the last ones perhaps drafts."""
        space, model = self.space, self.model
        room = [model.config.max_tokens - len(sequence.tokens) for sequence in batch]
        num_lookahead = min(num_lookahead, *room)
        appended = [new[: left - num_lookahead] for new, left in zip(appended, room, strict=True)]
        counts = [len(new) for new in appended]
        most = (self.mix.num_draft_states or max(counts)) if self.mix.takes_drafts else 0
        drafts = [min(num_drafts[place % len(num_drafts)], count, most) for place, count in enumerate(counts)]
        num_draft = drafts[0] if len(set(drafts)) == 1 else drafts
        rows = [sequence.row for sequence in batch]
        self._note(f"append to rows {rows} {appended}, {num_lookahead} lookahead, the last {num_draft} drafts")
        needed = model.growth_by_tenant(batch, counts, num_lookahead, None, drafts)
        fits = model.lacks(needed) is None
        assert space.can_append(rows, counts, num_lookahead=num_lookahead, num_draft=num_draft) == fits
        flat = [token for new in appended for token in new]
        answer = space.append_with_copies(rows, flat, counts, num_lookahead=num_lookahead, num_draft=num_draft)
        self._answered(answer)
        assert isinstance(answer, Shortage) == (not fits)
        if isinstance(answer, Shortage):
            model.require_shortage(answer, needed)
            return
        copied = model.appended(batch, appended, num_lookahead, drafts)
        first = self.mix.groups[0].pool
        told = [(move.source[1], move.target[1]) for move in copied if move.target[0] == first]
        assert sorted(answer) == sorted(told)

    def keep_state(self, sequence: ModelSequence, position: int) -> None:
        """Keep the state at a position of a row that the open step is to compute; what it is not to, is refused."""
        model = self.model
        self._note(f"keep states of row {sequence.row} at {position}")
        try:
            answer = self.space.keep_states(sequence.row, position)
        except TokenError as error:
            self._answered(error)
            assert position <= len(sequence.tokens) or position > model.config.max_tokens
            model.require_unchanged()
            return
        self._answered(answer)
        if isinstance(answer, Shortage):
            assert answer.num_free == model.num_free(answer.pool)
            model.require_unchanged()
            return
        assert position > sequence.num_planned
        model.keep(sequence, position, answer)

    def truncate_rows(self, batch: list[ModelSequence], lengths: list[int]) -> None:
        """Roll rows back: rejected drafts, or what the space must refuse."""
        errors = {
            error
            for sequence, length in zip(batch, lengths, strict=True)
            for error in self.model.truncation_errors(sequence, length)
        }
        may_lag = any(map(self.model.may_lag, batch, lengths))
        if errors and may_lag:
            errors.add(TruncationError)
        rows = [sequence.row for sequence in batch]
        self._note(f"truncate rows {rows} to {lengths}")
        if errors:
            with pytest.raises(tuple(errors)) as caught:
                self.space.truncate(rows, lengths)
            self._answered(caught.value)
            self.model.require_unchanged()
            return
        try:
            self.space.truncate(rows, lengths)
        except TruncationError as error:
            self._answered(error)
            assert may_lag, "rolling back was refused for no reason"
            self.model.require_unchanged()
            return
        for sequence, length in zip(batch, lengths, strict=True):
            self.model.truncated(sequence, length)

    def replace_drafts(self, batch: list[ModelSequence], drafts: list[list[int]]) -> None:
        """Give the last drafts of rows other ids, as many as rows have; drafts that others hold stay as they are."""
        shared = False
        drafts = [new[: len(row.tokens) - row.num_accepted] for row, new in zip(batch, drafts, strict=True)]
        for sequence, new in zip(batch, drafts, strict=True):
            shared |= bool(new) and self.model.shares_from(sequence, len(sequence.tokens) - len(new))
        rows, flat = [sequence.row for sequence in batch], [token for new in drafts for token in new]
        counts = [len(new) for new in drafts]
        self._note(f"replace drafts of rows {rows} by {drafts}")
        if shared:
            with pytest.raises(SharedPrefixError) as caught:
                self.space.replace_drafts(rows, flat, counts)
            self._answered(caught.value)
            self.model.require_unchanged()
            return
        self.space.replace_drafts(rows, flat, counts)
        for sequence, new in zip(batch, drafts, strict=True):
            self.model.redrafted(sequence, new)

    # Sharing

    def fork_row(self, parent: ModelSequence, num_children: int) -> None:
        """Fork a row into several."""
        model = self.model
        self._note(f"fork row {parent.row} into {num_children}")
        is_uncomputed = model.is_recurrent and parent.num_planned < len(parent.tokens)
        is_uncomputed |= model.keeps_draft_states and parent.num_accepted < len(parent.tokens)
        if is_uncomputed or num_children > model.num_vacant:
            with pytest.raises(SequenceError if is_uncomputed else TooManySequencesError) as caught:
                self.space.fork(parent.row, num_children)
            self._answered(caught.value)
            model.require_unchanged()
            return
        try:
            children = self.space.fork(parent.row, num_children).tolist()
        except SequenceError as error:  # of a row that was moved before others computed what it shares
            self._answered(error)
            assert model.is_recurrent
            assert parent.is_sharer
            assert not parent.is_planned, "a row was not forked though all of it is planned"
            model.require_unchanged()
            return
        self._answered(f"rows {children}")
        model.forked(parent, children)

    def branch_row(self, parent: ModelSequence, num_children: int, length: int) -> None:
        """Fork a row at a prefix that is shorter than it."""
        model = self.model
        self._note(f"fork row {parent.row} into {num_children} at {length} tokens")
        if num_children > model.num_vacant:
            with pytest.raises(TooManySequencesError) as caught:
                self.space.fork(parent.row, num_children, at=length)
            self._answered(caught.value)
            model.require_unchanged()
            return
        answer = self.space.fork(parent.row, num_children, at=length)
        self._answered(answer)
        refusal, needed = model.may_branch(parent, length), model.branch_needs(length)
        if isinstance(answer, PrefixGone):
            assert refusal.is_possible, "a row could not be forked at a prefix that it holds"
            assert answer.length == length > answer.longest
            between = range(answer.longest + 1, length)
            assert all(model.may_branch(parent, other).is_possible for other in between), "a longer prefix is held"
            assert not answer.longest or not model.may_branch(parent, answer.longest).is_sure
            model.require_unchanged()
            self.seen["prefix gone"] += 1
            return
        assert not refusal.is_sure, "a row was forked at a prefix whose window or state is gone"
        needs = {parent.tenant: needed}
        assert isinstance(answer, Shortage) == (model.lacks(needs) is not None)
        if isinstance(answer, Shortage):
            model.require_shortage(answer, needs)
            return
        model.branched(parent, answer.tolist(), length)

    def free_rows(self, batch: list[ModelSequence], intent: str = "", num_generated: int | None = None) -> None:
        """Give sequences up, wherever they are, with a word on what becomes of what they leave."""
        rows = [sequence.row for sequence in batch]
        wishes: dict[str, dict[str, Any]] = {"low": {"priority": -1}, "end": {"keeps_end": True}}
        others = [row for row in self.model.sequences if row not in rows and not self.model.sequences[row].is_lost]
        if others:
            wishes["superseded"] = {"superseded_by": others[0]}
        if self.model.config.leases:
            wishes |= {"high": {"priority": 1}, "lease": {"keep_until_s": self.now_s + 3}}
        if self.model.config.eviction == "priority":
            wishes |= {"high": {"priority": 1}, "low": {"priority": -LARGEST_PRIORITY}}
        wish = wishes.get(intent, {})
        if num_generated is not None:
            wish = wish | {"num_generated": [num_generated] * len(rows)}
        self._note(f"free rows {rows} {wish or ''}")
        self._note_heirs(batch)
        tables = [[self.space.block_ids(row.row, group) for row in batch if not row.on_host] for group in self._groups]
        spare = {pool.name: set(self._spare(pool)) for pool in self.space._state.pools.values()}
        receipts = self.space.free(rows, **wish)
        self.model.freed(rows, receipts)
        if intent in {"low", "superseded"} and wish:
            self._require_tail_first(tables, spare)
        prompts = [(tuple(sequence.tokens), sequence.keys) for sequence in batch]
        self.ended |= dict(zip(prompts, receipts, strict=False))

    def _note_heirs(self, batch: list[ModelSequence]) -> None:
        """Count how often rows are about to leave whose computation others wait for."""
        model = self.model
        staying = [sequence for sequence in model.running if sequence not in batch]
        for sequence in batch:
            uncomputed = {
                (group.pool, block)
                for group, table in zip(model.groups, sequence.tables, strict=True)
                for block in table[sequence.planned_in(group) // group.block_size :]
                if block and sequence.planned_in(group) < len(sequence.tokens)
            }
            heirs = [other for other in staying if sequence in model.running and model.places(other) & uncomputed]
            self.seen["heir"] += bool(heirs)
            self.seen["heir beside a step in flight"] += bool(heirs and model.in_flight)
            self.seen["several heirs"] += len(heirs) > 1
            self.seen["heir of rows that leave together"] += bool(heirs and len(batch) > 1)

    @property
    def _groups(self) -> range:
        return range(len(self.mix.groups))

    @staticmethod
    def _spare(pool: BlockPool) -> list[int]:
        """Blocks that are evicted before all others, the first one first."""
        records = pool.arrays.records
        return blocks_of_list(records, spare_sentinel(records), pool.num_free)

    def _require_tail_first(self, tables: list[list[list[int]]], spare: dict[str, set[int]]) -> None:
        """Of sequences that are evicted before all others, what became spare goes from the tail."""
        for group, table in ((group, table) for group, of_group in enumerate(tables) for table in of_group):
            pool = self.space._state.groups[group].pool
            order = {block: place for place, block in enumerate(self._spare(pool)) if block not in spare[pool.name]}
            places = [order[block] for block in table if block in order]
            assert places == sorted(places, reverse=True), f"group {group}: of blocks {table}, the head goes first"
            self.seen["evicted first"] += len(places) > 1

    # Content that is to stay, and content that is not

    def lease_prompt(self, prompt: Prompt, seconds: float) -> None:
        """Keep what is cached of a prompt for some seconds, as far as it hits."""
        self._note(f"lease {prompt} for {seconds} s")
        hit = self.space.match(list(prompt[0]), keys=prompt[1]).num_tokens
        assert self.space.lease(list(prompt[0]), self.now_s + seconds, keys=prompt[1]) == hit
        self.model.require_unchanged(but_leases=True)
        self.seen["lease"] += hit > 0

    def touch_prompt(self, prompt: Prompt) -> None:
        """Keep what is cached of a prompt: what is evicted next is something else, if there is anything else."""
        self._note(f"touch {prompt}")
        hit = self.space.match(list(prompt[0]), keys=prompt[1])
        assert self.space.touch(list(prompt[0]), keys=prompt[1]) == hit.num_tokens
        self.model.require_unchanged(but_leases=True)
        pool = self.space._state.groups[0].pool
        if pool.policy.name == "lru" and not self.model.config.leases:
            mine = set(hit.blocks_by_pool()[pool.name].tolist())
            mine |= {tail.block for tail in hit.tails if self.space._state.groups[tail.group].pool is pool}
            order = pool.free_queue.get_all_free_blocks()
            places = [place for place, block in enumerate(order) if block in mine]
            assert places == list(range(len(order) - len(places), len(order))), "what was touched is not last"
            self.seen["touched"] += bool(places)

    def evict_blocks(self, count: int, pool_number: int) -> None:
        """Evict cached blocks: the first of the order in which they are evicted."""
        pool = list(self.space._state.pools.values())[pool_number % len(self.space._state.pools)]
        self._note(f"evict {count} of {pool.name}")
        cached = [block for block in pool.free_queue.get_all_free_blocks() if pool.block(block).digest]
        num_free, version = pool.num_free, self.space._state.version
        victims = self.space.next_victims(num_free, pool.name).block_ids.tolist()
        assert victims == [block for block in cached if not self.model.config.leases or block in victims]
        num_evicted = self.space.evict(count, pool=pool.name)
        self._answered(num_evicted)
        assert self.space._state.version > version
        left = [block for block in cached if pool.block(block).digest]
        assert (num_evicted, pool.num_free) == (len(cached) - len(left), num_free)
        if not self.mix.tenants:
            assert num_evicted == min(count, len(cached))
        elif num_evicted < count:
            assert all(
                not share.num_cached or (share.tenant and share.num_taken + share.num_cached <= share.floor)
                for share in self.space._state.room.shares()
                if share.pool == pool.name
            ), "what no floor keeps is not evicted"
        is_order_known = pool.policy.name not in {"hazard", "priority"} and not self.model.config.leases
        if is_order_known and not self.mix.tenants:
            assert left == cached[num_evicted:], "others were evicted"
        self.seen["evicted now"] += num_evicted

    def shrink_pool(self, num_runs: int, run: int, pool_number: int) -> None:
        """Give blocks back: those that no one has, what would be allocated first; or learn who has them."""
        model, pool = self.model, list(self.space._state.pools.values())[pool_number % len(self.space._state.pools)]
        self._note(f"give {num_runs} runs of {run} blocks of {pool.name} back")
        order = pool.free_queue.get_all_free_blocks()
        possible, names = model.free_runs(pool.name, run), {block for block in order if pool.block(block).digest}
        answer = self.space.shrink(num_runs * run, pool=pool.name, run=run)
        if isinstance(answer, BlockHolders):
            model.require_unchanged()
            assert answer.num_available < answer.num_wanted == num_runs * run
            assert self.mix.tenants or answer.num_available == len(possible) * run
            held = {
                sequence.row: sum(label == pool.name for label, _ in model.places(sequence))
                for sequence in model.sequences.values()
            }
            told = dict(zip(answer.rows.tolist(), answer.num_blocks.tolist(), strict=True))
            assert told == {row: count for row, count in held.items() if count}
            self.seen["not shrunk"] += 1
            return
        self._answered(answer)
        chosen = [number // run for number in answer.tolist()[::run]]
        assert answer.tolist() == [number * run + place for number in chosen for place in range(run)]
        assert len(set(chosen)) == num_runs
        assert possible.issuperset(chosen)
        if not self.mix.tenants:  # else floors keep what is cached
            last = {number: max(order.index(number * run + place) for place in range(run)) for number in possible}
            assert chosen == sorted(possible, key=last.__getitem__)[:num_runs], "others would be allocated before"
        assert {block for block in names if pool.block(block).digest} == names - set(answer.tolist())
        model.absent[pool.name].update(answer.tolist())
        self.seen["shrunk"] += num_runs

    def grow_pool(self, num_runs: int, run: int, pool_number: int) -> None:
        """Take blocks back that were given away, in whole runs; they are allocated first."""
        pool = list(self.space._state.pools.values())[pool_number % len(self.space._state.pools)]
        self._note(f"take {num_runs} runs of {run} blocks of {pool.name} back")
        absent = self.model.absent[pool.name]
        runs = [start for start in range(0, pool.num_blocks, run) if absent.issuperset(range(start, start + run))]
        if num_runs > len(runs):
            with pytest.raises(ConfigurationError):
                self.space.grow(num_runs * run, pool=pool.name, run=run)
            self.model.require_unchanged()
            return
        answer = self.space.grow(num_runs * run, pool=pool.name, run=run)
        self._answered(answer)
        assert answer.tolist() == [start + place for start in runs[:num_runs] for place in range(run)]
        assert pool.free_queue.get_all_free_blocks()[: len(answer)] == answer.tolist()
        absent.difference_update(answer.tolist())
        self.seen["grown"] += num_runs

    def advance_clock(self, seconds: float) -> None:
        """Let time pass."""
        self._note(f"{seconds} s pass")
        self.now_s += seconds
        self.space.advance(self.now_s)
        self.model.require_unchanged(but_leases=True)

    def forget_prompt(self, prompt: Prompt, start: int) -> None:
        """Forget a prompt from a position on: it is not hit, and the blocks of running rows do not bring it back."""
        self._note(f"forget {prompt} from {start} on")
        self.space.forget(list(prompt[0]), keys=prompt[1], start=start)
        self._require_forgotten(prompt, start)
        self.is_forged = True  # rows that hold it publish nothing any more
        self.seen["forgotten"] += 1

    def _require_forgotten(self, prompt: Prompt, start: int) -> None:
        tokens = list(prompt[0])
        size = max(group.block_size for group in self.model.groups if not group.stays_out)
        whole = len(tokens) // size * size
        if start < whole and not self.has_wrong_names:
            hit = self.space.match([*tokens[:whole], 0], keys=prompt[1]).num_tokens
            assert hit < whole, f"{hit} tokens of a forgotten prompt can be found"

    # Tenants

    def payer(self, number: int) -> Tenant:
        """One of the mix's tenants that is there now, or none."""
        name = self.mix.tenant(number)
        return name if name in self.model.tenants.names else None

    def set_tenant(self, name: str, tenths: tuple[int, int]) -> None:
        """Add a tenant, or change its limits; what the pools cannot guarantee is refused."""
        limits = limits_of(tenths, {pool: count + 1 for pool, count in self.model.tenants.num_usable.items()})
        self._note(f"set tenant {name}: {limits}")
        if not self.model.tenants.may_have(name, limits):
            self._answered("refused")
            with pytest.raises(ConfigurationError):
                self.space.set_tenant(name, limits)
            self.model.require_unchanged()
            return
        self.space.set_tenant(name, limits)
        self.model.tenants.enter(name, limits)
        assert self.space.most_blocks(name) == {
            pool: min(
                self.model.tenants.cap[pool, name],
                count
                - sum(self.model.tenants.floor[pool, other] for other in self.model.tenants.names if other != name),
            )
            for pool, count in self.model.tenants.num_usable.items()
        }

    def remove_tenant(self, name: str) -> None:
        """Remove a tenant; one with sequences is refused."""
        self._note(f"remove tenant {name}")
        is_there = name in self.model.tenants.names
        if not is_there or any(sequence.tenant == name for sequence in self.model.sequences.values()):
            self._answered("refused")
            with pytest.raises(ConfigurationError, match="has .* sequences" if is_there else "no tenant"):
                self.space.remove_tenant(name)
            self.model.require_unchanged()
            return
        self.space.remove_tenant(name)
        self.model.tenants.leave(name)

    # Swapping

    def swap_rows_out(self, batch: list[ModelSequence]) -> None:
        """Move rows to the host pools."""
        model = self.model
        rows = [sequence.row for sequence in batch]
        self._note(f"swap out rows {rows}")
        needed = model.swap_out_needs(batch)
        status = self.space.can_swap_out(rows)
        fits = all(count <= model.num_free(label) for label, count in needed.items())
        is_possible = all(count <= model.num_usable[label] for label, count in needed.items())
        if status is AllocStatus.NEVER:
            assert not is_possible
        else:
            assert status is AllocStatus.OK or not fits or model.is_moved_into(batch)
            assert status is AllocStatus.LATER or not model.is_moved_into(batch)
        if model.is_moved_into(batch):
            with pytest.raises(SequenceError) as caught:
                self.space.swap_out(rows)
            self._answered(caught.value)
            model.require_unchanged()
            return
        self._note_heirs(batch)
        answer = self.space.swap_out(rows)
        self._answered(answer)
        assert isinstance(answer, Shortage) == (status is not AllocStatus.OK)
        if isinstance(answer, Shortage):
            model.require_moving_shortage(answer, needed)
        else:
            self.seen["swapped out beside twins alone"] += not is_possible
            model.swapped_over(batch, answer, to_host=True)

    def _has_names(self) -> bool:
        """Whether anything can be found on the device, and so be shared."""
        return any(pool.num_named for pool in self.space.statistics().pools)

    def swap_rows_in(self, batch: list[ModelSequence], counts: list[int], num_lookahead: int = 0) -> None:
        """Move rows back to the device pools, asking for room for their next tokens."""
        model = self.model
        rows = [sequence.row for sequence in batch]
        room = min(model.config.max_tokens - len(sequence.tokens) for sequence in batch)
        num_lookahead = min(num_lookahead, room)
        growing = [min(count, room - num_lookahead) for count in counts]
        self._note(f"swap in rows {rows}, with room for {growing} tokens and {num_lookahead} lookahead")
        needed, growth = model.swap_in_needs(batch), model.growth_by_tenant(batch, growing, num_lookahead, among=batch)
        status = self.space.can_swap_in(rows, growing, num_lookahead=num_lookahead)
        is_possible = model.tenants.fit_empty(added(model.arrival_needs(batch), growth))
        assert status is not AllocStatus.NEVER or not is_possible
        assert status is not AllocStatus.LATER or is_possible or self._has_names()
        answer = self.space.swap_in(rows)
        self._answered(f"{status.name}, {answer}")
        if isinstance(answer, Shortage):
            assert status is not AllocStatus.OK
            model.require_moving_shortage(answer, needed)
            return
        taken = {pool: model.num_free(pool) - self.space.num_free_blocks(pool) for pool in needed}
        assert all(taken[pool] <= count for pool, count in needed.items())
        model.swapped_over(batch, answer, to_host=False)
        arrived = model.tenants.last_taken()
        assert {pool: sum(of[pool] for of in arrived.values()) for pool in needed} == taken
        is_ok = model.lacks(added(arrived, growth), beside_watermark=True) is None
        assert (status is AllocStatus.OK) == is_ok
        can_go_on = self.space.can_append(rows, growing, num_lookahead=num_lookahead)
        assert can_go_on or status is not AllocStatus.OK
        assert not can_go_on or status is not AllocStatus.NEVER, "what could never be was done"
        self.seen["swapped in beside twins alone"] += can_go_on and not is_possible

    # Content from elsewhere

    def load_prefix(self, prompt: Prompt, most: int, lag: int = 0, tenant: Tenant = None) -> None:
        """Reserve blocks for the beginning of a prompt, computed with weights of up to ``lag`` epochs before."""
        model, tokens = self.model, list(prompt[0])
        num_tokens = min(most, len(tokens))
        self._note(f"load {num_tokens} tokens of {tokens}, {prompt[1]}")
        if not self.mix.caching:
            with pytest.raises(ConfigurationError):
                self.space.load(tokens, num_tokens, keys=prompt[1])
            model.require_unchanged()
            return
        oldest = max(0, model.epoch - min(lag, model.config.max_epoch_lag))
        epochs = (oldest, model.epoch) if model.config.counts_epochs and lag else None
        before = self.space.match(tokens, keys=prompt[1]).num_tokens
        answer = self.space.load(tokens, num_tokens, keys=prompt[1], epochs=epochs, tenant=tenant)
        self._answered(answer)
        if answer is None:
            model.require_unchanged()
        elif isinstance(answer, Shortage):
            model.load_shortage(answer, num_tokens)
        else:
            model.begun(answer, tokens, prompt[1], epochs or (model.epoch, model.epoch), tenant)
            assert self.space.match(tokens, keys=prompt[1]).num_tokens <= before, "what is loading cannot be hit"

    def finish_load(self, load: ModelLoad, num_tokens: int) -> None:
        """Bring so much of a prefix, once the steps are over that may use its blocks, and end the load."""
        self._note(f"finish {load.answer} with {num_tokens} tokens")
        after = load.answer.after_step or 0
        while self.model.planned and self.model.planned[0].plan.step_id <= after:
            self.run_step()
        self.model.arrived(load, num_tokens)
        self.space.finish_load(load.answer, num_tokens)
        self.model.finished(load)

    # Weights

    def begin_epoch(self, epoch: int) -> None:
        """Go on with new weights, whatever runs; epochs do not go back."""
        self._note(f"weights of epoch {epoch}")
        if epoch < self.model.epoch:
            with pytest.raises(ConfigurationError, match="cannot go back"):
                self.space.set_weights_epoch(epoch)
            self.model.require_unchanged()
            return
        self.space.set_weights_epoch(epoch)
        self.model.began(epoch)

    # Steps

    def plan_step(self) -> None:
        """Close the open step; the device will run it later."""
        self._note("plan the step")
        plan = self.space.plan_step()
        self._answered(f"step {plan.step_id}")
        self.model.close_step(plan)

    def run_step(self) -> None:
        """Let the device run the next plan."""
        self._note(f"the device runs step {self.model.planned[0].plan.step_id}")
        self.model.run_step()

    def acknowledge_step(self) -> None:
        """Acknowledge the oldest step."""
        step_id = self.model.ran[0].plan.step_id
        self._note(f"acknowledge step {step_id}")
        self.space.acknowledge(step_id)
        self.model.acknowledged()

    def settle(self) -> None:
        """Plan, run and acknowledge all there is; what running rows hold can be found afterwards."""
        self.plan_step()
        while self.model.planned:
            self.run_step()
        while self.model.ran:
            self.acknowledge_step()
        if self.mix.finds_all_it_holds and not self.is_forged and self.model.epoch == 0:
            self.model.check_findable()
        self.model.check_epochs()

    def abort_step(self, position: int, num_parts: int, *, garbage: bool) -> None:
        """Let a step in flight fail, with any part of its work done, right or wrong."""
        step_id = self.model.in_flight[position].plan.step_id
        self._note(f"abort step {step_id} with {num_parts} parts of its plan carried out{', wrongly' * garbage}")
        answer = self.space.abort(step_id)
        self._answered(answer)
        self.model.aborted(answer, position, num_parts, garbage=garbage)

    def declare_computed(self, batch: list[ModelSequence]) -> None:
        """Bring the content of rows from elsewhere; refused where a device could overwrite it, or others compute it."""
        model = self.model
        rows = [sequence.row for sequence in batch]
        self._note(f"declare rows {rows} computed")
        refusal = model.declaring_refusal(batch)
        try:
            self.space.mark_computed(rows)
        except StepError as error:
            self._answered(error)
            assert refusal.is_possible, "declaring was refused for no reason"
            model.require_unchanged()
            self.seen["not declared"] += 1
            return
        assert not refusal.is_sure, "content was declared computed that a plan overwrites, or that another row computes"
        model.marked_computed(batch)
