"""What one step does, and what came of it: the scheduler's answers.

A batch samples a token for each sequence that decodes, then for each sequence of each prompt that is complete::

    token_ids   | decoding.rows[0] | decoding.rows[1] | ... | first of a prompt's n | ... | n-th | next prompt's | ...

Who has drafts samples a token behind each of them as well. Those that prove the drafts right are the drafts; the one
behind these is the sequence's token in the batch.
"""

from dataclasses import dataclass, field

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.plan import StepPlan
from pagedkv.memory.scheduling.config import PreemptionKind
from pagedkv.memory.scheduling.decoding import Decoding
from pagedkv.memory.scheduling.request import NO_TOKENS, Request

__all__ = ["Admission", "Batch", "BatchDraft", "Chunk", "Drafts", "Preempted", "Progress"]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Known tokens of a request that a step computes.

    Args:
        request: the request; its one row is ``row``.
        row: its row.
        start, stop: their positions.
        token_ids: int32 ``[stop - start]``.
        num_samples: first tokens that follow them, one a sequence; 0 unless they complete the prompt.
    """

    request: Request
    row: int
    start: int
    stop: int
    token_ids: Int32Array
    num_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A waiting request that got its blocks.

    Args:
        request: the request.
        num_hit_tokens: leading tokens that need not be computed, but in groups that stay out of prefix caching.
    """

    request: Request
    num_hit_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Preempted:
    """A request that had to give its blocks up.

    Args:
        request: the request.
        kind: what becomes of it.
        num_computed_tokens: tokens of a sequence that had been computed.
    """

    request: Request
    kind: PreemptionKind
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Tokens that are guessed to follow those that a step decodes, and are computed in the same step.

    Args:
        counts: int32 ``[sequences]``, how many each sequence that decodes has.
        token_ids: int32 ``[sum of counts]``, one sequence's behind the other's.
    """

    counts: Int32Array
    token_ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step.

    Args:
        plan: what it needs done in memory.
        decoding: who decodes a token; None if nobody does. The same object as before if they are the same.
        decoded_token_ids: int32 ``[sequences]``, the token that each of them appends and computes.
        drafts: what is guessed to follow these tokens; None where nothing is.
        prefilling: known tokens that it computes.
        admitted, resumed: requests that run from now on: from the queue, and swapped in.
        preempted: requests that run no more, in this order.
        rejected: requests that cannot be served, and are dropped.
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
        """Tokens to be sampled, beside those that only prove a draft right."""
        return len(self.decoded_token_ids) + sum(chunk.num_samples for chunk in self.prefilling)

    @property
    def num_drafted(self) -> int:
        """Drafts that are computed."""
        return 0 if self.drafts is None else len(self.drafts.token_ids)


@dataclass(slots=True)
class BatchDraft:
    """The step that is being put together; see :class:`Batch`."""

    decoding: Decoding | None = None
    drafts: Drafts | None = None
    prefilling: list[Chunk] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    rejected: list[Request] = field(default_factory=list)

    @property
    def lacks_blocks(self) -> bool:
        """Whether somebody had to give blocks up."""
        return bool(self.preempted or self.rejected)

    def close(self, plan: StepPlan) -> Batch:
        """Make the batch."""
        return Batch(
            plan,
            self.decoding,
            NO_TOKENS if self.decoding is None else self.decoding.next_token_ids,
            self.drafts,
            tuple(self.prefilling),
            tuple(self.admitted),
            tuple(self.resumed),
            tuple(self.preempted),
            tuple(self.rejected),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """What a finished batch brought about.

    Args:
        first_tokens: requests whose prompt it completed, for the first time or again after a preemption.
        finished: requests that are done, in order of their keys.
    """

    first_tokens: tuple[Request, ...]
    finished: tuple[Request, ...]
