"""What operations of the block space answer: what a caller got, what it lacks, and what it lost.

Plain data; what a step has to do in memory is a plan (:mod:`pagedkv.memory.contract.plan`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.contract.spec import Row, StepId

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
    """What one tenant has of one device pool, and what it may take, in blocks.

    Args:
        tenant: its name; None for all who name none.
        pool: name of the pool.
        cap: most blocks that are charged to it, taken and cached ones; all of the pool where it has no cap.
        floor: blocks that it can always take, and that are not evicted for others.
        num_taken: blocks that it has taken: in use, or deferred.
        num_cached: free blocks with content that are charged to it.
        num_permitted: free blocks that it may take now.
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

    Args:
        pool: name of the pool that ran out.
        num_needed: blocks the operation would take from the free blocks.
        num_free: blocks that are free now.
        share: in a space with tenants, the one that is short: ``num_needed`` are those for it, and its
            ``num_permitted`` are those that it may take beside what the operation takes for others. None where there
            are no tenants.
    """

    pool: str
    num_needed: int
    num_free: int
    share: TenantShare | None = None

    def __str__(self) -> str:
        """Say it in one line, with the numbers."""
        if self.share is not None:
            share = self.share
            who = "whoever names no tenant" if share.tenant is None else f"tenant {share.tenant!r}"
            return (
                f"{who} may take {share.num_permitted} of {self.num_free} free blocks of pool {self.pool!r}, "
                f"{self.num_needed} are needed; it has taken {share.num_taken} and cached {share.num_cached}, its cap "
                f"is {share.cap} and its floor {share.floor}"
            )
        return f"pool {self.pool!r} has {self.num_free} free blocks, {self.num_needed} are needed"


@dataclass(frozen=True, slots=True)
class PrefixGone:
    """A row cannot be forked there, since a group does not hold what going on there reads (nothing was changed).

    A window has moved on, or a state is past it, or not there yet; or the open step is still to compute, in a group
    outside prefix caching, what the others hit.

    Args:
        length: tokens that the forks were to have.
        longest: the most tokens below that with which the row can be forked; 0 if there are none: allocate anew.
    """

    length: int
    longest: int

    def __str__(self) -> str:
        """Say it in one line, with the numbers."""
        return (
            f"the row cannot be forked at {self.length} tokens; the longest prefix that it can give has {self.longest}"
        )


@dataclass(frozen=True, slots=True)
class Allocation:
    """A sequence that got its blocks.

    Args:
        row: its row in the tables.
        num_hit_tokens: leading tokens that need not be computed, but in groups that stay out of prefix caching.
        checkpoint: where a step's tokens of this sequence are to end, so that its recurrent states there are kept for
            later prompts to hit; 0 if nowhere. It lies in the prompt that ``match`` answered for, or in the tokens that
            were allocated.
    """

    row: Row
    num_hit_tokens: int
    checkpoint: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A claim to blocks that :meth:`BlockSpace.hold <pagedkv.BlockSpace.hold>` holds, until it is released.

    A ticket equals itself alone: one made up, or given out by another space, releases nothing.

    Args:
        number: counts the tickets of its space, for messages.
        pool: name of the device pool whose blocks it holds.
    """

    number: int
    pool: str


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Blocks that are reserved for a prefix from elsewhere, until :meth:`BlockSpace.finish_load` gives them back.

    A load equals itself alone, as a ticket does.

    Args:
        number: counts the loads of its space, for messages.
        num_hit_tokens: leading tokens that are cached here already, and held for the load.
        num_tokens: where it ends: a boundary at which prompts can hit.
        block_ids: for each group read-only int32 ``[(num_tokens - num_hit_tokens) // block_size]``: the blocks to be
            filled, of logical block ``num_hit_tokens // block_size`` on; 0 where the group needs none (before its
            window). Empty for a group that stays out of prefix caching.
        after_step: fill the blocks once this step has run; None: at once. Where steps run in order, they may still be
            in use by steps in flight.
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
    """What giving the device's memory back cost.

    Args:
        lost_rows: rows that ran: free them and allocate their tokens again.
        undefined_tickets: all that are out: what they hold has no content any more. The blocks stay held.
        failed_loads: all that are under way: what they bring is found by nobody. Finish them all the same.
    """

    lost_rows: tuple[Row, ...]
    undefined_tickets: tuple[Ticket, ...] = ()
    failed_loads: tuple[Load, ...] = ()


class EpochSpan(NamedTuple):
    """Positions of a row, and the weights that contributed to what is held for them.

    Args:
        start, stop: the positions ``[start, stop)``, whole blocks but for the last.
        oldest, newest: the first and the last epoch of the weights that contributed, the tokens before included.
    """

    start: int
    stop: int
    oldest: int
    newest: int


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """What withdrawing bad content cost.

    Args:
        lost_rows: rows that rely on it: free them, once no step in flight computes them, and allocate their tokens
            again; the good beginning may hit.
        first_positions: for each of them, the first position that is bad.
        undefined_tickets: those that hold some of it.
        failed_loads: those that hold some of it; what they bring is found by nobody. Finish them all the same.
        num_names: blocks that lost their names.
    """

    lost_rows: tuple[Row, ...]
    first_positions: tuple[int, ...]
    undefined_tickets: tuple[Ticket, ...]
    failed_loads: tuple[Load, ...]
    num_names: int


@dataclass(frozen=True, slots=True)
class AbortedSteps:
    """What aborting did.

    Args:
        step_ids: the aborted steps: the one named and every later one in flight.
        rewound_rows: rows whose next plan computes the aborted positions again.
        lost_rows: rows whose memory is undefined: free them and allocate their tokens again.
        undefined_tickets: tickets with a block that the aborted steps were to compute, or to copy or swap into: what
            their holders have read of it is not to be used. The blocks stay held.
    """

    step_ids: tuple[StepId, ...]
    rewound_rows: tuple[Row, ...]
    lost_rows: tuple[Row, ...]
    undefined_tickets: tuple[Ticket, ...] = ()
