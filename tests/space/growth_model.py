"""Sequences that begin, grow, are rolled back, fork and end: exact block counts, and which rows may write a block."""

from collections import Counter
from collections.abc import Sequence as AbstractSequence

from pagedkv import PrefixHit, Receipt, RequestKeys
from pagedkv.contract.answers import Shortage
from pagedkv.errors import PagedKVError, SharedPrefixError, TruncationError
from tests.space.draft_states_model import DraftStatesModel
from tests.space.live_model import Refusal, num_holders
from tests.space.memory_model import Move
from tests.space.replay_model import with_replay
from tests.space.sequence_model import GroupRule, ModelSequence
from tests.space.tenant_model import Tenant

__all__ = ["GrowthModel"]


class GrowthModel(DraftStatesModel):
    """What admitting, appending, truncating, forking and freeing must answer and do."""

    # Admission

    def prompt_blocks(self, num_tokens: int, num_lookahead: int) -> dict[str, int]:
        """Blocks of a sequence by pool, hits not counted."""
        needed = dict.fromkeys(self.config.pool_names, 0)
        for group in self.groups:
            needed[group.pool] += group.num_blocks(num_tokens, num_lookahead)
        return needed

    def check_hit(self, num_tokens: int, hit: PrefixHit) -> None:
        """A hit leaves the last token to be computed, and ends at a block boundary of every group, states apart.

        Or behind such a boundary, where that saves enough tokens, and every group has a block to be copied that begins
        so: as each block that hits has its own prefix, so has that, which the memory will show.
        """
        least = self.config.min_partial_hit
        assert 0 <= hit.num_whole_tokens <= hit.num_tokens < num_tokens
        cached = [group for group in self.groups if not group.stays_out]
        assert all(hit.num_whole_tokens % group.block_size == 0 for group in cached if not group.is_state)
        num_partial = hit.num_tokens - hit.num_whole_tokens
        is_at_end = num_partial > 0 and self.is_recurrent  # of a sequence, which has kept its last blocks
        assert is_at_end or num_partial == 0 or 0 < least <= num_partial
        assert self.config.prefix_caching or hit.num_tokens == 0
        ends_inside = {group.index: hit.num_tokens % group.block_size for group in cached}
        assert {tail.group: tail.num_tokens for tail in hit.tails} == {
            index: num_inside for index, num_inside in ends_inside.items() if num_inside and self.config.prefix_caching
        }

    def require_admission_shortage(
        self, shortage: Shortage, num_tokens: int, num_lookahead: int, num_hit_tokens: int
    ) -> None:
        """Assert that a prompt was refused for a real shortage, and nothing changed."""
        self.seen["shortage"] += 1
        most = self.prompt_blocks(num_tokens, num_lookahead)[shortage.pool]
        inside = [group for group in self.groups if group.pool == shortage.pool and not group.stays_out]
        saved = sum(num_hit_tokens // group.block_size for group in inside)
        assert most - saved <= shortage.num_needed <= most
        self._require_real(shortage)

    def allocated(  # noqa: PLR0913, PLR0917 - the arguments, and the answer
        self,
        row: int,
        tokens: list[int],
        keys: RequestKeys,
        num_lookahead: int,
        hit: PrefixHit,
        continues: Receipt | None,
        tenant: Tenant,
    ) -> None:
        """A prompt was given a row and blocks.

        Where its hit ends inside an interval, it continues from a copy of the state that is kept there, or, if there is
        no room for a copy and the state is unreferenced, from the state itself. Where its hit ends inside a block, the
        same holds for the block that begins so.
        """
        self.payer = tenant
        for group, blocks in zip(self.groups, hit.block_ids, strict=True):
            for block in (*blocks[blocks > 0].tolist(), *(it.block for it in hit.tails if it.group == group.index)):
                self.hit(group.pool, block)
        num_hit_tokens = hit.num_tokens
        kept = {tail.group: tail.block for tail in hit.tails}
        assert row not in self.sequences
        root = self.prefixes.root(keys, self.generation)
        sequence = ModelSequence(
            row, keys, root, num_planned=num_hit_tokens, sure_from=num_hit_tokens, is_sharer=num_hit_tokens > 0
        )
        sequence.generation, sequence.tenant = self.generation, tenant
        sequence.first_epoch, sequence.num_hit = self.epoch, num_hit_tokens
        sequence.planned_replayed = sequence.sure_replayed = num_hit_tokens
        sequence.extend(self.prefixes, tokens)
        with_replay(sequence, self.groups, hit, self.prefixes, self.seen["allocation"])
        sequence.tables, sequence.slots = self.read_tables(row), self.read_slots(row)
        assert not any(map(any, sequence.slots)), "a prompt has draft states"
        for group, table in zip(self.groups, sequence.tables, strict=True):
            assert len(table) == group.num_blocks(len(tokens), num_lookahead)
            num_hits = len(hit.block_ids[group.index])
            assert num_hits == (0 if group.stays_out else num_hit_tokens // group.block_size) or group.replays
            assert all(table[index] for index in group.indices(group.kept(num_hit_tokens)))
            assert len(set(table[num_hits:])) == len(table) - num_hits
            is_inside = not group.stays_out and num_hit_tokens % group.block_size > 0
            assert (group.index in kept) == is_inside
            for block in table[num_hits:]:
                if block == kept.get(group.index):
                    assert block not in self.in_use[group.pool], "a block was taken over that is referenced"
                    self.take_over(group.pool, block)
                else:
                    self.hand_out(group.pool, block)
            if group.index in kept and table[num_hits] != kept[group.index]:
                self.open_moves.append(Move("copy", (group.pool, kept[group.index]), (group.pool, table[num_hits])))
        self.sequences[row] = sequence
        if self.receipts:
            self.receipts.admitted(sequence, num_hit_tokens, hit.num_whole_tokens, continues)
            self.seen["life continued"] += bool(continues and continues.num_reached)
        self.seen["allocation"] += 1
        self.seen["hit"] += num_hit_tokens > 0
        self.seen["kept state hit"] += any(group.is_state and group.index in kept for group in self.groups)
        self.seen["partial hit"] += num_hit_tokens > hit.num_whole_tokens
        self.seen["replay"] += hit.num_replayed > 0 and hit.is_exact
        self.seen["approximate replay"] += not hit.is_exact

    # Growth

    def growth(
        self,
        batch: AbstractSequence[ModelSequence],
        counts: list[int],
        num_lookahead: int,
        among: AbstractSequence[ModelSequence] | None = None,
        num_drafts: AbstractSequence[int] = (),
    ) -> dict[str, int]:
        """Blocks by pool that appending takes: new ones, one for each copy on write of what others hold, draft states.

        ``among``: the sequences that may share blocks with the batch; all live ones when None. ``num_drafts``: of each
        sequence; none if it is empty.
        """
        drafts = num_drafts or [0] * len(batch)
        sharers = list(self.sequences.values()) if among is None else among
        needed = dict.fromkeys(self.config.pool_names, 0)
        for group in self.groups:
            left: Counter[int] = Counter()
            for sequence, count, num_draft in zip(batch, counts, drafts, strict=True):
                num_tokens = len(sequence.tokens)
                table = sequence.tables[group.index]
                needed[group.pool] += max(0, group.num_blocks(num_tokens + count, num_lookahead) - len(table))
                needed[group.pool] += self.lacking_slots(sequence, group, count, num_draft) if count else 0
                if self.accepts_states(sequence, group) and count:
                    continue  # no other sequence shares what becomes current
                index = num_tokens // group.block_size
                is_into_block = count + group.num_reserved(num_lookahead) > 0 and num_tokens % group.block_size > 0
                if is_into_block and num_holders(sharers, group, sequence, index) - left[table[index]] > 1:
                    left[table[index]] += 1
                    needed[group.pool] += 1
        return needed

    def growth_by_tenant(
        self,
        batch: AbstractSequence[ModelSequence],
        counts: list[int],
        num_lookahead: int,
        among: AbstractSequence[ModelSequence] | None = None,
        num_drafts: AbstractSequence[int] = (),
    ) -> dict[Tenant, dict[str, int]]:
        """The same for each tenant that has sequences in the batch: no two of them share a partly filled block."""
        parts: dict[Tenant, list[tuple[ModelSequence, int, int]]] = {}
        for sequence, count, num_draft in zip(batch, counts, num_drafts or [0] * len(batch), strict=True):
            parts.setdefault(sequence.tenant, []).append((sequence, count, num_draft))
        return {
            tenant: self.growth(
                [it for it, _, _ in part],
                [count for _, count, _ in part],
                num_lookahead,
                among,
                [num_draft for _, _, num_draft in part],
            )
            for tenant, part in parts.items()
        }

    def appended(
        self,
        batch: AbstractSequence[ModelSequence],
        tokens: list[list[int]],
        num_lookahead: int,
        num_drafts: AbstractSequence[int],
    ) -> list[Move]:
        """Tokens were appended to rows; returns the copies on write."""
        needed = self.growth(batch, [len(new) for new in tokens], num_lookahead, None, num_drafts)
        num_full = self._num_full_accepted(batch)
        copied: list[Move] = []
        num_taken = dict.fromkeys(needed, 0)
        num_states = dict.fromkeys(needed, 0)
        for sequence, new, num_draft in zip(batch, tokens, num_drafts, strict=True):
            self.payer = sequence.tenant
            if new:
                self.accept_states(sequence, len(sequence.tokens))
            before, sequence.tables = sequence.tables, self.read_tables(sequence.row)
            for group, old, table in zip(self.groups, before, sequence.tables, strict=True):
                num_slots = group.num_blocks(len(sequence.tokens) + len(new), num_lookahead)
                assert len(table) == max(len(old), num_slots)
                num_written = len(new) + group.num_reserved(num_lookahead)
                copy = self._copied_block(group, sequence, old, table, num_written)
                fresh = table[len(old) :] if copy is None else [copy[1], *table[len(old) :]]
                for block in fresh:
                    self.hand_out(group.pool, block)
                num_taken[group.pool] += len(fresh)
                num_states[group.pool] += group.is_state and copy is not None
                if copy is not None:
                    copied.append(Move("copy", (group.pool, self._origin(group.pool, copy[0])), (group.pool, copy[1])))
                    self.open_moves.append(copied[-1])
            sequence.extend(self.prefixes, new, num_draft)
            for pool, count in self.took_slots(sequence, num_draft if new else 0).items():
                num_taken[pool] += count
                self.seen["draft state"] += count
            self.require_slots(sequence)
        for pool, num_needed in needed.items():  # states that are kept are copied too, where there is room
            assert num_needed <= num_taken[pool] <= num_needed + num_states[pool]
        self._require_own_tails(batch, tokens, num_lookahead)
        if num_full == self._num_full_accepted(batch):
            self._require_no_new_names()
        self.seen["copy on write"] += len(copied) > 0
        return copied

    def _origin(self, pool: str, block: int) -> int:
        """Where the content of a block is before the open plan's copies."""
        copies = {move.target: move.source[1] for move in self.open_moves if move.kind == "copy"}
        return copies.get((pool, block), block)

    def _num_full_accepted(self, batch: AbstractSequence[ModelSequence]) -> list[int]:
        """Full blocks of accepted tokens: only these may be published."""
        return [sequence.num_accepted // group.block_size for sequence in batch for group in self.groups]

    def _require_no_new_names(self) -> None:
        """Drafts and partly filled blocks are not findable."""
        for before, now in zip(self.statistics.pools, self.space.statistics().pools, strict=True):
            assert now.num_named <= before.num_named, "something was published that is not accepted or not full"

    @staticmethod
    def _copied_block(
        group: GroupRule, sequence: ModelSequence, old: list[int], table: list[int], num_written: int
    ) -> tuple[int, int] | None:
        """The only entry that growing may replace is the partly filled block, by a copy to write or reserve in."""
        changed = [index for index, (left, right) in enumerate(zip(old, table, strict=False)) if left != right]
        if not changed:
            return None
        assert num_written
        assert len(sequence.tokens) % group.block_size
        assert changed == [len(sequence.tokens) // group.block_size]
        return old[changed[0]], table[changed[0]]

    def _require_own_tails(
        self, batch: AbstractSequence[ModelSequence], tokens: list[list[int]], num_lookahead: int
    ) -> None:
        """Only one sequence holds a block that appended tokens go into, or in which slots were reserved."""
        for sequence, new in zip(batch, tokens, strict=True):
            for group in self.groups:
                start, end = len(sequence.tokens) - len(new), len(sequence.tokens) + group.num_reserved(num_lookahead)
                for index in group.indices(range(start, end)):
                    assert self.holders(group, sequence, index) == 1, "two rows may write one block"

    def truncation_errors(self, sequence: ModelSequence, length: int) -> set[type[PagedKVError]]:
        """Errors for which rolling back to a length may be refused; none when it must succeed."""
        num_tokens = len(sequence.tokens)
        if not 1 <= length <= num_tokens:
            return {TruncationError}
        errors: set[type[PagedKVError]] = set()
        if length == num_tokens:
            return errors
        for group in self.groups:
            table = sequence.tables[group.index]
            for index in range(length // group.block_size, group.num_blocks(num_tokens)):
                if table[index] and self.holders(group, sequence, index) > 1:
                    errors.add(SharedPrefixError)
            if self._is_gone(group, sequence, length):
                errors.add(TruncationError)
        return errors

    def shares_from(self, sequence: ModelSequence, first: int) -> bool:
        """Whether others hold a block of positions from ``first`` on."""
        return any(
            sequence.tables[group.index][index] and self.holders(group, sequence, index) > 1
            for group in self.groups
            for index in range(first // group.block_size, group.num_blocks(len(sequence.tokens)))
        )

    def redrafted(self, sequence: ModelSequence, drafts: list[int]) -> None:
        """A row's last drafts got other ids; its blocks stay."""
        self.seen["other drafts"] += bool(drafts)
        sequence.redraft(self.prefixes, drafts)

    @staticmethod
    def _is_gone(group: GroupRule, sequence: ModelSequence, length: int) -> bool:
        """Whether a group has released a remaining block, at or after the first one that computing ``length`` reads."""
        table = sequence.tables[group.index]
        if group.num_draft_states and length >= sequence.num_accepted:
            return False
        if not sequence.is_beyond_replay(group, length):
            return True
        if not group.is_state:
            return not all(table[group.first_kept(length) // group.block_size : group.num_blocks(length)])
        is_checkpoint = length % group.block_size == 0 and bool(table[length // group.block_size - 1])
        return length < sequence.planned_in(group) and not is_checkpoint

    def may_lag(self, sequence: ModelSequence, length: int) -> bool:
        """Whether all that would remain may be hit, and a group outside prefix caching computes it only now."""
        apart = [group for group in self.groups if group.has_own_start]
        return any(sequence.planned_in(group) < length <= sequence.num_planned for group in apart)

    def truncated(self, sequence: ModelSequence, length: int) -> None:
        """A row was rolled back."""
        self.seen["truncate"] += length < len(sequence.tokens)
        self.accept_states(sequence, length)
        kept = [table[: group.num_blocks(length)] for group, table in zip(self.groups, sequence.tables, strict=True)]
        sequence.tables = self.read_tables(sequence.row)
        assert sequence.tables == kept
        sequence.slots = self.read_slots(sequence.row)
        assert not any(map(any, sequence.slots)), "a row whose tokens are all accepted has draft states"
        if self.receipts and length < len(sequence.tokens):
            self.receipts.truncated(sequence, length)
        sequence.cut(length)

    # Sharing

    def forked(self, parent: ModelSequence, rows: list[int]) -> None:
        """Children were made: they hold exactly the parent's blocks with content."""
        assert len(set(rows)) == len(rows)
        num_tokens = len(parent.tokens)
        for row in rows:
            assert row not in self.sequences
            child = ModelSequence(row, parent.keys, parent.root, list(parent.tokens), list(parent.prefixes))
            child.is_sharer, child.generation, child.tenant = True, parent.generation, parent.tenant
            child.num_accepted, child.is_plain = parent.num_accepted, False
            child.num_planned, child.is_planned = parent.num_planned, parent.is_planned
            child.planned_outside = parent.planned_outside
            parent.forked_replay(child)
            child.sure_from = child.sure_outside = num_tokens
            child.tables, child.slots = self.read_tables(row), self.read_slots(row)
            for group, table, mine in zip(self.groups, parent.tables, child.tables, strict=True):
                assert mine == table[: group.num_blocks(num_tokens)]
            self.sequences[row] = child
            if self.receipts:
                self.receipts.forked(parent, child)
        self.seen["fork"] += 1

    def may_branch(self, parent: ModelSequence, length: int) -> Refusal:
        """Return whether forking a row at a length below its own is refused: surely, or possibly."""
        is_unplanned = self.is_recurrent and length > min(parent.planned_in(group) for group in self.groups)
        is_draft = self.keeps_draft_states and parent.num_accepted < length
        if is_unplanned or is_draft or any(self._is_gone(group, parent, length) for group in self.groups):
            return Refusal(is_sure=True, is_possible=True)
        apart = [group for group in self.groups if group.has_own_start]
        may_lag = any(not (parent.is_planned and parent.planned_in(group) == len(parent.tokens)) for group in apart)
        return Refusal(is_sure=False, is_possible=may_lag)

    def branch_needs(self, length: int) -> dict[str, int]:
        """Blocks by pool that a fork at a length copies: those that it ends in."""
        needed = dict.fromkeys(self.config.pool_names, 0)
        for group in self.groups:
            needed[group.pool] += length % group.block_size > 0
        return needed

    def branched(self, parent: ModelSequence, rows: list[int], length: int) -> None:
        """Rows were made that begin with a prefix of another one: full blocks are its own, the last one is a copy."""
        tables, self.payer = self.read_tables(rows[0]), parent.tenant
        for group, table, mine in zip(self.groups, parent.tables, tables, strict=True):
            num_full, is_partial = divmod(length, group.block_size)
            assert mine[:num_full] == table[:num_full]
            assert len(mine) == num_full + (is_partial > 0)
            if is_partial:
                source = self._origin(group.pool, table[num_full])
                self.hand_out(group.pool, mine[num_full])
                self.open_moves.append(Move("copy", (group.pool, source), (group.pool, mine[num_full])))
        for row in rows:
            assert row not in self.sequences
            child = ModelSequence(row, parent.keys, parent.root, parent.tokens[:length], parent.prefixes[:length])
            child.is_sharer, child.generation, child.tenant = True, parent.generation, parent.tenant
            child.num_accepted, child.is_plain = min(parent.num_accepted, length), False
            child.num_planned = min(parent.num_planned, length)
            child.planned_outside = min(parent.planned_outside, length)
            parent.forked_replay(child)
            child.sure_from = child.sure_outside = length
            child.tables, child.slots = self.read_tables(row), self.read_slots(row)
            assert child.tables == tables
            self.sequences[row] = child
            if self.receipts:
                self.receipts.forked(parent, child)
        self.seen["fork at a prefix"] += 1

    def freed(self, rows: list[int], receipts: tuple[Receipt, ...]) -> None:
        """Rows were given up, and their receipts handed out."""
        ended = [self.sequences.pop(row) for row in rows]
        expected = map(self.receipts.freed, ended) if self.receipts else ()
        assert receipts == tuple(expected)
