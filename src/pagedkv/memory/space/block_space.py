"""BlockSpace: every operation on sequences, for whole batches of rows at a time.

The front door. A *row* is a live sequence's place in the tables; operations take arrays of
rows, decide everything before they change anything, and return a :class:`~pagedkv.memory.contract.answers.Shortage`
when blocks are short. What a step needs done in memory comes out of :meth:`BlockSpace.plan_step`::

    allocate / append / truncate / fork / free / swap_out / swap_in    any number of times, in any order
    plan = plan_step()                                                 closes the open step
    acknowledge(plan.step_id)  or  abort(plan.step_id)                 when the device has run it, or failed

Tokens enter when they are scheduled: a chunked prefill is an ``allocate`` of the first chunk and an
``append`` of each further one. Several steps may be in flight. What is done with content, whoever's it is, stands in
:mod:`~pagedkv.memory.space.content_space`, rows that leave for the host and come back in
:mod:`~pagedkv.memory.space.swap_space`. These classes check and document; the modules beside them carry out:
``admission``, ``growing``, ``filling``, ``truncating``, ``forking``, ``branching``, ``swapping``, ``holding``,
``loading``, ``planning``, ``stepping``, ``releasing``, ``invalidating``, ``withdrawing``.
"""

from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from pagedkv.memory.contract.answers import AbortedSteps, Allocation, PrefixGone, Shortage
from pagedkv.memory.contract.arguments import Rows, as_batch, as_count, as_counts, as_flag, as_row, as_token_array
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.errors import ConfigurationError, SequenceError, StepError
from pagedkv.memory.contract.keys import NO_KEYS, RequestKeys
from pagedkv.memory.contract.plan import StepPlan
from pagedkv.memory.contract.spec import AllocStatus, StepId, TokenIds
from pagedkv.memory.space import (
    aborting,
    admission,
    branching,
    declaring,
    drafting,
    filling,
    forking,
    growing,
    loading,
    planning,
    releasing,
    stepping,
    truncating,
)
from pagedkv.memory.space.batches import (
    as_num_outputs,
    as_num_reached,
    as_step_id,
    require_known,
    require_known_prefix,
    require_status,
)
from pagedkv.memory.space.hits import PrefixHit
from pagedkv.memory.space.leasing import as_intent
from pagedkv.memory.space.prompts import prepare_prompt
from pagedkv.memory.space.receipts import Receipt
from pagedkv.memory.space.swap_space import SwapSpace
from pagedkv.memory.space.tenants import as_tenant
from pagedkv.memory.tables.rows import OCCUPIED, RUNNING

__all__ = ["BlockSpace"]


class BlockSpace(SwapSpace):
    """The KV-cache bookkeeping of one engine, by rows.

    Raises (all methods that take rows): :class:`~pagedkv.memory.contract.errors.SequenceError` for rows that are
    unknown, freed, swapped out, lost or named twice; nothing is changed then. Raises (all methods):
    :class:`~pagedkv.memory.contract.errors.InterruptedSpaceError` after an operation that an exception from outside (an
    interruption, too little memory) has stopped in the middle of its changes.
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
        """Tell whether a prompt fits: now, later, or not even an empty pool. Changes nothing.

        Counts vacant rows, free blocks, what hits would save, and the watermark; of a tenant, what its cap and others'
        floors leave to it: NEVER if they do not even in an empty pool, nor in one that holds nothing but what the
        prompt hits and others use.

        Args:
            token_ids, keys, digests, num_lookahead, num_sequences, match, tenant: as in :meth:`allocate`.
            max_chunk: most tokens of it that one step computes, where it is prefilled in chunks and each step is
                acknowledged before the next chunk: windows give blocks back in between, so that the most blocks
                held at any time are counted. None: the whole prompt in one step. A window outside prefix caching holds
                all of the hit in the first chunk: where that is too much for a pool that serves nobody, allocate a
                shorter beginning of the prompt, which hits less.

        Raises:
            TokenError: a prompt beyond ``max_tokens``; see also :meth:`allocate`.
        """
        reserve = as_count(num_lookahead, "num_lookahead")
        prompt = prepare_prompt(self._state, token_ids, keys, digests, reserve)
        num_rows = as_count(num_sequences, "num_sequences", least=1)
        chunk = len(prompt.tokens) if max_chunk is None else as_count(max_chunk, "max_chunk", least=1)
        question = admission.Admission(prompt, reserve, num_rows, chunk, tenant=as_tenant(self._state, tenant))
        return admission.admission_status(self._state, question, match)

    def allocate(  # noqa: PLR0913 - one prompt, and all that may be said of it, by keywords
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
            token_ids: the tokens that the open step computes, and any prefix that may hit.
            keys: extra keys: LoRA, tenant salt, media.
            digests: uint8 ``[full blocks, 32]`` computed elsewhere (full attention only); a wrong one can lose
                hits, but never grants one.
            num_lookahead: slots reserved beyond the tokens.
            num_draft: trailing tokens that are guesses, as in :meth:`append`. A hit ends before the last certain token,
                and ``digests`` are those of the certain tokens; :meth:`can_allocate` is asked with the certain tokens
                alone, and ``num_lookahead + num_draft``.
            num_sequences: sequences that are to share the prompt by forks: a Shortage also where they would lack blocks
                to reserve as many slots each (:meth:`append` without tokens does). The row is still one.
            num_external_tokens: leading tokens that the engine brings from elsewhere, into the row's blocks behind its
                hit: of a window the whole blocks that the next position reads, and the last state; in a group that
                stays out of prefix caching, where nothing hits, from the first token on. They must be there before any
                part of the open step's plan is carried out, its swaps and copies too, which may read them; where steps
                run in order, behind those planned before, which may still write these blocks. They count as computed at
                once: if they turn out wrong, :meth:`withdraw` them. Where they are no more than hit, none is brought.
                Not together with ``num_draft``. What is brought without a row, and without holding up a step, is a
                :meth:`load`.
            match: what :meth:`match` answered for these keys and this prompt, or one that these tokens begin. If the
                space has not changed since, they are not walked again, only compared with the tokens of the blocks. It
                says what the whole prompt is, as ``prompt`` does.
            prompt: the whole prompt, where ``token_ids`` are its first chunk and ``match`` does not say it. Whoever
                brings a prompt in chunks gives one of the two: where it leaves what is cached, and where it ends, is
                kept when windows pass, and its last state too. Of a first chunk alone these places are not known, and
                what windows had there is not hit again. Costs a :meth:`match` of it.
            continues: the receipt of the request's life before, if it was preempted or lost. Its tokens come again,
                here and in appends, and what is computed of them is computed again. It gets a receipt of its own.
            publish: False keeps what this sequence, and forks of it, compute from being found: content that is private,
                or that nobody will ask for again. It hits what is cached all the same. "prompt" publishes whole blocks
                of the prompt, that of ``match`` or ``prompt`` or else these tokens, and nothing of what follows it.
            tenant: one of ``SpaceConfig.tenants``, whom all is charged to that this sequence, and forks of it, take of
                the free blocks, hits among it, until the content is given up, or others hit what nobody uses any more.
                At its cap it gives up what it has cached itself, and others' floors stay: a Shortage tells its share.
                None: nobody, who has neither cap nor floor.

        Raises:
            TokenError, ConfigurationError: see :func:`~pagedkv.memory.space.prompts.prepare_prompt`; ``match`` is the
                answer for another prompt, other keys or another space, or the tokens were overwritten since; ``prompt``
                does not begin with ``token_ids``, or is not what ``match`` was asked about; ``continues`` is no
                receipt, or the space keeps none; there is no such tenant.
            TooManySequencesError: fewer than ``num_sequences`` rows are vacant.

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
            tenant=as_tenant(self._state, tenant),
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
        """Tell exactly whether :meth:`append` would find enough blocks. Changes nothing.

        Args:
            rows, counts, num_lookahead, num_draft: as in :meth:`append`.
            unknown: the tokens would be unknown ones. Like ``num_draft`` it matters only where a recurrent state keeps
                states of drafts.
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
            token_ids: the new tokens of all rows, concatenated in the order of ``rows``; None for unknown tokens, which
                :meth:`fill` will bring. Drafts that are not accepted yet count as unknown then.
            counts: int32 ``[len(rows)]``, tokens of each row. None: one each of several rows, and all of them where
                ``rows`` is one row's number.
            num_lookahead: slots to be reserved beyond the tokens of every row.
            num_draft: trailing tokens of every row, or int32 ``[len(rows)]``: of each row, that are guesses: not
                published before they are accepted, by :meth:`truncate` or by the next append of tokens.

        Returns None, or the shortage with nothing changed. Copies on write go into the plan: a row that appends to, or
        reserves slots in, a partly filled block which others hold gets its own.

        Raises:
            TokenError: ids outside int32, counts that do not add up, more drafts than tokens, a row beyond
                ``max_tokens``.

        Cost: O(rows + tokens), about 5 ns a row; rows with different numbers of drafts as one call for each number.
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
        """Fill in unknown tokens: what the oldest step has sampled that each row waits for.

        A step samples the tokens behind the positions that it computes: drafts, which it judges, and one more. What is
        not filled in was refused; everything behind it moves down, in the steps in flight as well. Names appear, and
        windows slide, once a step is over that computes filled tokens.

        Args:
            rows: the rows, each at most once.
            token_ids: the sampled tokens of all rows, concatenated in the order of ``rows``.
            counts: int32 ``[len(rows)]``, tokens of each row, one at least. None: one each.

        Raises:
            TokenError: a row without unknown tokens, whose first one no planned step samples, or that has no slot for
                the token behind its drafts; more tokens than its step has sampled, or none; counts that do not add up,
                ids outside int32.

        Nothing is changed when it raises. O(rows + tokens + rows of the steps in flight).
        """
        batch, tokens = as_batch(rows), as_token_array(token_ids)
        self._state.version += 1
        filling.fill(self._state, self._ledger, batch, counts, tokens)

    def truncate(self, rows: Rows, lengths: npt.ArrayLike) -> None:
        """Roll rows back to earlier lengths, give reserved slots back, and accept and publish what remains.

        Raises:
            SharedPrefixError: another sequence or a ticket holds blocks beyond that length.
            TruncationError: a length outside ``[1, num_tokens]``; a window's or a state's content that is gone; a hit
                that a group outside prefix caching, or a window computed again, is still to compute.

        Nothing is changed when it raises. O(rows + blocks given back or completed), about 12 ns a row.
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
        """Make sequences that share the blocks of a row; return their rows. Copies nothing, but for ``at`` in a block.

        Args:
            row: the row.
            num_children: how many sequences.
            at: how many of the row's known tokens they begin with; all when None. Within a block, one copy of that
                block, in the open plan, serves all of them. The answer may be a :class:`~pagedkv.Shortage` then, or,
                where a window or a state of that position is gone, a :class:`~pagedkv.PrefixGone` which names the
                longest prefix; nothing is changed.

        Raises:
            TooManySequencesError: there are fewer vacant rows.
            SequenceError: unknown tokens, or more than the row has, are asked for; a recurrent state whose tokens no
                plan computes yet.

        Cost: O(blocks x children), about 1 ns each; O(tokens) for the longest prefix.
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
        """Give up sequences, running, swapped out or lost. O(blocks), about 5 ns each.

        Cached blocks stay findable until they are evicted: of one sequence the tail first.

        Args:
            rows: the rows.
            num_generated: how many tokens of each were generated, if that is known: an eviction policy that learns
                learns more by it.
            superseded_by: a row that replaces these, as a conversation that went on elsewhere does, or an edited one:
                what only they held is asked for no more, and is handed out before anything else that is cached.
            keep_until_s: what they leave, of rows that run, is leased until then (:meth:`lease`): they come back, as a
                conversation that waits for a tool.
            priority: 1 keeps what they leave behind all that is cached, before leases, for as long as it has a name; -1
                gives what only they held up first. Like ``keep_until_s``, 1 needs ``leases`` in the configuration.

        Returns their receipts, in the order of ``rows``, if the space keeps any; else nothing.

        Raises:
            SequenceError: ``superseded_by`` is among ``rows``, or no row that runs or is swapped out.
            TokenError: not as many numbers as rows, or a negative one.
            ConfigurationError: a lease whose end is past, or never; another priority; two of the three at once.
        """
        end = as_intent(self._state, superseded_by, keep_until_s, priority)
        batch = as_batch(rows)
        outputs = as_num_outputs(num_generated, batch)
        if superseded_by is not None:
            self._require_successor(as_row(superseded_by), batch)
        mark = require_status(self._state, batch, OCCUPIED)
        self._state.version += 1
        leaving = releasing.Leaving(outputs, superseded_by is not None or priority < 0, end)
        releasing.free(self._state, batch, mark, leaving)
        return () if self._receipts is None else self._receipts.take_freed()

    def _require_successor(self, row: int, batch: Int32Array) -> None:
        """Check that a row lives on that replaces those of a batch."""
        require_status(self._state, as_batch(row), OCCUPIED)
        if (batch == row).any():
            raise SequenceError(f"row {row} cannot be superseded by itself: name the row that replaces it")

    # Steps

    def plan_step(self) -> StepPlan:
        """Close the open step and say all that it needs done in memory. O(changed rows + changed table entries)."""
        self._state.version += 1
        return planning.plan_step(self._state, self._ledger)

    def acknowledge(self, step_id: StepId) -> None:
        """The oldest step in flight has run: its tokens count as computed, what waited for it is freed.

        Raises:
            StepError: another step is the oldest in flight.
        """
        self._state.version += 1
        stepping.acknowledge(self._state, self._ledger, as_step_id(step_id))

    def abort(self, step_id: StepId) -> AbortedSteps:
        """A step in flight failed: it and all later ones count as never run; what they published is withdrawn.

        Rows that share tokens which another row computes in these steps, or in the open one, are lost: only the
        last such step of a row is known.

        Raises:
            StepError: the step is not in flight.
        """
        self._state.version += 1
        return aborting.abort(self._state, self._ledger, as_step_id(step_id))

    def mark_computed(self, rows: Rows) -> None:
        """State that all tokens of these rows are computed, outside any plan; windows slide accordingly.

        Rows that share blocks which the open step, or one in flight, computes for one of them are to be named together.
        Where a step in flight computes a row too, the caller sees to it that this step, even if it fails, leaves what
        was declared.

        Raises:
            StepError: a group is a recurrent state and steps are in flight, which may still advance it; or a row that
                is not named computes shared blocks.
        """
        if self._state.is_recurrent and self._ledger.in_flight:
            raise StepError("a recurrent state cannot be declared computed while steps are in flight: acknowledge them")
        batch = as_batch(rows)
        require_status(self._state, batch, RUNNING)
        require_known(self._state, batch, "declared computed")
        self._state.version += 1
        declaring.mark_computed(self._state, self._ledger, batch)
