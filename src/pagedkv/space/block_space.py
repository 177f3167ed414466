"""BlockSpace: every operation on sequences, for whole batches of rows at a time.

This is the public entry point. A *row* is a live sequence's place in the tables. Operations take arrays of rows and
decide everything before they change anything. They return a :class:`~pagedkv.contract.answers.Shortage`
when there are too few blocks. :meth:`BlockSpace.plan_step` returns what a step needs done in memory::

    allocate / append / truncate / fork / free / swap_out / swap_in    any number of times, in any order
    plan = plan_step()                                                 closes the open step
    acknowledge(plan.step_id)  or  abort(plan.step_id)                 when the device has run it, or failed

Tokens enter when they are scheduled: a chunked prefill is an ``allocate`` of the first chunk and an ``append`` of each
further one. Several steps may be in flight. The class checks arguments and
documents; the module beside it that bears an operation's name carries it out: its rule in Python, its loops below.
"""

from __future__ import annotations  # help() shows the names of types, which in full would hide the rest

from collections import abc
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from pagedkv.contract.answers import (
    AbortedSteps,
    Allocation,
    BlockHolders,
    EpochSpan,
    Explanation,
    InvalidatedMemory,
    KeptState,
    Load,
    PrefixGone,
    Receipt,
    Shortage,
    TenantShare,
    Ticket,
    Withdrawal,
)
from pagedkv.contract.arguments import Rows, as_batch, as_count, as_counts, as_flag, as_row, as_token_array
from pagedkv.contract.arrays import NO_BLOCKS, Int32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.plan import BlockMoves, StepPlan
from pagedkv.contract.space_config import TenantLimits
from pagedkv.contract.spec import AllocStatus, StepId, TokenIds
from pagedkv.errors import (
    ConfigurationError,
    InterruptedSpaceError,
    NoHostPoolError,
    SequenceError,
    StepError,
    TokenError,
)
from pagedkv.space import (
    admission,
    declaring,
    explaining,
    filling,
    forgetting,
    forking,
    growing,
    keeping,
    loading,
    planning,
    releasing,
    resizing,
    swapping,
    truncating,
    withdrawing,
)
from pagedkv.space.admission import Admission, free_blocks_needed
from pagedkv.space.crossing import as_encoder_tokens
from pagedkv.space.epochs import as_epochs, as_next_epoch, begin_epoch, spans_of
from pagedkv.space.forgetting import forget, start_of_branch
from pagedkv.space.hits import PrefixHit, prepare_prompt
from pagedkv.space.matching import match_each, match_prompt
from pagedkv.space.observer import SpaceObserver, register
from pagedkv.space.releasing import as_lease_end, lease_hit, reset_prefix_cache
from pagedkv.space.rows import OCCUPIED, RUNNING, SWAPPED
from pagedkv.space.space_view import ObservedSpace, SpaceView
from pagedkv.space.state import (
    SpaceState,
    as_num_outputs,
    as_num_reached,
    as_step_id,
    has_unknown,
    require_known,
    require_known_prefix,
    require_status,
)
from pagedkv.space.tenants import remove_tenant, require_limits, require_removable, set_tenant


class BlockSpace(SpaceView):
    """The KV-cache bookkeeping of one engine, by rows.

    All methods that take rows raise :class:`~pagedkv.errors.SequenceError` for rows that are unknown,
    freed, swapped out, lost or named twice; nothing is changed then. All methods raise
    :class:`~pagedkv.errors.InterruptedSpaceError` after an operation was stopped in the middle of its
    changes by an exception from outside (an interrupt, or memory that ran out).
    """

    @property
    def _state(self) -> SpaceState:
        """The state. Raises InterruptedSpaceError if an interrupted operation left it half changed."""
        if self._own_state.is_changing:
            raise InterruptedSpaceError(
                "an operation on this space was interrupted while it changed tables and pools: build a new space and "
                "allocate every sequence again"
            )
        return self._own_state

    # Admission

    def can_allocate(
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        num_lookahead: int = 0,
        num_reserved: int = 0,
        num_sequences: int = 1,
        num_encoder_tokens: int = 0,
        max_chunk: int | None = None,
        match: PrefixHit | None = None,
        tenant: str | None = None,
    ) -> AllocStatus:
        """Return whether a prompt fits: now, later, or not even into an empty pool. Changes nothing.

        Counts vacant rows, free blocks, the blocks that hits would save, and the watermark. A tenant's cap and the
        floors of other tenants limit it too. NEVER means that the prompt fits neither into an empty pool nor into one
        that holds nothing but hits of this prompt which other sequences use.

        Args:
            token_ids, keys, digests, num_lookahead, num_sequences, num_encoder_tokens, match, tenant: as in
                :meth:`allocate`.
            num_reserved: slots that are to stay free in each group for other sequences to grow into, in whole blocks
                (none for recurrent states and encoders); they may exceed ``max_tokens``. They count towards NEVER.
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
        number, beside = self._state.room.number_of(tenant), as_count(num_reserved, "num_reserved")
        question = admission.Admission(
            prompt,
            reserve,
            num_rows,
            chunk,
            tenant=number,
            num_reserved=beside,
            num_encoder_tokens=as_encoder_tokens(self._state, num_encoder_tokens, keys),
        )
        return admission.admission_status(self._state, question, match)

    def num_allocatable(
        self,
        matches: abc.Sequence[PrefixHit],
        *,
        num_lookahead: int = 0,
        tenants: abc.Sequence[str | None] | None = None,
        num_encoder_tokens: abc.Sequence[int] | None = None,
    ) -> int:
        """Return how many of some prompts, from the first on, fit beside one another now. Changes nothing.

        So many can be allocated one after the other in the open step, each with its ``match``: :meth:`can_allocate`
        would answer OK each time. Two things are not foreseen. What prompts have in common and is not cached yet is
        counted for each of them, though they will share it. And where a group is a window, a chunk or a state, a
        prompt may need more blocks than counted once the allocations before it have evicted what it hits; with LRU
        that cannot be if all these prompts were touched before they were matched (:meth:`touch`).

        Args:
            matches: the answer of :meth:`match` for each prompt.
            num_lookahead: slots reserved beyond the tokens of each.
            tenants: the tenant of each prompt; None: none has a tenant.
            num_encoder_tokens: the tokens of each prompt's encoder, as in :meth:`allocate`; None: none has an encoder.

        Raises:
            ConfigurationError: ``matches`` are no answers of this space; not as many tenants, or one that is unknown;
                not as many encoders, or one that :meth:`allocate` refuses.
            TokenError: a prompt and its lookahead beyond ``max_tokens``, or one that was overwritten since; an encoder
                beyond ``max_encoder_tokens``.

        Cost: that of :meth:`can_allocate` for each prompt; 0.2 us more for each free block that it hits.
        """
        reserve = as_count(num_lookahead, "num_lookahead")
        wanted = admission.as_admissions(self._state, matches, tenants, reserve, num_encoder_tokens)
        return admission.num_that_fit(self._state, wanted)

    def allocate(
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        num_lookahead: int = 0,
        num_draft: int = 0,
        num_sequences: int = 1,
        num_encoder_tokens: int = 0,
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
            num_encoder_tokens: tokens of the encoder that the sequence attends to
                (:class:`~pagedkv.CrossAttention`). Blocks for their entries are taken with the others, all or none; the
                first plan of the row writes all of them (:meth:`StepPlan.compute_in <pagedkv.StepPlan.compute_in>`),
                its forks share them, and they go with the last of these. With prefix caching ``keys`` must tell
                encoders apart by a medium that begins at the first token: ``media=(MediaSpan(0, 1, digest),)``.
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
            TokenError, ConfigurationError: see :func:`~pagedkv.space.hits.prepare_prompt`; ``match`` is the
                answer for another prompt, other keys or another space, or the tokens were overwritten since; ``prompt``
                does not begin with ``token_ids``, or differs from the prompt of ``match``; ``continues`` is no
                receipt, or the space keeps none; there is no such tenant; an encoder beyond ``max_encoder_tokens``,
                without a group of cross-attention, or with keys that do not tell it from others.
            TooManySequencesError: fewer than ``num_sequences`` rows are vacant. This is no answer, as a lack of blocks
                is: ``max_sequences`` is the caller's own number, and so is that of its sequences, while what a prompt
                shares and what is free is known only here.

        Cost: O(blocks); about 0.1 us a new block, and 0.08 us where its digest is computed.
        """
        num_reached = 0 if continues is None else as_num_reached(self._state, continues)
        reserve = as_count(num_lookahead, "num_lookahead")
        num_rows = as_count(num_sequences, "num_sequences", least=1)
        tokens, drafts = as_token_array(token_ids), NO_BLOCKS
        if as_count(num_draft, "num_draft"):
            tokens, drafts = admission.split_drafts(self._state, tokens, num_draft, num_rows)
        beginning = prepare_prompt(self._state, tokens, keys, digests, reserve + len(drafts))
        if prompt is not None:
            match = admission.answer_for_whole(self._state, tokens, prompt, keys, match)
        wanted = admission.Admission(
            beginning,
            reserve + len(drafts),
            num_rows,
            len(tokens),
            num_reached,
            prompt_length=match.prompt_length if isinstance(match, PrefixHit) else len(tokens),
        )
        if tenant is not None:
            wanted = wanted._replace(tenant=self._state.room.number_of(tenant))
        if publish is not True:
            publishes, prompt_only = admission.as_policy(publish)
            wanted = wanted._replace(publishes=publishes, prompt_only=prompt_only)
        if type(num_encoder_tokens) is not int or num_encoder_tokens:  # a plain 0 needs no check
            wanted = wanted._replace(num_encoder_tokens=as_encoder_tokens(self._state, num_encoder_tokens, keys))
        if as_count(num_external_tokens, "num_external_tokens"):
            if len(drafts):
                raise ConfigurationError("num_external_tokens and num_draft exclude each other: append drafts later")
            return loading.allocate_loaded(self._state, self._ledger, wanted, match, num_external_tokens)
        answer = admission.allocate(self._state, self._ledger, wanted, match)
        if len(drafts) and isinstance(answer, Allocation):
            admission.append_drafts(self._state, self._ledger, answer.row, drafts, reserve)
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
            return filling.append_unknown(self._state, self._ledger, unknown)
        tokens = as_token_array(token_ids)
        if counts is None and (type(rows) is int or isinstance(rows, np.integer)):
            counts = [len(tokens)]
        growth = growing.as_growth(self._state, as_batch(rows), counts, num_lookahead, num_draft)
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
        filling.replace_drafts(self._state, batch, tokens, counts)

    def truncate(self, rows: Rows, lengths: npt.ArrayLike) -> None:
        """Roll rows back to earlier lengths, free reserved slots, and accept and publish the remaining tokens.

        Raises:
            SharedPrefixError: another sequence or a ticket holds blocks beyond that length.
            TruncationError: a length outside ``[1, num_tokens]``; a length whose window or state is gone; a length
                inside a hit that a group outside prefix caching, or a replayed window, has not computed yet, or whose
                row's encoder is not planned yet.

        Nothing is changed when it raises. O(rows + blocks freed or completed), about 12 ns a row.
        """
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        wanted = as_counts(lengths, len(batch), "lengths")
        truncating.truncate(self._state, self._ledger, batch, wanted)

    def keep_states(self, row: int, position: int) -> tuple[KeptState, ...] | Shortage:
        """Keep the recurrent states of a row at a position inside the chunk that the open step computes.

        For kernels that can write the state after any position of what they compute: the row's chunk need not end
        there. Call it before the tokens behind the row's length are appended, or, for a new row, after it was
        allocated. Each group of states gets a block of its own, except where an interval ends there, so that its state
        is kept anyway. The engine writes the state into it in the open step's forward pass. Once that is planned, the
        state can be hit and held (:meth:`hold`), as a prompt's last state is
        (:attr:`Allocation.checkpoint <pagedkv.Allocation.checkpoint>`). It stays cached when the step is over.

        A prompt hits there if hits can end there in the other groups: at multiples of their block sizes, or anywhere
        with :attr:`SpaceConfig.min_partial_hit <pagedkv.SpaceConfig>`. The last position that is named in a step also
        takes the place of the prompt's end, for what windows and states keep cached.

        If the plan does not compute that position, or computes it as a draft, or the row was rolled back, freed or
        publishes nothing, the blocks return to the free ones. So they do if the step is aborted; name the position
        again.

        Args:
            row: the row.
            position: how many leading tokens the state covers.

        Returns a block for each group that needs one, in the order of the groups; or the shortage, with nothing
        changed.

        Raises:
            ConfigurationError: no group is a recurrent state with prefix caching.
            TokenError: the position is planned already, or beyond ``max_tokens``; or its chunk was appended before.

        Cost: O(groups).
        """
        known = as_row(row)
        require_status(self._state, as_batch(known), RUNNING)
        if self._state.checkpoints is None:
            raise ConfigurationError("no states are kept: no group is a recurrent state with prefix caching")
        where = as_count(position, "position", least=1, most=self.config.max_tokens, error=TokenError)
        return keeping.keep_states(self._state, known, where)

    # Sharing

    @overload
    def fork(self, row: int, num_children: int = 1) -> Int32Array: ...

    @overload
    def fork(self, row: int, num_children: int = 1, *, at: int) -> Int32Array | Shortage | PrefixGone: ...

    def fork(self, row: int, num_children: int = 1, *, at: int | None = None) -> Int32Array | Shortage | PrefixGone:
        """Make sequences that share the blocks of a row; return their rows. Copies nothing, except ``at`` in a block.

        The children attend to the row's encoder, and share all blocks of it.

        Args:
            row: the row.
            num_children: how many sequences.
            at: how many of the row's known tokens the children begin with; None: all. Inside a block, the open plan
                makes one copy of that block for all children. The answer may then be a :class:`~pagedkv.Shortage`, or
                a :class:`~pagedkv.PrefixGone` if a window or a state at that position is gone; it gives the longest
                prefix that can be forked. Nothing is changed in both cases.

        Raises:
            TooManySequencesError: there are fewer vacant rows.
            ConfigurationError: the names of a group cover tokens ahead.
            SequenceError: ``at`` covers unknown tokens, or more than the row has; or no plan computes the tokens of a
                recurrent state yet.

        Cost: O(blocks x children), about 1 ns each; O(tokens) to find the longest prefix.
        """
        self._refuse_ahead("a row cannot be forked, so allocate its tokens again, which hit")
        parent = as_row(row)
        batch = as_batch(parent)
        require_status(self._state, batch, RUNNING)
        num_new = as_count(num_children, "num_children", least=1)
        length = self.num_tokens(parent) if at is None else as_count(at, "at", least=1)
        require_known_prefix(self._state, parent, length)
        if length < self.num_tokens(parent):
            return forking.branch(self._state, self._ledger, parent, num_new, length)
        return forking.fork(self._state, self._ledger, parent, num_new)

    def free(
        self,
        rows: Rows,
        *,
        num_generated: npt.ArrayLike | None = None,
        superseded_by: int | None = None,
        keep_until_s: float | None = None,
        priority: int = 0,
        keeps_end: bool = False,
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
                ``keep_until_s`` does. With ``eviction="priority"`` it is a number from -127 to 127 instead: content of
                lower numbers is evicted first, and what several sequences held has the highest of theirs.
            keeps_end: keep the states of recurrent groups where the rows end, so that a conversation's next turn hits
                all that was computed, whatever its length: its first step copies these states, and the partly filled
                blocks of other groups. The end of a turn that goes on from another end supersedes that one, and the
                states of the prompt before it. Nothing is copied or taken for this. Of rows whose last step is in
                flight, or that share their last blocks, and with ``num_draft_states``, nothing is kept.

        Returns their receipts, in the order of ``rows``, if the space keeps receipts; else an empty tuple.

        Raises:
            SequenceError: ``superseded_by`` is among ``rows``, or is neither running nor swapped out.
            TokenError: not as many numbers as rows, or a negative one.
            ConfigurationError: a lease whose end is past or infinite; another priority; two of the three at once;
                ``keeps_end`` that is no truth value.
        """
        leaving = releasing.NOTHING_WANTED
        if superseded_by is not None or keep_until_s is not None or type(priority) is not int or priority:
            leaving = releasing.as_leaving(self._state, superseded_by, keep_until_s, priority)
        if keeps_end is not False:
            leaving = leaving._replace(keeps_end=as_flag(keeps_end, "keeps_end"))
        batch = as_batch(rows)
        if num_generated is not None:
            leaving = leaving._replace(num_outputs=as_num_outputs(num_generated, batch))
        if superseded_by is not None:
            self._require_successor(as_row(superseded_by), batch)
        mark = require_status(self._state, batch, OCCUPIED)
        releasing.free(self._state, batch, mark, leaving)
        return () if self._state.receipts is None else self._state.receipts.take_freed()

    def _require_successor(self, row: int, batch: Int32Array) -> None:
        """Check that the superseding row is occupied and not in the batch."""
        require_status(self._state, as_batch(row), OCCUPIED)
        if (batch == row).any():
            raise SequenceError(f"row {row} cannot be superseded by itself: name the row that replaces it")

    # Swapping

    def can_swap_out(self, rows: Rows) -> AllocStatus:
        """Return whether the host pools can take these rows. Changes nothing.

        OK if :meth:`swap_out` would succeed. NEVER without a host pool, or if the rows fit neither into an empty host
        pool nor into one that holds nothing but blocks which they share there. LATER also while the open plan copies or
        swaps into their blocks, while a step that replays a window of theirs is not acknowledged, and until their
        unknown tokens are filled in.
        """
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        status = swapping.swap_out_status(self._state, self._ledger, batch)
        return AllocStatus.LATER if status is AllocStatus.OK and has_unknown(self._state, batch) else status

    def swap_out(self, rows: Rows) -> tuple[BlockMoves, ...] | Shortage:
        """Move rows to the host pools, device block -> host block; a block that several of these rows share moves once.

        The moves are in the open step's plan as well; the device blocks are freed when it is acknowledged.

        Raises:
            NoHostPoolError: a group's pool has no host pool.
            SequenceError: the open plan writes their blocks, a window is being replayed, or tokens are unknown
                (``can_swap_out`` returns LATER).
        """
        batch = as_batch(rows)
        mark = require_status(self._state, batch, RUNNING)
        require_known(self._state, batch, "swapped out")
        return swapping.swap_out(self._state, self._ledger, batch, mark)

    def can_swap_in(
        self, rows: Rows, counts: npt.ArrayLike | None = None, *, num_lookahead: int = 0, num_reserved: int = 0
    ) -> AllocStatus:
        """Return whether the device pools can take swapped-out rows back and let them continue. Changes nothing.

        Args:
            rows: the rows.
            counts: int32 ``[len(rows)]``, tokens that each row gets next; None: one each (none at ``max_tokens``).
                Blocks for these tokens, and for the copies on write that they cause, are counted.
            num_lookahead: slots a row beyond these tokens.
            num_reserved: slots that are to stay free for other sequences, as in :meth:`can_allocate`.

        OK if all fits and the watermark stays free; NEVER if it fits neither into empty pools nor into pools that hold
        nothing but blocks which the rows share there.
        """
        self._require_host_pools()
        batch = as_batch(rows)
        require_status(self._state, batch, SWAPPED)
        reserve = as_count(num_lookahead, "num_lookahead")
        growth = swapping.as_next_counts(self._state, batch, counts, reserve)
        return swapping.swap_in_status(self._state, batch, growth, reserve, as_count(num_reserved, "num_reserved"))

    def swap_in(self, rows: Rows) -> tuple[BlockMoves, ...] | Shortage:
        """Move swapped-out rows back: host block -> device block. The open step may compute them at once."""
        self._require_host_pools()
        batch = as_batch(rows)
        require_status(self._state, batch, SWAPPED)
        return swapping.swap_in(self._state, self._ledger, batch)

    def _require_host_pools(self) -> None:
        if not self._state.host_pools:
            raise NoHostPoolError("no host pool is configured: set num_host_blocks")

    # Steps

    def plan_step(self) -> StepPlan:
        """Close the open step; return all that it needs done in memory. O(changed rows + changed table entries)."""
        return planning.plan_step(self._state, self._ledger)

    def acknowledge(self, step_id: StepId) -> None:
        """Note that the oldest step in flight has run: its tokens are computed, blocks that waited for it are freed.

        Raises:
            StepError: another step is the oldest in flight.
        """
        planning.acknowledge(self._state, self._ledger, as_step_id(step_id))

    def abort(self, step_id: StepId) -> AbortedSteps:
        """Note that a step failed. It and all later steps count as never run; what they published is withdrawn.

        Rows that share tokens which another row computes in these steps, or in the open one, are lost, since for each
        row only the last such step is recorded.

        Raises:
            StepError: the step is not in flight.
        """
        return planning.abort(self._state, self._ledger, as_step_id(step_id))

    def mark_computed(self, rows: Rows) -> None:
        """Declare all tokens of these rows, and their encoders' entries, computed outside any plan; windows slide.

        If the open step or one in flight computes blocks that rows share, name all these rows together. If a step in
        flight computes a row too, the caller must make sure that this step leaves the declared content intact, even if
        it fails.

        Raises:
            StepError: a group is a recurrent state and steps in flight may still advance it; or a row that is not named
                computes shared blocks.
        """
        if self._state.is_recurrent and self._ledger.in_flight:
            raise StepError("a recurrent state cannot be declared computed while steps are in flight: acknowledge them")
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        require_known(self._state, batch, "declared computed")
        declaring.mark_computed(self._state, self._ledger, batch)

    # Finding

    def observe(self, observer: SpaceObserver) -> None:
        """Let an observer follow every operation from now on; it is called after the observers given before. O(1).

        It is called in the middle of operations. It gets a view of this space that can be queried then too
        (:class:`~pagedkv.space.SpaceObserver`). Changes nothing else.

        Raises:
            ConfigurationError: ``observer`` is no SpaceObserver.
        """
        if not isinstance(observer, SpaceObserver):
            raise ConfigurationError(f"an observer is a SpaceObserver, got {observer!r}")
        observer.begin(ObservedSpace(self))
        register(self._state.observers, observer)

    def match(
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        max_hit_tokens: int | None = None,
        max_replay_tokens: int = 0,
    ) -> PrefixHit:
        """Return how many leading tokens are cached, and in which blocks. Changes nothing. O(blocks of the prompt).

        :meth:`can_allocate` and :meth:`allocate` take the answer as ``match=``, so that a prompt is matched once. The
        answer refers to ``token_ids``: do not change them until then.

        Args:
            token_ids, keys, digests: as in :meth:`allocate`.
            max_hit_tokens: most tokens that may hit; 0 declines any hit, for a prompt whose logits are all needed. The
                bound also holds in ``can_allocate`` and ``allocate``, even if they have to match again. None: no bound.
            max_replay_tokens: most tokens that the open step may compute again in window groups alone, so that the hit
                can reach further: to where full attention still has the prompt but the windows do not
                (:class:`~pagedkv.Replay`). Used where it saves more than it costs. All of them are computed in the open
                step, together with the first token behind the hit. 0: none. No effect if no group is configured for
                replay.

        Raises:
            ConfigurationError: ``max_hit_tokens`` or ``max_replay_tokens`` is negative or no integer; see also
                :meth:`allocate`.
        """
        prompt = prepare_prompt(self._state, token_ids, keys, digests, 0)
        if type(max_replay_tokens) is not int or max_replay_tokens:  # a plain 0 needs no check
            prompt = prompt._replace(max_replay_tokens=as_count(max_replay_tokens, "max_replay_tokens"))
        if max_hit_tokens is not None:
            prompt = prompt._replace(max_hit_tokens=as_count(max_hit_tokens, "max_hit_tokens"))
        hit = match_prompt(self._state, prompt)
        if self._state.loads:
            hit.loading = loading.load_that_continues(self._state, prompt, hit)
        return hit

    def match_each(self, token_ids: TokenIds, *, keys: RequestKeys = NO_KEYS) -> tuple[int, ...]:
        """Return how many leading tokens each group has cached by itself, before the groups agree. Changes nothing.

        :meth:`match` returns what all groups can serve at once. Where one group has more than that, what the others
        lack can be brought (:meth:`load`) instead of computed. A group serves a length if it has the blocks that a hit
        of that length needs: all of them, the last window, or the state there.

        Args:
            token_ids, keys: as in :meth:`allocate`; the last token never hits.

        Returns a length for each group: whole blocks, or up to a state that is kept inside an interval; 0 for a group
        outside prefix caching.

        Raises: as :meth:`allocate`, for its prompt.

        Cost: that of :meth:`match`; in groups that drop blocks 0.08 us more for each block of the prompt.
        """
        return match_each(self._state, prepare_prompt(self._state, token_ids, keys, None, 0))

    # Time

    def advance(self, now_s: float) -> None:
        """Set the clock by which leases end and eviction policies measure ages, in the caller's seconds.

        The clock stands still between calls, and may run at any rate. If it is never set, policies count blocks
        instead. O(log leased blocks) for each block whose lease has ended.

        Args:
            now_s: seconds, at least 0, since a moment that is the same for all calls.

        Raises:
            ConfigurationError: the time goes back, or is no number of seconds; nothing is changed.
        """
        time = releasing.as_time(self._state, now_s)
        releasing.advance(self._state, time)

    # External readers

    def hold(self, block_ids: npt.ArrayLike, pool: str | None = None) -> Ticket:
        """Keep blocks for an external reader, such as a tier or a sender, until :meth:`release`.

        The blocks stay cached and keep their content. A ticket counts like one more sequence that shares the blocks:
        they are neither free nor evicted, the next write into one copies it, and :meth:`truncate` into one raises
        SharedPrefixError. Their rows may be freed or swapped out meanwhile. What steps in flight compute, copy or swap
        into a block is there once they have run; if one is aborted, :class:`~pagedkv.AbortedSteps` lists the ticket.
        Resetting the cache takes the blocks out of the prefix index and leaves their content.

        Args:
            block_ids: blocks with content, repeats allowed: blocks of a row that a plan computes, blocks of a
                :class:`~pagedkv.PrefixHit`, and freed blocks that are cached or deferred. Reserved slots have no
                content.
            pool: name of their device pool; the first group's when None.

        Raises:
            BlockError: the null block, a foreign id, an absent block, a free block without content, a block that the
                open step computes, copies or swaps something into, or free blocks that tenants' floors keep; nothing is
                changed.

        Cost: O(blocks), and O(tenants) with free blocks.
        """
        owner = self._pool(pool)
        return loading.hold(self._state, self._ledger, owner, block_ids)

    def release(self, ticket: Ticket) -> None:
        """Release what a ticket holds; tickets may be released in any order. O(blocks).

        Raises:
            BlockError: the ticket was released before, or is not of this space; nothing is changed.
        """
        loading.release(self._state, ticket)

    # Keeping and dropping content

    def supersede(self, token_ids: TokenIds, *, keys: RequestKeys = NO_KEYS) -> None:
        """Evict the cached blocks of a prompt that nothing else refers to before all other cached blocks.

        For a sequence that was freed before the one that replaces it was admitted; else pass ``superseded_by`` to
        ``free``. Blocks that a row or a ticket holds, and leased blocks, stay as they are. Until they are evicted, the
        others can be hit as before.

        Args:
            token_ids: a prompt; its last token does not count, as for a hit.
            keys: its extra keys.

        Cost: O(blocks of the prompt).
        """
        hit = match_prompt(self._state, prepare_prompt(self._state, token_ids, keys, None, 0))
        releasing.supersede(self._state, hit)

    def touch(self, token_ids: TokenIds, *, keys: RequestKeys = NO_KEYS) -> int:
        """Keep the cached blocks of a prompt as if a sequence had just hit and left them; no row is taken.

        For a prompt that is known to come, or that was served from another copy. The eviction policy sees a hit;
        statistics and receipts count none. Superseded content becomes ordinary again. Blocks in use stay as they are.

        Args:
            token_ids: a prompt; its last token does not count, as for a hit.
            keys: its extra keys.

        Returns how many leading tokens are cached.

        Cost: O(blocks of the prompt).
        """
        hit = match_prompt(self._state, prepare_prompt(self._state, token_ids, keys, None, 0))
        releasing.touch(self._state, hit)
        return hit.num_tokens

    def evict(self, num_blocks: int, *, pool: str | None = None) -> int:
        """Evict cached blocks now, those that allocations would evict next: their content is lost, they stay free.

        Leased blocks are evicted last, and what the floors of tenants keep is not evicted. Blocks that rows, tickets or
        steps in flight use are not cached blocks.

        Args:
            num_blocks: how many.
            pool: name of their device pool; the first group's when None.

        Returns how many were evicted: fewer if there are not so many.

        Cost: O(evicted blocks + free blocks without content).
        """
        return releasing.evict(self._state, self._pool(pool), as_count(num_blocks, "num_blocks"))

    def forget(self, token_ids: TokenIds, *, keys: RequestKeys = NO_KEYS, start: int = 0) -> int:
        """Drop a prompt, and all that continues it, from the prefix cache, on the device and on the host.

        Rows that hold any of it run on, but publish nothing from now on. Rows that hold it as drafts, or as tokens
        filled in for a step in flight, still publish it once it is accepted. Content is found by its digest: content
        that was allocated with ``digests`` other than the prompt's own stays cached under those.

        Args:
            token_ids, keys: the prompt; ``start``: first position to be forgotten. The block that contains it is
                forgotten whole; the blocks before it, which other branches may share, stay.

        Returns how many blocks were removed from the prefix index.

        Cost: O(blocks + blocks of all rows), milliseconds for thousands of blocks.
        """
        prompt = prepare_prompt(self._state, token_ids, keys, None, 0)
        first = as_count(start, "start")
        return forget(self._state, prompt, first)

    def forget_branch(self, token_ids: TokenIds, *, keys: RequestKeys = NO_KEYS) -> int:
        """Drop the end of a prompt that it shares with nothing from the prefix cache; leases of it end.

        The prompt keeps what it shares with other content, which continues it in another way, and with rows. So a
        session's tokens can be given back, and a system prompt stays. A model of windows or states alone keeps all.

        Args:
            token_ids, keys: the prompt.

        Returns how many blocks were removed from the prefix index.

        Cost: as of :meth:`forget`.
        """
        prompt = prepare_prompt(self._state, token_ids, keys, None, 0)
        start = start_of_branch(self._state, prompt)
        return forget(self._state, prompt, start) if start < len(prompt.tokens) else 0

    # Content from elsewhere

    def load(
        self,
        token_ids: TokenIds,
        num_tokens: int,
        *,
        keys: RequestKeys = NO_KEYS,
        epochs: tuple[int, int] | None = None,
        tenant: str | None = None,
    ) -> Load | Shortage | None:
        """Reserve blocks for a prefix whose KV is brought from elsewhere: another tier, another machine.

        A load takes no row and is no part of a step. Its blocks cannot be hit until :meth:`finish_load`; a match of a
        prompt that would continue into them has :attr:`PrefixHit.loading` set. What is cached already is held for the
        load, and is not brought again.

        Args:
            token_ids: a prompt.
            num_tokens: how many of its tokens can be brought; rounded down to where hits can end.
            keys: its extra keys.
            epochs: the oldest and the newest weights epoch that contributed to what is brought, if epochs are counted;
                None: the current one.
            tenant: the tenant that is charged for its blocks (:meth:`allocate`).

        Returns the load; a shortage, with nothing changed; or None if there is nothing to bring.

        Raises:
            ConfigurationError: the space has no prefix caching; ``epochs`` that have not begun, or are too old to be
                hit; no such tenant; the names of a group cover tokens ahead.
            TokenError: the prompt has fewer tokens; see also :meth:`allocate`.

        Cost: O(blocks), 0.1 us each and 0.08 us for its digest.
        """
        prompt = prepare_prompt(self._state, token_ids, keys, None, 0)
        most = as_count(num_tokens, "num_tokens")
        if epochs is not None and not self._state.config.counts_epochs:
            raise ConfigurationError(f"epochs = {epochs!r}, but they are not counted: SpaceConfig(weights_epoch=0)")
        if self._state.counts_epochs:
            as_epochs(self._state, epochs)
        charged = self._state.room.number_of(tenant)
        return loading.load(self._state, self._ledger, prompt, most, epochs, charged)

    def finish_load(self, load: Load, num_tokens: int | None = None) -> None:
        """End a load; loads may end in any order. What it brought can be hit, and is cached.

        Args:
            load: what :meth:`load` returned.
            num_tokens: leading tokens of the prompt that have arrived; blocks behind them are freed without content.
                None: all tokens of the load; 0: it failed.

        Raises:
            BlockError: it was finished before, or is no load of this space.
            TokenError: more tokens than the load was for. Nothing is changed.
        """
        most = None if num_tokens is None else as_count(num_tokens, "num_tokens", error=TokenError)
        loading.finish_load(self._state, load, most)

    def withdraw(self, block_ids: npt.ArrayLike, *, pool: str | None = None) -> Withdrawal:
        """Declare that computed or loaded content is bad: it, and what continues it, is not hit from now on.

        Rows that rely on it are lost, from the first bad position on. Steps in flight go on, and what they compute for
        these rows is bad as well; the caller must discard tokens that were sampled from it. Content that cannot be
        proved sound leaves the cache too: all blocks of a group with another block size, or of a group without a
        full-attention group beside it. In the latter case all rows are lost as well, since it is not recorded which
        rows have read a block that left the window.

        Args:
            block_ids: the blocks whose content is bad now.
            pool: name of their device pool; the first group's when None.

        Raises:
            BlockError: the null block or a foreign id; nothing is changed.
            ConfigurationError: the names of a group cover tokens ahead; nothing is changed.

        Cost: O(blocks + blocks of all rows), milliseconds for thousands of blocks.
        """
        self._refuse_ahead("content cannot be withdrawn, so free its rows and reset the prefix cache")
        owner = self._pool(pool)
        bad = loading.as_block_ids(owner, block_ids)
        return withdrawing.withdraw(self._state, owner, bad)

    # The prefix cache as a whole

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Sequences keep their own blocks, but publish nothing from now on."""
        releasing.reset_prefix_cache(self._state, self._ledger)

    def invalidate_memory(self) -> InvalidatedMemory:
        """Note that the engine has released its device memory: running rows are lost, the device cache is emptied.

        Swapped-out sequences, and cached blocks on the host, stay as they are.

        Raises:
            StepError: steps are in flight, or the open plan copies or swaps blocks; nothing is changed.

        Cost: O(blocks + rows).
        """
        return forgetting.invalidate_memory(self._state, self._ledger)

    # The size of pools

    def shrink(self, num_blocks: int, *, pool: str | None = None, run: int = 1) -> Int32Array | BlockHolders:
        """Give blocks of a pool back: they are absent until :meth:`grow`, and what was cached in them is evicted.

        No block in use is moved or taken: free rows, or swap them out, where the answer says that they hold too many.
        What the floors of tenants keep is not given back. With runs of one block, those are given back that would be
        allocated next. A prompt that fits a pool only with its absent blocks is told LATER by :meth:`can_allocate`.

        The memory of the blocks can be released at once, or with ``SpaceConfig.in_order`` once the steps planned so
        far are over, which may still read it.

        Args:
            num_blocks: how many, a multiple of ``run``.
            pool: name of their device pool; the first group's when None.
            run: how many adjacent blocks make a piece of memory that the device can release. Runs are counted from
                block 0. The first run, which has the null block, and a rest at the end stay.

        Returns the ids of the blocks, int32 ``[num_blocks]``, run by run; or what holds too many, with nothing
        changed.

        Raises:
            ConfigurationError: no such pool; blocks that are no whole runs.

        Cost: O(blocks), about 0.1 us each. Nothing for spaces that never shrink.
        """
        owner = self._pool(pool)
        return resizing.shrink(self._state, owner, *resizing.as_runs(owner, num_blocks, run))

    def grow(self, num_blocks: int, *, pool: str | None = None, run: int = 1) -> Int32Array:
        """Take absent blocks of a pool back: they are free, without content, and allocated before all others.

        Their memory must be there before the next plan is executed. A :meth:`shrink` by as many right away takes the
        same blocks again, as where their memory cannot be had after all.

        Args:
            num_blocks, pool, run: as for :meth:`shrink`.

        Returns the ids of the blocks, int32 ``[num_blocks]``, ascending.

        Raises:
            ConfigurationError: no such pool; blocks that are no whole runs; fewer are absent. Nothing is changed.

        Cost: O(blocks of the pool), about 2 ns each.
        """
        owner = self._pool(pool)
        return resizing.grow(self._state, owner, *resizing.as_runs(owner, num_blocks, run))

    # Tenants

    def exceeds_cap(
        self,
        token_ids: TokenIds,
        *,
        tenant: str | None,
        keys: RequestKeys = NO_KEYS,
        num_lookahead: int = 0,
        num_reserved: int = 0,
        num_sequences: int = 1,
        num_encoder_tokens: int = 0,
        match: PrefixHit | None = None,
    ) -> bool:
        """Return whether a prompt needs more blocks of some pool than its tenant's cap leaves now. Changes nothing.

        Then it waits for its own tenant's sequences alone, however many blocks are free. False without tenants.

        Args:
            token_ids, tenant, keys, num_lookahead, num_sequences, num_encoder_tokens, match: as in
                :meth:`can_allocate`.
            num_reserved: slots that are to stay free for other sequences of the tenant.

        Raises: as :meth:`can_allocate`.
        """
        reserve = as_count(num_lookahead, "num_lookahead")
        prompt = prepare_prompt(self._state, token_ids, keys, None, reserve)
        num_rows, beside = as_count(num_sequences, "num_sequences", least=1), as_count(num_reserved, "num_reserved")
        number = self._state.room.number_of(tenant)
        encoder = as_encoder_tokens(self._state, num_encoder_tokens, keys)
        if not self._state.room.names:
            return False
        admission = Admission(
            prompt,
            reserve,
            num_rows,
            len(prompt.tokens),
            tenant=number,
            num_reserved=beside,
            num_encoder_tokens=encoder,
        )
        needed = free_blocks_needed(self._state, admission, match_prompt(self._state, prompt, match))
        return any(needed[share.pool] > share.cap - share.num_taken for share in self._state.room.shares_of(number))

    def tenant_shares(self, tenant: str | None) -> tuple[TenantShare, ...]:
        """Return what a tenant has of each device pool; empty if tenants are not distinguished. O(pools).

        Raises:
            ConfigurationError: there is no such tenant.
        """
        room = self._state.room
        return room.shares_of(room.number_of(tenant))

    def most_blocks(self, tenant: str | None = None) -> dict[str, int]:
        """Count, by device pool, the blocks that a tenant could have at most. O(pools).

        These are its cap, or what the floors of other tenants leave of the pool; without tenants the whole pool.

        Raises:
            ConfigurationError: there is no such tenant.
        """
        room = self._state.room
        return room.most_blocks(room.number_of(tenant))

    def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """Add a tenant, or change the limits of one. Its blocks stay charged to it.

        Below a lower cap its own cached blocks are evicted. A floor holds from now on; where other tenants have taken
        too much, it is kept as they free their blocks.

        Raises:
            ConfigurationError: the space does not distinguish tenants (``SpaceConfig.tenants`` is None); limits that
                the pools cannot keep; a cap below what its sequences use. Nothing is changed.

        Cost: O(evicted blocks); for a new tenant one array of 16 bytes a block grows.
        """
        by_pool = require_limits(self._state, name, limits)
        set_tenant(self._state, name, limits, by_pool)

    def remove_tenant(self, name: str) -> None:
        """Remove a tenant that has no sequences. Its cached blocks are charged to the unnamed tenant, and can be hit.

        So are blocks that it took and that sequences of other tenants, or loads, still use.

        Raises:
            ConfigurationError: there is no such tenant, or sequences of it run or are swapped out. Nothing is changed.

        Cost: O(blocks).
        """
        require_removable(self._state, name)
        remove_tenant(self._state, name)

    # Leases

    def lease(self, token_ids: TokenIds, until_s: float, *, keys: RequestKeys = NO_KEYS) -> int:
        """Keep the cached blocks of a prompt until a time: they are evicted after all unleased blocks.

        A lease is soft: leased blocks count as free, and are evicted if an operation needs them. The lease that ends
        last is broken first. Of several leases of a block the one that ends last counts. :meth:`forget`, a reset or new
        weights end all leases. ``free(rows, keep_until_s=...)`` leases what a row leaves when it ends.

        Args:
            token_ids: a prompt; its last token does not count, as for a hit.
            until_s: seconds of the clock that :meth:`advance` sets.
            keys: its extra keys.

        Returns how many leading tokens are kept.

        Raises:
            ConfigurationError: the end is past or infinite; the space keeps no leases.

        Cost: O(blocks of the prompt).
        """
        end = as_lease_end(self._state, until_s)
        hit = match_prompt(self._state, prepare_prompt(self._state, token_ids, keys, None, 0))
        lease_hit(self._state, hit, end)
        return hit.num_tokens

    # Epochs of the model's weights

    def epochs(self, row: int) -> tuple[EpochSpan, ...]:
        """Return which weights computed what a row holds, from its first position to the last planned one.

        Each span gives the range of epochs that contributed to the content of any group there. Where all windows have
        moved on, it is the range of what is left. Steps planned before an epoch began compute with the weights before.
        Groups outside prefix caching are left out: a row computes all of their content itself.

        Raises:
            ConfigurationError: epochs are not counted (:attr:`SpaceConfig.weights_epoch <pagedkv.SpaceConfig>`).

        Cost: O(tokens x groups).
        """
        known = self._occupied(row)
        if not self.config.counts_epochs:
            raise ConfigurationError("epochs are not counted: begin with a number, SpaceConfig(weights_epoch=0)")
        return spans_of(self._state, known)

    def set_weights_epoch(self, weights_epoch: str | int) -> None:
        """Start a new epoch of the model's weights: plans made from now on compute with them. Rows run on.

        With text epochs the cache is reset, and new blocks carry the epoch in their identity. With numbers, each block
        records the oldest and the newest epoch that computed any of it or of the tokens before it. Blocks older
        than ``max_epoch_lag`` allows leave the cache, and rows that hold any of them publish nothing from now on. All
        else can be hit as before, and :meth:`epochs` returns the epochs of what a row holds.

        Args:
            weights_epoch: text or a number, of the same type as in the configuration; a number not below the current.

        Raises:
            ConfigurationError: an epoch that goes back, or text for a number or a number for text; nothing is changed.

        Cost: O(blocks + rows).
        """
        state = self._state
        if state.config.counts_epochs:
            begin_epoch(state, as_next_epoch(state, weights_epoch))
            return
        if not isinstance(weights_epoch, str):
            raise ConfigurationError(
                f"weights_epoch must be text, got {weights_epoch!r}; where SpaceConfig(weights_epoch=0) begins with a "
                "number, epochs are counted"
            )
        reset_prefix_cache(state, self._ledger, weights_epoch)

    # Why prompts miss

    def explain(
        self,
        token_ids: TokenIds,
        *,
        keys: RequestKeys = NO_KEYS,
        digests: npt.ArrayLike | None = None,
        max_hit_tokens: int | None = None,
    ) -> Explanation:
        """Return how many leading tokens hit, as :meth:`match` does, and why the hit ends there. Changes nothing.

        Exact for cached content. With ``SpaceConfig.explain`` the pool also remembers the latest evicted content;
        without it, and for older content, the cause is ``UNKNOWN``.

        Args:
            token_ids, keys, digests, max_hit_tokens: as in :meth:`match`.

        Raises: as :meth:`match`; ConfigurationError if the names of a group cover tokens ahead.

        Cost: O(blocks of the pool + tokens), about 3 ns a block of the pool and 0.1 us a block of the prompt that does
        not hit. Reading what was recorded when a request was admitted is cheaper (:meth:`explanation`).
        """
        self._refuse_ahead("a hit cannot be explained, so ask match_each how far each group has it")
        hit = self.match(token_ids, keys=keys, digests=digests, max_hit_tokens=max_hit_tokens)
        return explaining.explain(self._state, hit.prompt, hit)

    def explanation(self, row: int, generation: int | None = None) -> Explanation:
        """Return why a request's hit ended, as recorded when the request was admitted. Changes nothing.

        Recorded if ``SpaceConfig.explain`` is set. The answer is that of :meth:`BlockSpace.explain
        <pagedkv.BlockSpace.explain>` at that time, with one restriction: of the cached content, only the latest
        continuation of the hit, and only its first block, was compared. So it may say "never stored" of content that is
        cached under other keys or with changed tokens. It is about the prompt of ``match=``, or else about the
        allocated tokens.

        Args:
            row: a row that was allocated; forks have no explanation.
            generation: which of the row's sequences (:meth:`generation`), if it may have been freed since. Beside those
                that have rows, the last 1,024 sequences (or ``max_sequences``, if that is more) are remembered. None:
                the sequence that has the row.

        Raises:
            ConfigurationError: nothing is recorded in this space.
            SequenceError: the row was never given out, or not by an allocation; the generation is forgotten.

        Cost: O(1) while the sequence lives, else O(remembered sequences).
        """
        book = self._state.explanations
        if book is None:
            raise ConfigurationError("no explanations are recorded: set explain=True in the configuration")
        if generation is None:
            return explaining.explanation_of(book, row, int(self._state.serials[self._occupied(row)]))
        return explaining.explanation_of(book, as_row(row), as_count(generation, "generation", error=SequenceError))
