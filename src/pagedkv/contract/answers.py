"""Answers of the block space's operations: results, shortages, and losses.

Plain data. The memory operations of a step are in its plan (:mod:`pagedkv.contract.plan`).
"""

from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.spec import Row, StepId
from pagedkv.errors import OutOfBlocksError

__all__ = [
    "AbortedSteps",
    "Allocation",
    "EpochSpan",
    "InvalidatedMemory",
    "Load",
    "PrefixGone",
    "Shortage",
    "TenantShare",
    "Ticket",
    "Withdrawal",
]


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The blocks that one tenant has in one device pool, and those it may still allocate.

    Args:
        tenant: its name; None for sequences and loads without a tenant.
        pool: name of the pool.
        cap: most blocks, allocated or cached, that are charged to it; all of the pool if it has no cap.
        floor: blocks that it can always allocate, and that are never evicted for other tenants.
        num_taken: blocks that it has allocated: in use, or deferred.
        num_cached: free blocks with cached content that are charged to it.
        num_permitted: free blocks that it may allocate now.
    """

    tenant: str | None
    pool: str
    cap: int
    floor: int
    num_taken: int
    num_cached: int
    num_permitted: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """Too few free blocks (nothing was changed).

    A program that has more blocks than it needs may read ``space.allocate(tokens).row`` at once: a shortage, which has
    no row, raises :class:`~pagedkv.errors.OutOfBlocksError` with its numbers when it is asked for one. All others
    distinguish the answers, by ``isinstance(answer, Shortage)``.

    Args:
        pool: name of the pool that ran out.
        num_needed: free blocks that the operation would allocate.
        num_free: blocks that are free now.
        share: in a space with tenants, the tenant that is short; ``num_needed`` then counts the blocks for it alone,
            and ``num_permitted`` is reduced by those that the operation allocates for other tenants. None without
            tenants.
    """

    pool: str
    num_needed: int
    num_free: int
    share: TenantShare | None = None

    @property
    def row(self) -> NoReturn:
        """A shortage has no row. Raises OutOfBlocksError."""
        raise OutOfBlocksError(f"nothing was allocated: {self}")

    @property
    def num_hit_tokens(self) -> NoReturn:
        """A shortage has no hit. Raises OutOfBlocksError."""
        raise OutOfBlocksError(f"nothing was allocated: {self}")

    @property
    def checkpoint(self) -> NoReturn:
        """A shortage has no checkpoint. Raises OutOfBlocksError."""
        raise OutOfBlocksError(f"nothing was allocated: {self}")

    def __str__(self) -> str:
        """Describe the shortage in one line, with the numbers."""
        if self.share is not None:
            share = self.share
            tenant = "the unnamed tenant" if share.tenant is None else f"tenant {share.tenant!r}"
            return (
                f"{tenant} may take {share.num_permitted} of {self.num_free} free blocks of pool {self.pool!r}, "
                f"{self.num_needed} are needed; it has taken {share.num_taken} and cached {share.num_cached}, its cap "
                f"is {share.cap} and its floor {share.floor}"
            )
        return f"pool {self.pool!r} has {self.num_free} free blocks, {self.num_needed} are needed"


@dataclass(frozen=True, slots=True)
class PrefixGone:
    """A row cannot be forked at that length, since a group lacks content that the forks would read.

    Nothing was changed. Either a window has moved on; or a state lies beyond the length, or does not exist yet; or, in
    a group outside prefix caching, the open step is still to compute tokens that hit in the other groups.

    Args:
        length: tokens that the forks were to have.
        longest: most tokens, fewer than ``length``, at which the row can be forked; 0 if there are none: allocate the
            sequences anew.
    """

    length: int
    longest: int

    def __str__(self) -> str:
        """Describe it in one line, with the numbers."""
        return (
            f"the row cannot be forked at {self.length} tokens; the longest prefix that it can give has {self.longest}"
        )


@dataclass(frozen=True, slots=True)
class Allocation:
    """A sequence that was allocated.

    Args:
        row: its row in the tables.
        num_hit_tokens: leading tokens that need not be computed, except in groups outside prefix caching.
        checkpoint: position at which a step of this sequence should end, so that its recurrent states there are kept
            for later prompts; 0 if there is none. It lies in the prompt of the ``match``, or, without one, in the
            allocated tokens.
    """

    row: Row
    num_hit_tokens: int
    checkpoint: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A reference to blocks that :meth:`BlockSpace.hold <pagedkv.BlockSpace.hold>` took, until it is released.

    Tickets compare by identity: one built by a caller, or issued by another space, is refused.

    Args:
        number: counts the tickets of its space, for messages.
        pool: name of the device pool of its blocks.
    """

    number: int
    pool: str


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Blocks that are reserved for a prefix from outside, until :meth:`BlockSpace.finish_load` is called.

    Loads compare by identity, as tickets do.

    Args:
        number: counts the loads of its space, for messages.
        num_hit_tokens: leading tokens that are cached here already, and referenced by the load.
        num_tokens: where the load ends: a boundary at which prompts can hit.
        block_ids: for each group read-only int32 ``[(num_tokens - num_hit_tokens) // block_size]``: the blocks to be
            filled, from logical block ``num_hit_tokens // block_size`` on; 0 where the group needs none (before its
            window). Empty for a group outside prefix caching.
        after_step: fill the blocks only when this step has run; None: at once. Where steps run in order, steps in
            flight may still use the blocks.
    """

    number: int
    num_hit_tokens: int
    num_tokens: int
    block_ids: tuple[Int32Array, ...]
    after_step: StepId | None

    def __repr__(self) -> str:
        return f"Load(number={self.number}, tokens {self.num_hit_tokens} to {self.num_tokens})"


@dataclass(frozen=True, slots=True)
class InvalidatedMemory:
    """The losses caused by releasing the device's memory.

    Args:
        lost_rows: rows that ran: free them and allocate their tokens again.
        undefined_tickets: all tickets: their blocks have no content any more, but stay referenced.
        failed_loads: all loads under way: their content will not be published. Finish them all the same.
    """

    lost_rows: tuple[Row, ...]
    undefined_tickets: tuple[Ticket, ...] = ()
    failed_loads: tuple[Load, ...] = ()


class EpochSpan(NamedTuple):
    """Positions of a row, and the epochs of the weights that contributed to their cached content.

    Args:
        start, stop: the positions ``[start, stop)``: whole blocks, except for the last.
        oldest, newest: the first and the last epoch that contributed, including to the tokens before.
    """

    start: int
    stop: int
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """The losses caused by withdrawing bad content.

    Args:
        lost_rows: rows that rely on bad content: free each when no step in flight computes it, and allocate its tokens
            again; those before the bad one may hit.
        first_positions: for each of these rows, the first bad position.
        undefined_tickets: tickets that refer to bad blocks.
        failed_loads: loads that refer to bad blocks; their content will not be published. Finish them all the same.
        num_names: blocks that lost their names.
    """

    lost_rows: tuple[Row, ...]
    first_positions: tuple[int, ...]
    undefined_tickets: tuple[Ticket, ...]
    failed_loads: tuple[Load, ...]
    num_names: int


@dataclass(frozen=True, slots=True)
class AbortedSteps:
    """The outcome of aborting steps.

    Args:
        step_ids: the aborted steps: the one named and every later one in flight.
        rewound_rows: rows that compute the aborted positions again in their next plan.
        lost_rows: rows with undefined memory: free them and allocate their tokens again.
        undefined_tickets: tickets with a block that the aborted steps were to compute, copy or swap in: discard
            anything that was read from it. The blocks stay referenced.
    """

    step_ids: tuple[StepId, ...]
    rewound_rows: tuple[Row, ...]
    lost_rows: tuple[Row, ...]
    undefined_tickets: tuple[Ticket, ...] = ()
