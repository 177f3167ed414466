"""Batch: the work of one step; Progress: its results.

A batch samples a token for each decoding sequence, then for each sequence of each completed prompt::

    token_ids   | decoding.rows[0] | decoding.rows[1] | ... | first of a prompt's n | ... | n-th | next prompt's | ...

For a sequence with drafts, a token is also sampled after each draft. The leading drafts that equal the tokens sampled
at their positions are accepted; the token sampled after the last accepted one is the sequence's token of the batch.
"""

from dataclasses import dataclass, field

import numpy as np

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.plan import StepPlan
from pagedkv.scheduling.config import PreemptionKind
from pagedkv.scheduling.request import NO_TOKENS, Decoding, Request

__all__ = ["Admission", "Batch", "BatchDraft", "Chunk", "Drafts", "Preempted", "Progress"]


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

    @property
    def lacks_blocks(self) -> bool:
        """Whether a request was preempted or rejected for lack of blocks."""
        return bool(self.preempted or self.rejected)

    def close(self, plan: StepPlan) -> Batch:
        """Return the finished batch."""
        return Batch(
            plan,
            self.decoding,
            NO_TOKENS if self.decoding is None else self.decoding.appended_token_ids,
            self.drafts,
            tuple(self.prefilling),
            tuple(self.admitted),
            tuple(self.resumed),
            tuple(self.preempted),
            tuple(self.rejected),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """The results of a finished batch.

    Args:
        first_tokens: requests whose prompt the batch completed, for the first time or again after a preemption.
        finished: requests that are done, in order of their keys.
    """

    first_tokens: tuple[Request, ...]
    finished: tuple[Request, ...]
