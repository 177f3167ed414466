"""Request: the needs, progress and rows of one request; Decoding: several that decode together; Batch: one step's work.

A ``Request`` owns no block and makes no decision; the scheduler changes its state::

    waiting --admitted--> prefilling --prompt computed--> decoding --last token--> finished
       ^                      |                              |  ^
       |                      |                              v  |
       +----- recompute ------+------------------------------+  +--- swapped out

It stores only the last generated token of each sequence. The caller that samples stores all tokens, and returns them
from ``load`` when they must be recomputed.

Requests that decode together share a :class:`Decoding`. As long as they stay the same, a step takes its tokens from its
arrays and only increments a counter: no Python object is touched for each sequence. When a request joins or leaves, the
object is closed, and a new one is made for the requests that continue. If steps overlap, sequences may decode while a
batch in flight still samples the token that they append. The token is then :data:`UNKNOWN_TOKEN`. A sequence is at most
one such token ahead.

A batch samples a token for each decoding sequence, then for each sequence of each completed prompt::

    token_ids   | decoding.rows[0] | decoding.rows[1] | ... | first of a prompt's n | ... | n-th | next prompt's | ...

For a sequence with drafts, a token is also sampled after each draft. The leading drafts that equal the tokens sampled
at their positions are accepted; the token sampled after the last accepted one is the sequence's token of the batch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import NO_TOKENS, Int32Array
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.plan import StepPlan
from pagedkv.scheduling.config import NO_INTENT, CacheIntent, PreemptionKind
from pagedkv.space import Receipt

RequestKey: TypeAlias = tuple[int, int]
"""``(-priority, number)``: the smallest is first."""
Propose: TypeAlias = Callable[[int], Int32Array]
"""Returns at most the given number of guessed next tokens of a request, int32; an empty array: no guess."""
UNKNOWN_TOKEN: Final = -1
"""In place of a token that a batch in flight still samples."""
MOST_AHEAD: Final = 2
"""Most tokens of a sequence that batches in flight sample, one after the other."""
EMPTY_RECEIPT: Final = Receipt()
Scalar = TypeVar("Scalar", bound=np.generic)


def runs_ahead(request: "Request") -> bool:
    """Whether a request may decode tokens that are not known yet: it has all its rows, and needs no token's value."""
    return (
        request.runs_ahead
        and request.propose is None
        and request.parents is None
        and len(request.rows) == request.num_sequences
    )


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
    decoding: "Decoding | None" = None
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


class Decoding:
    """Requests with computed prompts and known next tokens, in the order of their keys.

    Args:
        requests: the requests, at least one. Those that still await a token append an unknown one next.
        is_scheduled: whether their next tokens were appended by a batch that is not finished.

    Attributes:
        requests: the requests.
        rows: int32 ``[sequences]``, rows of all their sequences.
        next_token_ids: int32 ``[sequences]``, the token that each appends next; while a batch is in flight, the token
            that it appended.
        num_steps: tokens that each sequence has generated in these steps: counted once for all of them.
        num_ahead: unfinished batches that sample further tokens, one token of each sequence in each batch.
        num_before: for each request, tokens generated before these steps, awaited ones included, and drafts accepted
            since.
        runs_ahead: whether all requests may decode unknown tokens.
    """

    def __init__(self, requests: Sequence[Request], *, is_scheduled: bool = False) -> None:
        self.num_steps = 0
        self.num_ahead = int(is_scheduled)
        self.requests = tuple(requests)
        self.rows = np.array([row for request in requests for row in request.rows], np.int32)
        self.next_token_ids: Int32Array = np.concatenate([_next_tokens(request) for request in requests])
        self.num_before = [request.num_generated + len(request.awaited) for request in requests]
        self.runs_ahead = all(map(runs_ahead, requests))
        self._ends = np.cumsum([len(request.rows) for request in requests]).tolist()
        self._count_steps()
        for request in requests:
            request.decoding = self

    @property
    def num_steps_left(self) -> int:
        """Number of steps until one of the requests reaches its ``max_new_tokens``."""
        return self._most_steps - self.num_steps

    @property
    def may_continue(self) -> bool:
        """Whether all sequences may decode once more, with unknown tokens if a batch in flight samples these."""
        if not self.num_ahead:
            return True
        return self.runs_ahead and self.num_ahead < MOST_AHEAD and self.num_ahead < self.num_steps_left

    @property
    def appended_token_ids(self) -> Int32Array:
        """The tokens that the latest batch in flight appended: int32 ``[sequences]``."""
        return self.next_token_ids if self.num_ahead == 1 else np.full(len(self.rows), UNKNOWN_TOKEN, np.int32)

    def take(self, token_ids: Int32Array) -> None:
        """Record a token of each sequence, sampled by the oldest batch in flight."""
        self.num_steps += 1
        self.next_token_ids = token_ids
        self.num_ahead -= 1

    def accept(self, num_accepted: Int32Array) -> None:
        """Record the numbers of accepted drafts: int32 ``[sequences]``, 0 for requests of several sequences."""
        for place, (request, part) in enumerate(zip(self.requests, self.parts(num_accepted), strict=True)):
            if part[0]:
                request.accept(int(part[0]))
                self.num_before[place] += int(part[0])
        self._count_steps()

    def parts(self, values: npt.NDArray[Scalar]) -> list[npt.NDArray[Scalar]]:
        """Split an array with one value for each sequence into one array for each request; more values are ignored."""
        return [values[start:end] for start, end in pairwise((0, *self._ends))]

    def _count_steps(self) -> None:
        lasting = zip(self.requests, self.num_before, strict=True)
        self._most_steps = min(request.max_new_tokens - num for request, num in lasting)

    def close(self) -> None:
        """Write the progress back to the requests, which no longer decode together.

        A request whose next tokens are unknown keeps its last known ones.
        """
        any_unknown = bool((self.next_token_ids == UNKNOWN_TOKEN).any())
        for request, token_ids in zip(self.requests, self.parts(self.next_token_ids), strict=True):
            is_unknown = any_unknown and bool((token_ids == UNKNOWN_TOKEN).any())
            request.leave_decoding(request.next_token_ids if is_unknown else token_ids)


def may_decode(request: Request) -> bool:
    """Whether a request can decode now, with an unknown token if a batch in flight samples its next one."""
    if request.num_unscheduled:
        return False
    num_ahead = request.num_ahead
    if not num_ahead:
        return True
    return num_ahead < MOST_AHEAD and runs_ahead(request) and request.num_generated + num_ahead < request.max_new_tokens


def _next_tokens(request: Request) -> Int32Array:
    if request.awaited:
        return np.full(len(request.rows), UNKNOWN_TOKEN, np.int32)
    return request.next_token_ids


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Known tokens of a request that a step computes.

    Args:
        request: the request, which has one row.
        row: its row.
        start, stop: their positions.
        token_ids: int32 ``[stop - start]``.
        num_samples: tokens sampled after the chunk, one for each sequence; 0 unless it completes the prompt.
    """

    request: Request
    row: int
    start: int
    stop: int
    token_ids: Int32Array
    num_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A waiting request that was given its blocks.

    Args:
        request: the request.
        num_hit_tokens: leading tokens that need not be computed, except in groups outside prefix caching.
    """

    request: Request
    num_hit_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Preempted:
    """A request that was preempted.

    Args:
        request: the request.
        kind: whether its blocks were freed or swapped out.
        num_computed_tokens: tokens of a sequence that had been computed.
    """

    request: Request
    kind: PreemptionKind
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafts: guessed tokens after those that a step decodes, computed by the same step.

    Args:
        counts: int32 ``[sequences]``, number of drafts of each decoding sequence.
        token_ids: int32 ``[sum of counts]``, sequence by sequence; ``UNKNOWN_TOKEN`` for drafts that a model computes
            within the step, until ``fill_drafts``.
    """

    counts: Int32Array
    token_ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step.

    Args:
        plan: the memory operations of the step.
        decoding: the sequences that decode a token; None without any. The same object as in the batch before, if the
            sequences are the same.
        decoded_token_ids: int32 ``[sequences]``, the token that each of them appends and computes; ``UNKNOWN_TOKEN`` if
            a batch in flight samples it.
        drafts: the drafts after these tokens; None without any.
        prefilling: chunks of known tokens to compute.
        admitted, resumed: requests that run from this step on: admitted from the queue, and swapped in.
        preempted: requests that no longer run, in the order of preemption.
        rejected: requests that were dropped, since they cannot be served.
    """

    plan: StepPlan
    decoding: Decoding | None
    decoded_token_ids: Int32Array
    drafts: Drafts | None
    prefilling: tuple[Chunk, ...]
    admitted: tuple[Admission, ...]
    resumed: tuple[Request, ...]
    preempted: tuple[Preempted, ...]
    rejected: tuple[Request, ...]

    @property
    def num_samples(self) -> int:
        """Number of tokens that ``finish`` takes: one for each sequence, without those that only verify drafts."""
        return len(self.decoded_token_ids) + sum(chunk.num_samples for chunk in self.prefilling)

    def sampled_rows(self) -> Int32Array:
        """Return the row of each sampled token: int32 ``[num_samples]``; all samples of a prompt have its row."""
        rows = [] if self.decoding is None else [self.decoding.rows]
        rows += [np.full(chunk.num_samples, chunk.row, np.int32) for chunk in self.prefilling if chunk.num_samples]
        return rows[0] if len(rows) == 1 else np.concatenate([NO_TOKENS, *rows])

    @property
    def num_drafted(self) -> int:
        """Number of drafts."""
        return 0 if self.drafts is None else len(self.drafts.token_ids)


@dataclass(slots=True)
class BatchDraft:
    """The batch that is being built; see :class:`Batch`."""

    decoding: Decoding | None = None
    drafts: Drafts | None = None
    prefilling: list[Chunk] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    rejected: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """The results of a finished batch.

    Args:
        first_tokens: requests whose prompt the batch completed, for the first time or again after a preemption.
        finished: requests that are done, in order of their keys.
    """

    first_tokens: tuple[Request, ...]
    finished: tuple[Request, ...]
