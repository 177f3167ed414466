"""One request under way: what it needs, its progress, and which rows serve it.

A ``Request`` owns no block and decides nothing; the scheduler moves it through its life::

    waiting --admitted--> prefilling --prompt computed--> decoding --last token--> finished
       ^                      |                              |  ^
       |                      |                              v  |
       +----- recompute ------+------------------------------+  +--- swapped out

Only the last generated token of each sequence is held here. The caller that samples keeps all tokens, and provides them
again (``load``) when they are to be recomputed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.keys import NO_KEYS, RequestKeys
from pagedkv.memory.scheduling.intent import NO_INTENT, CacheIntent
from pagedkv.memory.space import Receipt

__all__ = ["NO_TOKENS", "CommonSteps", "Propose", "Request", "RequestKey"]

RequestKey: TypeAlias = tuple[int, int]
"""``(-priority, number)``: smaller goes first."""

Propose: TypeAlias = Callable[[int], Int32Array]
"""Proposes at most this many tokens that may follow those of a request: int32; empty without a proposal."""

EMPTY_RECEIPT: Final = Receipt()
NO_TOKENS: Final = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class CommonSteps:
    """Steps that several requests take together, counted once for all of them.

    Args:
        num_steps: tokens that each of their sequences has generated in these steps.
        num_ahead: batches that are not finished and sample the next ones, one token of each sequence each.
    """

    num_steps: int = 0
    num_ahead: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One request under way. The scheduler alone changes the attributes behind ``propose``.

    Args:
        number: its place in the order of arrival; unique.
        num_prompt_tokens: tokens of its prompt, at least 1.
        max_new_tokens: most tokens that each sequence generates; 0 to compute the prompt and nothing else.
        load: returns int32 ``[num_prompt_tokens + n]``, the prompt and the first n tokens generated. Called with n = 0
            when the request is admitted, so that a long queue takes no memory; with n > 0 for a request of one
            sequence, after a preemption or if it continues an answer.
        num_sequences: samples or beams that have not ended.
        priority: higher goes first.
        keys: extra keys of its blocks.
        max_hit_tokens: leading tokens that may hit when it is admitted; None: all. Its engine may change it.
        propose: proposes drafts that may follow its tokens, the last generated one included; None: no drafts. Called
            while it decodes as one sequence. Drafts may be ``UNKNOWN_TOKEN``: their ids come while the step runs.
        intent: what its caller says about its content. A preempted request keeps it.
        replaces: the request that this one supersedes, such as an earlier turn of its conversation; None once it has
            been admitted.
        sequences: returns the tokens of each of its sequences, also after it has ended; needed where another request
            replaces it.
        runs_ahead: whether it may decode a token before its value is known, if the scheduler overlaps steps. False if
            a token's value decides how the next one is sampled on the host, if its tokens may be held, and for beams.
            Requests with ``propose`` never run ahead.
        num_continued: tokens of its single sequence that were generated before it came; ``load`` is called with them.
        rows: rows of its sequences while it has blocks; one until the prompt is computed.
        known_token_ids: int32, the tokens to be computed before it can decode.
        num_scheduled: tokens of these that are in the space.
        checkpoint: where a chunk is to end, so that its recurrent states are kept there; 0: nowhere.
        next_token_ids: int32 ``[num_sequences]``, tokens that it appends next; while it decodes, ``decoding`` has them.
        num_preemptions: how often it was preempted.
        promised_tokens: length up to which blocks were kept for each of its sequences when a request returned.
        receipt: the receipts of its freed rows; complete when it is done, if the space keeps receipts.
        parents: which old beam each new one is to continue, until that is done.
        decoding: the steps that it takes together with other requests, while it decodes.
        awaited: the scheduled chunks and ``Decoding`` objects that will sample its next tokens, oldest first, one entry
            for each token; those of ``decoding`` come behind them.
        superseded_by: the request that replaces it, if that was admitted before this one has ended.
        num_leased_tokens: leading tokens that were leased when it ended.
        leased_at: for each breakpoint the leading tokens that were leased there; None until it is computed, or if the
            space keeps no leases.
        stops: places where chunks are to end, so that windows and states can be leased there.
        epochs: the oldest and the newest weights epoch that computed what its freed rows held, if epochs are counted.
        is_done: whether it is finished, aborted or rejected.
        key: its place in every order; smaller goes first.
        most_tokens: tokens of each sequence when it has its last block.
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
    key: RequestKey = field(init=False)
    most_tokens: int = field(init=False)
    _num_generated: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute its key, and its largest length: the last generated token is never appended."""
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
        """Whether its next tokens are sampled by a batch that is not finished."""
        return self.num_ahead > 0

    @property
    def num_ahead(self) -> int:
        """Tokens of each sequence that batches which are not finished will sample."""
        return len(self.awaited) + (self.decoding.num_ahead if self.decoding is not None else 0)

    @property
    def is_ready(self) -> bool:
        """Whether it can join the decoding requests: all known tokens are computed, and its next tokens are known."""
        return not self.num_unscheduled and not self.awaited

    @property
    def has_all_tokens(self) -> bool:
        """Whether it has generated its most tokens, or all its sequences ended."""
        return self.num_generated >= self.max_new_tokens or not self.num_sequences

    def end_of_chunk(self, start: int, budget: int) -> int:
        """Return where a chunk of its known tokens ends that begins at ``start`` and has at most ``budget``."""
        end = min(start + budget, len(self.known_token_ids))
        if start < self.checkpoint < end:
            end = self.checkpoint
        return min((stop for stop in self.stops if start < stop < end), default=end)

    def load_tokens(self) -> None:
        """Load the known tokens if they are not here: the prompt, and what was generated before a preemption."""
        if not len(self.known_token_ids):
            self.known_token_ids = self.load(self._num_generated)

    def take(self, token_ids: Int32Array) -> None:
        """Record the next token of each sequence, if it comes from what it awaits and not from common steps."""
        self.awaited = self.awaited[1:]
        self._num_generated += 1
        self.next_token_ids = token_ids

    def accept(self, num_drafts: int) -> None:
        """Record that drafts were right: they count as generated before the token that it takes."""
        self._num_generated += num_drafts

    def leave_decoding(self, token_ids: Int32Array) -> None:
        """Leave the common steps; ``token_ids`` come next, unless they are still awaited."""
        decoding = self.decoding
        assert decoding is not None, "a request that decodes with nobody"
        self._num_generated += decoding.num_steps
        self.awaited += (decoding,) * decoding.num_ahead
        self.decoding = None
        self.next_token_ids = token_ids

    def start_over(self) -> None:
        """Go back to waiting, with the tokens known by now; its blocks have been freed.

        Several sequences begin again at their prompt.
        """
        if self.num_sequences > 1:
            self._num_generated = 0
        self.rows = []
        self.known_token_ids = self.next_token_ids = NO_TOKENS
        self.num_scheduled = self.promised_tokens = self.checkpoint = 0
        self.parents, self.awaited = None, ()

    def note_epochs(self, oldest: int, newest: int) -> None:
        """Add the range of epochs that computed what a freed row held."""
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
