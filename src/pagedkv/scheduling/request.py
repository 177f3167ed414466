"""Request: the needs of one request, its progress, and its rows.

A ``Request`` owns no block and makes no decision; the scheduler changes its state::

    waiting --admitted--> prefilling --prompt computed--> decoding --last token--> finished
       ^                      |                              |  ^
       |                      |                              v  |
       +----- recompute ------+------------------------------+  +--- swapped out

It stores only the last generated token of each sequence. The caller that samples stores all tokens, and returns them
from ``load`` when they must be recomputed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.scheduling.intent import NO_INTENT, CacheIntent
from pagedkv.space import Receipt

__all__ = ["NO_TOKENS", "CommonSteps", "Propose", "Request", "RequestKey"]

RequestKey: TypeAlias = tuple[int, int]
"""``(-priority, number)``: the smallest is first."""

Propose: TypeAlias = Callable[[int], Int32Array]
"""Returns at most the given number of guessed next tokens of a request, int32; an empty array: no guess."""

EMPTY_RECEIPT: Final = Receipt()
NO_TOKENS: Final = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class CommonSteps:
    """Steps that several requests take together, counted once for all of them.

    Args:
        num_steps: tokens that each of their sequences has generated in these steps.
        num_ahead: unfinished batches that sample further tokens, one token of each sequence in each batch.
    """

    num_steps: int = 0
    num_ahead: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One request. The scheduler alone changes the attributes after ``propose``.

    Args:
        number: its place in the order of arrival; unique.
        num_prompt_tokens: tokens of its prompt, at least 1.
        max_new_tokens: most tokens that each sequence generates; 0: only the prompt is computed.
        load: returns int32 ``[num_prompt_tokens + n]``, the prompt and the first n generated tokens. Called with n = 0
            when the request is admitted, so that waiting requests take little memory; with n > 0 for a request of one
            sequence, after a preemption or if it continues an answer.
        num_sequences: samples or beams that have not ended.
        priority: requests with a higher priority are scheduled first.
        keys: extra keys of its blocks.
        max_hit_tokens: most leading tokens that may hit at its admission; None: all. Its engine may change it.
        propose: returns drafts, guesses at the tokens after its last generated one; None: no drafts. Called while it
            decodes as one sequence. Drafts may be ``UNKNOWN_TOKEN``: their ids are set while the step runs.
        intent: its caller's wishes for its content. A preempted request keeps it.
        replaces: the request that this one supersedes, such as an earlier turn of its conversation; None once it has
            been admitted.
        sequences: returns the tokens of each of its sequences, also after it has ended; needed if another request
            replaces it.
        runs_ahead: whether it may decode a token before its value is known, if the scheduler overlaps steps. False if
            the host needs a token's value to sample the next one, if its tokens may be held, and for beams. Requests
            with ``propose`` never run ahead.
        num_continued: tokens of its single sequence that were generated before it arrived; ``load`` returns them too.
        rows: rows of its sequences while it has blocks; one row until the prompt is computed.
        known_token_ids: int32, the tokens to compute before it can decode.
        num_scheduled: number of these that are in the space.
        checkpoint: position at which a chunk must end, so that its recurrent states are stored there; 0: none.
        most_chunk: most tokens of a chunk, if more would need too many blocks; 0: no limit but the budget.
        next_token_ids: int32 ``[num_sequences]``, the tokens that it appends next; while it decodes, ``decoding`` has
            them.
        num_preemptions: number of its preemptions.
        promised_tokens: length of each of its sequences up to which blocks are promised.
        receipt: the receipts of its freed rows; complete when it is done, if the space has receipts.
        parents: for each new beam, the old beam that it continues; None once that is done.
        decoding: the steps that it takes together with other requests, while it decodes.
        awaited: the scheduled chunks and ``Decoding`` objects that will sample its next tokens, oldest first, one entry
            for each token; tokens of ``decoding`` follow them.
        superseded_by: the request that replaces it, if that was admitted before this one ended.
        num_leased_tokens: leading tokens that were leased when it ended.
        leased_at: for each breakpoint, the number of leading tokens that were leased; None until it is computed, or if
            the space has no leases.
        stops: positions at which chunks must end, so that windows and states can be leased there.
        epochs: oldest and newest weights epoch that computed its freed rows, if epochs are counted.
        is_done: whether it is finished, aborted or rejected.
        rejection: why it was rejected after it had been added, with numbers; None if it was not.
        key: its place in every order; the smallest is first.
        most_tokens: most tokens of each sequence in the space.
    """

    number: int
    num_prompt_tokens: int
    max_new_tokens: int
    load: Callable[[int], Int32Array]
    num_sequences: int = 1
    priority: int = 0
    keys: RequestKeys = field(default=NO_KEYS, repr=False)  # a salt is a secret
    max_hit_tokens: int | None = None
    propose: Propose | None = None
    intent: CacheIntent = NO_INTENT
    replaces: "Request | None" = None
    sequences: Callable[[], Sequence[Int32Array]] | None = None
    runs_ahead: bool = True
    num_continued: int = 0
    rows: list[int] = field(default_factory=list)
    known_token_ids: Int32Array = field(default_factory=lambda: NO_TOKENS)
    num_scheduled: int = 0
    checkpoint: int = 0
    most_chunk: int = 0
    next_token_ids: Int32Array = field(default_factory=lambda: NO_TOKENS)
    num_preemptions: int = 0
    promised_tokens: int = 0
    receipt: Receipt = EMPTY_RECEIPT
    parents: Sequence[int] | None = None
    decoding: CommonSteps | None = None
    awaited: tuple[object, ...] = ()
    superseded_by: "Request | None" = None
    num_leased_tokens: int = 0
    leased_at: list[int | None] = field(init=False)
    stops: tuple[int, ...] = ()
    epochs: tuple[int, int] | None = None
    is_done: bool = False
    rejection: str | None = None
    key: RequestKey = field(init=False)
    most_tokens: int = field(init=False)
    _num_generated: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute its key and its largest length, without the last generated token, which is never appended."""
        self.key = -self.priority, self.number
        self._num_generated = self.num_continued
        self.leased_at = [None] * len(self.intent.breakpoints)
        self.most_tokens = self.num_prompt_tokens + max(self.max_new_tokens, 1) - 1

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, of each sequence."""
        return self._num_generated + (self.decoding.num_steps if self.decoding is not None else 0)

    @property
    def num_known(self) -> int:
        """Known tokens of each sequence, the last generated one included."""
        return self.num_prompt_tokens + self.num_generated

    @property
    def num_unscheduled(self) -> int:
        """Known tokens that are not in the space yet."""
        return len(self.known_token_ids) - self.num_scheduled

    @property
    def is_awaiting(self) -> bool:
        """Whether an unfinished batch will sample its next tokens."""
        return self.num_ahead > 0

    @property
    def num_ahead(self) -> int:
        """Tokens of each sequence that unfinished batches will sample."""
        return len(self.awaited) + (self.decoding.num_ahead if self.decoding is not None else 0)

    @property
    def is_ready(self) -> bool:
        """Whether it can join the decoding requests: all known tokens are computed, and its next tokens are known."""
        return not self.num_unscheduled and not self.awaited

    @property
    def has_all_tokens(self) -> bool:
        """Whether it has generated ``max_new_tokens``, or all its sequences have ended."""
        return self.num_generated >= self.max_new_tokens or not self.num_sequences

    def end_of_chunk(self, start: int, budget: int) -> int:
        """Return the end of a chunk of known tokens that begins at ``start`` and has at most ``budget`` tokens."""
        end = min(start + min(budget, self.most_chunk or budget), len(self.known_token_ids))
        if start < self.checkpoint < end:
            end = self.checkpoint
        return min((stop for stop in self.stops if start < stop < end), default=end)

    def load_tokens(self) -> None:
        """Load the known tokens if they are not loaded: the prompt, and those generated before a preemption."""
        if not len(self.known_token_ids):
            self.known_token_ids = self.load(self._num_generated)

    def take(self, token_ids: Int32Array) -> None:
        """Record the next token of each sequence, sampled by the first entry of ``awaited``, not by common steps."""
        self.awaited = self.awaited[1:]
        self._num_generated += 1
        self.next_token_ids = token_ids

    def accept(self, num_drafts: int) -> None:
        """Record accepted drafts: they count as generated before the next token of :meth:`take`."""
        self._num_generated += num_drafts

    def leave_decoding(self, token_ids: Int32Array) -> None:
        """Leave the common steps; ``token_ids`` are the tokens to append next, unless they are still awaited."""
        decoding = self.decoding
        assert decoding is not None, "a request without common steps leaves them"
        self._num_generated += decoding.num_steps
        self.awaited += (decoding,) * decoding.num_ahead
        self.decoding = None
        self.next_token_ids = token_ids

    def start_over(self) -> None:
        """Reset it to a waiting request with its known tokens; its blocks have been freed.

        A request of several sequences begins again after its prompt.
        """
        if self.num_sequences > 1:
            self._num_generated = 0
        self.rows = []
        self.known_token_ids = self.next_token_ids = NO_TOKENS
        self.num_scheduled = self.promised_tokens = self.checkpoint = self.most_chunk = 0
        self.parents, self.awaited = None, ()

    def note_epochs(self, oldest: int, newest: int) -> None:
        """Add the range of epochs that computed a freed row."""
        before = self.epochs or (oldest, newest)
        self.epochs = min(before[0], oldest), max(before[1], newest)

    def note_receipts(self, receipts: Iterable[Receipt]) -> None:
        """Add the receipts of freed rows."""
        self.receipt = sum(receipts, self.receipt)

    def drop(self) -> None:
        """Mark it as done; its blocks have been freed."""
        self.is_done = True
        self.replaces = self.superseded_by = None
        self.rows = []
        self.known_token_ids = self.next_token_ids = NO_TOKENS
        self.parents, self.awaited = None, ()
