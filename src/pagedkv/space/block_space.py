"""BlockSpace: every operation on sequences, for whole batches of rows at a time.

This is the public entry point. A *row* is a live sequence's place in the tables. Operations take arrays of rows and
decide everything before they change anything. They return a :class:`~pagedkv.contract.answers.Shortage`
when there are too few blocks. :meth:`BlockSpace.plan_step` returns what a step needs done in memory::

    allocate / append / truncate / fork / free / swap_out / swap_in    any number of times, in any order
    plan = plan_step()                                                 closes the open step
    acknowledge(plan.step_id)  or  abort(plan.step_id)                 when the device has run it, or failed

Tokens enter when they are scheduled: a chunked prefill is an ``allocate`` of the first chunk and an ``append`` of each
further one. Several steps may be in flight. The base classes have the operations on cached content
(:mod:`~pagedkv.space.content_space`), on rows that are swapped to the host and back
(:mod:`~pagedkv.space.swap_space`) and on steps (:mod:`~pagedkv.space.step_space`), and the methods of
features (:mod:`~pagedkv.space.optional_methods`). These classes check arguments and document; the modules beside
them do the work: ``admission``, ``growing``, ``filling``, ``redrafting``, ``truncating``, ``forking``, ``branching``,
``swapping``, ``holding``, ``loading``, ``planning``, ``stepping``, ``releasing``, ``invalidating``, ``withdrawing``.
"""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from pagedkv.contract.answers import Allocation, PrefixGone, Shortage
from pagedkv.contract.arguments import Rows, as_batch, as_count, as_counts, as_flag, as_row, as_token_array
from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.receipt import Receipt
from pagedkv.contract.spec import AllocStatus, TokenIds
from pagedkv.errors import ConfigurationError, SequenceError
from pagedkv.space import (
    admission,
    branching,
    drafting,
    filling,
    forking,
    growing,
    loading,
    redrafting,
    releasing,
    truncating,
)
from pagedkv.space.batches import (
    as_num_outputs,
    as_num_reached,
    require_known_prefix,
    require_status,
)
from pagedkv.space.hits import PrefixHit
from pagedkv.space.optional_methods import OptionalMethods
from pagedkv.space.prompts import prepare_prompt
from pagedkv.space.step_space import StepSpace
from pagedkv.tables.rows import OCCUPIED, RUNNING

__all__ = ["BlockSpace"]


class BlockSpace(StepSpace, OptionalMethods):
    """The KV-cache bookkeeping of one engine, by rows.

    All methods that take rows raise :class:`~pagedkv.errors.SequenceError` for rows that are unknown,
    freed, swapped out, lost or named twice; nothing is changed then. All methods raise
    :class:`~pagedkv.errors.InterruptedSpaceError` after an operation was stopped in the middle of its
    changes by an exception from outside (an interrupt, or memory that ran out).
    """

    # Admission

    def can_allocate(  # noqa: PLR0913 - what allocate takes, by the same keywords, and for how many sequences
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        num_lookahead: int = 0,
        num_sequences: int = 1,
        max_chunk: int | None = None,
        match: PrefixHit | None = None,
        tenant: str | None = None,
    ) -> AllocStatus:
        """Return whether a prompt fits: now, later, or not even into an empty pool. Changes nothing.

        Counts vacant rows, free blocks, the blocks that hits would save, and the watermark. A tenant's cap and the
        floors of other tenants limit it too. NEVER means that the prompt fits neither into an empty pool nor into one
        that holds nothing but hits of this prompt which other sequences use.

        Args:
            token_ids, keys, digests, num_lookahead, num_sequences, match, tenant: as in :meth:`allocate`.
            max_chunk: most prompt tokens that one step computes, for chunked prefill in which each step is
                acknowledged before the next chunk. Windows free blocks between chunks, so the largest number of blocks
                held at any one time is counted. None: the whole prompt in one step. A window group outside prefix
                caching holds the whole hit in the first chunk. If that is too much even for an idle pool, allocate a
                shorter beginning of the prompt, which hits less.

        Raises:
            TokenError: a prompt beyond ``max_tokens``; see also :meth:`allocate`.
        """
        reserve = as_count(num_lookahead, "num_lookahead")
        prompt = prepare_prompt(self._state, token_ids, keys, digests, reserve)
        num_rows = as_count(num_sequences, "num_sequences", least=1)
        chunk = len(prompt.tokens) if max_chunk is None else as_count(max_chunk, "max_chunk", least=1)
        question = admission.Admission(prompt, reserve, num_rows, chunk, tenant=self._state.room.number_of(tenant))
        return admission.admission_status(self._state, question, match)

    def allocate(  # noqa: PLR0913 - one prompt and all its options, by keywords
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        num_lookahead: int = 0,
        num_draft: int = 0,
        num_sequences: int = 1,
        num_external_tokens: int = 0,
        match: PrefixHit | None = None,
        prompt: TokenIds | None = None,
        continues: Receipt | None = None,
        publish: bool | Literal["prompt"] = True,
        tenant: str | None = None,
    ) -> Allocation | Shortage:
        """Give a new sequence a row and blocks for its tokens, sharing what is cached.

        Args:
            token_ids: any prefix that may hit, followed by the tokens that the open step computes.
            keys: extra keys: LoRA, tenant salt, media.
            digests: uint8 ``[full blocks, 32]`` computed elsewhere (full attention only). A wrong digest can lose
                hits, but never grants one. Not used with ``events``: pagedkv computes what their readers rely on.
            num_lookahead: slots reserved beyond the tokens.
            num_draft: trailing tokens that are drafts (guesses), as in :meth:`append`. A hit ends before the last
                certain token, and ``digests`` cover the certain tokens. Call :meth:`can_allocate` with the certain
                tokens alone, and with ``num_lookahead + num_draft`` lookahead slots.
            num_sequences: sequences that are to share the prompt by forks. A Shortage is returned also if the forks
                would lack blocks to reserve as many slots each (:meth:`append` without tokens reserves them). Only one
                row is allocated.
            num_external_tokens: leading tokens whose KV the engine copies from elsewhere into the row's blocks behind
                its hit. A window group gets the whole blocks that the next position reads, a recurrent state gets the
                last state, and a group outside prefix caching, where nothing hits, gets all from the first token on.
                The KV must be there before any part of the open step's plan is executed, also its swaps and copies,
                which may read it. If steps run in order, write it after the steps planned before, which may still write
                these blocks. These tokens count as computed at once; if they turn out wrong, :meth:`withdraw` them.
                If they reach no further than the hit, none is copied. Excludes ``num_draft``. To bring KV without a
                row, and without delaying a step, use :meth:`load`.
            match: what :meth:`match` answered for these keys and for a prompt that is, or begins with, these tokens. If
                the space has not changed since, the prompt is not matched again, only compared with the tokens of the
                blocks. Like ``prompt``, it gives the whole prompt.
            prompt: the whole prompt, if ``token_ids`` are its first chunk and ``match`` does not give it. With chunked
                prefill pass one of the two. The place where the prompt leaves cached content, and its end, then stay
                cached when windows pass them, and so does its last state. Without them these places are unknown, and
                later prompts do not hit there in window groups. Costs a :meth:`match` of the whole prompt.
            continues: the receipt of the request's former life, if it was preempted or lost. Its tokens are passed
                again, here and in appends; those computed again count as recomputed. The row gets a new receipt.
            publish: False: other sequences never hit what this sequence and its forks compute (private content, or
                content that will not be used again). The sequence itself hits what is cached all the same. "prompt":
                only whole blocks of the prompt are published (the prompt of ``match`` or ``prompt``, else these
                tokens).
            tenant: one of ``SpaceConfig.tenants``. It is charged for all free blocks, hits included, that this sequence
                and its forks take, until their content is dropped, or another tenant hits it when no sequence uses it.
                At its cap a tenant evicts its own cached blocks, and the floors of others are kept free: a Shortage
                states the tenant's share. None: no tenant, with neither cap nor floor.

        Raises:
            TokenError, ConfigurationError: see :func:`~pagedkv.space.prompts.prepare_prompt`; ``match`` is the
                answer for another prompt, other keys or another space, or the tokens were overwritten since; ``prompt``
                does not begin with ``token_ids``, or differs from the prompt of ``match``; ``continues`` is no
                receipt, or the space keeps none; there is no such tenant.
            TooManySequencesError: fewer than ``num_sequences`` rows are vacant. This is no answer, as a lack of blocks
                is: ``max_sequences`` is the caller's own number, and so is that of its sequences, while what a prompt
                shares and what is free is known only here.

        Cost: O(blocks); about 0.1 us a new block, and 0.08 us where its digest is computed.
        """
        num_reached = 0 if continues is None else as_num_reached(self._state, continues)
        reserve = as_count(num_lookahead, "num_lookahead")
        num_rows = as_count(num_sequences, "num_sequences", least=1)
        tokens, drafts = as_token_array(token_ids), drafting.NO_DRAFTS
        if as_count(num_draft, "num_draft"):
            tokens, drafts = drafting.split_drafts(self._state, tokens, num_draft, num_rows)
        beginning = prepare_prompt(self._state, tokens, keys, digests, reserve + len(drafts))
        if prompt is not None:
            match = admission.answer_for_whole(self._state, tokens, prompt, keys, match)
        wanted = admission.Admission(
            beginning,
            reserve + len(drafts),
            num_rows,
            len(tokens),
            num_reached,
            *admission.as_policy(publish),
            tenant=self._state.room.number_of(tenant),
            prompt_length=match.prompt_length if isinstance(match, PrefixHit) else len(tokens),
        )
        if as_count(num_external_tokens, "num_external_tokens"):
            if len(drafts):
                raise ConfigurationError("num_external_tokens and num_draft exclude each other: append drafts later")
            return loading.allocate_loaded(self._state, self._ledger, wanted, match, num_external_tokens)
        answer = admission.allocate(self._state, self._ledger, wanted, match)
        if len(drafts) and isinstance(answer, Allocation):
            drafting.append_drafts(self._state, self._ledger, answer.row, drafts, reserve)
        return answer

    # Growth

    def can_append(
        self,
        rows: Rows,
        counts: npt.ArrayLike | None = None,
        *,
        num_lookahead: int = 0,
        num_draft: int | npt.ArrayLike = 0,
        unknown: bool = False,
    ) -> bool:
        """Return exactly whether :meth:`append` would find enough blocks. Changes nothing.

        Args:
            rows, counts, num_lookahead, num_draft: as in :meth:`append`.
            unknown: whether the tokens would be unknown. Like ``num_draft`` this matters only where a recurrent group
                keeps draft states.
        """
        growth = growing.as_growth(self._state, as_batch(rows), counts, num_lookahead, num_draft)
        growth = growth._replace(is_unknown=as_flag(unknown, "unknown"))
        growing.require_growth(self._state, growth)
        return growing.growth_shortage(self._state, growth) is None

    def append(
        self,
        rows: Rows,
        token_ids: TokenIds | None,
        counts: npt.ArrayLike | None = None,
        *,
        num_lookahead: int = 0,
        num_draft: int | npt.ArrayLike = 0,
    ) -> Shortage | None:
        """Append tokens to a batch of rows: the decode step of 1,024 sequences is one call.

        Args:
            rows: the rows, each at most once.
            token_ids: the new tokens of all rows, concatenated in the order of ``rows``. None appends unknown tokens,
                which :meth:`fill` fills in later; drafts that are not accepted yet then count as unknown.
            counts: int32 ``[len(rows)]``, tokens of each row. None: one token a row; if ``rows`` is a single number,
                all tokens.
            num_lookahead: slots to be reserved beyond the tokens of every row.
            num_draft: trailing tokens that are guesses, one number for all rows or int32 ``[len(rows)]``. They are not
                published before they are accepted, by :meth:`truncate` or by the next append of tokens.

        Returns None, or the shortage with nothing changed. A row that appends to, or reserves slots in, a partly filled
        block that it shares gets its own copy of it; the plan lists these copies on write.

        Raises:
            TokenError: ids outside int32, counts that do not add up, more drafts than tokens, a row beyond
                ``max_tokens``.

        Cost: O(rows + tokens), about 5 ns a row. Rows with different numbers of drafts cost one call for each number.
        """
        copies = self.append_with_copies(rows, token_ids, counts, num_lookahead=num_lookahead, num_draft=num_draft)
        return copies if isinstance(copies, Shortage) else None

    def append_with_copies(
        self,
        rows: Rows,
        token_ids: TokenIds | None,
        counts: npt.ArrayLike | None = None,
        *,
        num_lookahead: int = 0,
        num_draft: int | npt.ArrayLike = 0,
    ) -> list[tuple[int, int]] | Shortage:
        """Append like :meth:`append`, and return the copies on write in the first group's pool."""
        if token_ids is None:
            unknown = growing.as_growth(self._state, as_batch(rows), counts, num_lookahead, num_draft)
            self._state.version += 1
            return filling.append_unknown(self._state, self._ledger, unknown)
        tokens = as_token_array(token_ids)
        if counts is None and (type(rows) is int or isinstance(rows, np.integer)):
            counts = [len(tokens)]
        growth = growing.as_growth(self._state, as_batch(rows), counts, num_lookahead, num_draft)
        self._state.version += 1
        return growing.append(self._state, self._ledger, growth, tokens)

    def fill(self, rows: Rows, token_ids: TokenIds, counts: npt.ArrayLike | None = None) -> None:
        """Fill in unknown tokens: each row gets what its oldest unfilled step has sampled.

        For each row a step samples the tokens behind the positions that it computes: one in the place of each draft,
        which verifies it, and one more. Unknown tokens of the step that are not filled in count as refused, and later
        tokens move down, also in steps in flight. Blocks are published, and windows slide, once a step that computes
        the filled tokens is acknowledged.

        Args:
            rows: the rows, each at most once.
            token_ids: the sampled tokens of all rows, concatenated in the order of ``rows``.
            counts: int32 ``[len(rows)]``, tokens of each row, at least one. None: one each.

        Raises:
            TokenError: a row has no unknown tokens, or no planned step samples its first one; more tokens than its step
                has sampled, or than it has slots for, or none; counts that do not add up; ids outside int32.

        Nothing is changed when it raises. O(rows + tokens + rows of the steps in flight).
        """
        batch, tokens = as_batch(rows), as_token_array(token_ids)
        self._state.version += 1
        filling.fill(self._state, self._ledger, batch, counts, tokens)

    def replace_drafts(self, rows: Rows, token_ids: TokenIds, counts: npt.ArrayLike | None = None) -> None:
        """Give drafts other token ids: those that a draft model proposes after their step was planned.

        Args:
            rows: the rows, each at most once.
            token_ids: the new ids of all rows' drafts, concatenated in the order of ``rows``.
            counts: int32 ``[len(rows)]``, how many of each row's last tokens are replaced. None: one each.

        Raises:
            TokenError: more than a row's drafts; counts that do not add up; ids outside int32.
            SharedPrefixError: another sequence or a ticket holds drafts.

        Nothing is changed when it raises. O(rows x groups + tokens).
        """
        batch, tokens = as_batch(rows), as_token_array(token_ids)
        self._state.version += 1
        redrafting.replace_drafts(self._state, batch, tokens, counts)

    def truncate(self, rows: Rows, lengths: npt.ArrayLike) -> None:
        """Roll rows back to earlier lengths, free reserved slots, and accept and publish the remaining tokens.

        Raises:
            SharedPrefixError: another sequence or a ticket holds blocks beyond that length.
            TruncationError: a length outside ``[1, num_tokens]``; a length whose window or state is gone; a length
                inside a hit that a group outside prefix caching, or a replayed window, has not computed yet.

        Nothing is changed when it raises. O(rows + blocks freed or completed), about 12 ns a row.
        """
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        wanted = as_counts(lengths, len(batch), "lengths")
        self._state.version += 1
        truncating.truncate(self._state, self._ledger, batch, wanted)

    # Sharing

    @overload
    def fork(self, row: int, num_children: int = 1) -> Int32Array: ...

    @overload
    def fork(self, row: int, num_children: int = 1, *, at: int) -> Int32Array | Shortage | PrefixGone: ...

    def fork(self, row: int, num_children: int = 1, *, at: int | None = None) -> Int32Array | Shortage | PrefixGone:
        """Make sequences that share the blocks of a row; return their rows. Copies nothing, except ``at`` in a block.

        Args:
            row: the row.
            num_children: how many sequences.
            at: how many of the row's known tokens the children begin with; None: all. Inside a block, the open plan
                makes one copy of that block for all children. The answer may then be a :class:`~pagedkv.Shortage`, or
                a :class:`~pagedkv.PrefixGone` if a window or a state at that position is gone; it gives the longest
                prefix that can be forked. Nothing is changed in both cases.

        Raises:
            TooManySequencesError: there are fewer vacant rows.
            SequenceError: ``at`` covers unknown tokens, or more than the row has; or no plan computes the tokens of a
                recurrent state yet.

        Cost: O(blocks x children), about 1 ns each; O(tokens) to find the longest prefix.
        """
        parent = as_row(row)
        batch = as_batch(parent)
        require_status(self._state, batch, RUNNING)
        num_new = as_count(num_children, "num_children", least=1)
        length = self.num_tokens(parent) if at is None else as_count(at, "at", least=1)
        require_known_prefix(self._state, parent, length)
        self._state.version += 1
        if length < self.num_tokens(parent):
            return branching.branch(self._state, self._ledger, parent, num_new, length)
        return forking.fork(self._state, self._ledger, parent, num_new)

    def free(
        self,
        rows: Rows,
        *,
        num_generated: npt.ArrayLike | None = None,
        superseded_by: int | None = None,
        keep_until_s: float | None = None,
        priority: int = 0,
    ) -> tuple[Receipt, ...]:
        """Free sequences that are running, swapped out or lost. O(blocks), about 5 ns each.

        Their cached blocks can be hit until they are evicted; of one sequence the tail is evicted first.

        Args:
            rows: the rows.
            num_generated: how many tokens of each row were generated, if known. An eviction policy that learns uses it.
            superseded_by: a row that replaces these rows, such as a continued or edited conversation. Content that only
                these rows hold is not expected to be hit again, and is evicted before all other cached blocks.
            keep_until_s: until this time what the running rows leave cached is leased (:meth:`lease`). For requests
                that will come back, such as a conversation that waits for a tool.
            priority: 1: what they leave is evicted after all other unleased blocks, but before leases, as long as it
                stays cached. -1: what only they held is evicted first. 1 needs ``leases`` in the configuration, as
                ``keep_until_s`` does.

        Returns their receipts, in the order of ``rows``, if the space keeps receipts; else an empty tuple.

        Raises:
            SequenceError: ``superseded_by`` is among ``rows``, or is neither running nor swapped out.
            TokenError: not as many numbers as rows, or a negative one.
            ConfigurationError: a lease whose end is past or infinite; another priority; two of the three at once.
        """
        leaving = releasing.as_leaving(self._state, superseded_by, keep_until_s, priority)
        batch = as_batch(rows)
        if num_generated is not None:
            leaving = leaving._replace(num_outputs=as_num_outputs(num_generated, batch))
        if superseded_by is not None:
            self._require_successor(as_row(superseded_by), batch)
        mark = require_status(self._state, batch, OCCUPIED)
        self._state.version += 1
        releasing.free(self._state, batch, mark, leaving)
        return () if self._receipts is None else self._receipts.take_freed()

    def _require_successor(self, row: int, batch: Int32Array) -> None:
        """Check that the superseding row is occupied and not in the batch."""
        require_status(self._state, as_batch(row), OCCUPIED)
        if (batch == row).any():
            raise SequenceError(f"row {row} cannot be superseded by itself: name the row that replaces it")
