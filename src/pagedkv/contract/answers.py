"""What a space answers: results, shortages, losses, receipts, explanations and events. Plain data.

The memory operations of a step are in its plan (:mod:`pagedkv.contract.plan`). :mod:`pagedkv.space.receipts` counts
receipts, :mod:`pagedkv.space.explaining` finds explanations; ``str`` of one is one sentence. Routers and outer cache
tiers read the events, to know which blocks a replica has cached; they cost nothing unless ``SpaceConfig.events`` is
set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import zip_longest
from typing import Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from pagedkv.contract.arrays import Int32Array
from pagedkv.contract.spec import Row, StepId
from pagedkv.errors import OutOfBlocksError


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


@dataclass(frozen=True, slots=True, eq=False)
class BlockHolders:
    """What keeps a pool from giving so many blocks back (nothing was changed).

    Args:
        pool: name of the pool.
        num_wanted: blocks that were to be given back.
        num_available: blocks that can be given back now, in whole runs.
        rows: int32 ``[n]``, the rows that hold blocks of the pool, the one that holds most first.
        num_blocks: int32 ``[n]``, blocks that each of them holds; a shared block counts for each.
        num_ticketed: blocks that tickets and loads hold.
        num_deferred: unreferenced blocks that wait for a step.
    """

    pool: str
    num_wanted: int
    num_available: int
    rows: Int32Array
    num_blocks: Int32Array
    num_ticketed: int
    num_deferred: int

    def __str__(self) -> str:
        """Describe it in one line, with the numbers."""
        first = zip(self.rows.tolist()[:8], self.num_blocks.tolist(), strict=False)
        held = ", ".join(f"row {row} holds {count}" for row, count in first) or "no row holds any"
        return (
            f"pool {self.pool!r} can give back {self.num_available} of {self.num_wanted} blocks: {held} (of "
            f"{len(self.rows)} rows); tickets hold {self.num_ticketed}, {self.num_deferred} wait for a step"
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


@dataclass(frozen=True, slots=True)
class KeptState:
    """A block for the state at a position inside a chunk (:meth:`BlockSpace.keep_states`).

    Args:
        group: index of the group of states; pool: name of its device pool.
        block_id: the block into which the open step writes the state.
    """

    group: int
    pool: str
    block_id: int


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


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one life of a row took, from ``allocate`` or ``fork`` on; or the sum of several.

    Counts accrue when a step is acknowledged that computes something for the row. Receipts add up with ``+``, and
    ``sum(receipts, Receipt())`` works.

    Args:
        num_computed: tokens that acknowledged steps computed for it, including drafts that were refused.
        num_recomputed: of these, tokens that had been computed for it before and were lost, by preemption for example.
        num_hit: tokens that it did not have to compute, since they were cached or computed for another sequence.
        num_hit_inside: of these, the leading tokens of a block that was copied for it.
        num_forked: tokens that it shared with its parent when it was forked, and did not have to compute.
        num_swapped_in: tokens that it did not have to compute again, since they came back from the host pool.
        num_declared: tokens that ``mark_computed`` declared, in place of the steps that were to compute them.
        num_aborted: tokens that aborted steps were to compute.
        num_abandoned: tokens of the steps in flight when it was freed, whether or not these succeed.
        block_steps: by device pool, blocks of its tables summed over the acknowledged steps; in the order of
            ``statistics().pools``.
        host_block_steps: the same by host pool, while it was swapped out, in the order of ``statistics().host_pools``.
        num_replayed: of those hit, tokens that acknowledged steps computed once more in windows alone, which had lost
            them (:class:`~pagedkv.Replay`).
        num_reached: leading tokens that were available to it, however they came; if a later life computes them, they
            count as recomputed. This is no amount taken: it is not compared, and a sum has the largest.
        num_loaded: of those hit, tokens that a load from a tier brought for it, by medium ("host", "folder", "redis",
            "object"). The owner of the tiers fills it in; a space has no tiers, so it is empty in a space's receipts
            and is not compared.
    """

    num_computed: int = 0
    num_recomputed: int = 0
    num_hit: int = 0
    num_forked: int = 0
    num_swapped_in: int = 0
    num_declared: int = 0
    num_aborted: int = 0
    num_abandoned: int = 0
    block_steps: tuple[int, ...] = ()
    host_block_steps: tuple[int, ...] = ()
    num_reached: int = field(default=0, compare=False)
    num_hit_inside: int = 0
    num_replayed: int = 0
    num_loaded: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def hits_by_medium(self) -> dict[str, int]:
        """The hit tokens by medium: ``"device"`` for those in device memory already, then ``num_loaded``.

        They add up to ``num_hit``.
        """
        return {"device": self.num_hit - sum(self.num_loaded.values()), **self.num_loaded}

    def __add__(self, other: "Receipt") -> "Receipt":
        """Add the counts of two receipts."""
        if not isinstance(other, Receipt):
            return NotImplemented
        return Receipt(
            self.num_computed + other.num_computed,
            self.num_recomputed + other.num_recomputed,
            self.num_hit + other.num_hit,
            self.num_forked + other.num_forked,
            self.num_swapped_in + other.num_swapped_in,
            self.num_declared + other.num_declared,
            self.num_aborted + other.num_aborted,
            self.num_abandoned + other.num_abandoned,
            _added(self.block_steps, other.block_steps),
            _added(self.host_block_steps, other.host_block_steps),
            max(self.num_reached, other.num_reached),
            self.num_hit_inside + other.num_hit_inside,
            self.num_replayed + other.num_replayed,
            _added_by_medium(self.num_loaded, other.num_loaded),
        )


def _added_by_medium(left: Mapping[str, int], right: Mapping[str, int]) -> Mapping[str, int]:
    return {medium: left.get(medium, 0) + right.get(medium, 0) for medium in {**left, **right}} if right else left


def _added(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(mine + other for mine, other in zip_longest(left, right, fillvalue=0))


class MissCause(Enum):
    """Why tokens do not hit.

    Content that was cached and is gone comes first, then cached content that differs, then content without a record.
    """

    # The prompt itself
    NOT_FULL = "block not full"
    """The rest of the prompt fills no block, or ends with the prompt's last token, which is always computed."""
    BOUNDED = "bounded by the caller"
    NOT_CACHING = "no prefix caching"

    # Not there yet
    BEING_COMPUTED = "being computed"
    """Not hit while the open step computes it: no other row could take that over."""
    LOADING = "being loaded"

    # It was cached, and is gone
    EVICTED = "evicted"
    """Allocated for other content, since the pool was full."""
    SUPERSEDED = "superseded"
    """Its sequence was freed as superseded by another one, so its blocks were evicted first."""
    WINDOW_GONE = "window gone"
    """The beginning is cached, but not the blocks that a window or a chunk reads before this place."""
    STATE_GONE = "state gone"
    ORPHANED = "orphaned"
    """Still cached, but its prefix was evicted and computed again: it can be hit once it is computed again too."""
    OTHER_DIGEST = "another digest"
    """Cached, but the digest given for it, or with which it was stored, is not that of its content."""
    OVERWRITTEN = "overwritten"
    """The sequence that held it was rolled back."""
    CALLED_OFF = "called off"
    """Never computed: the step failed, or every row that was to compute it was freed."""
    WITHDRAWN = "withdrawn"
    FORGOTTEN = "forgotten on request"
    RESET = "cache reset"
    INVALIDATED = "memory given back"
    OTHER_EPOCH = "another weights epoch"

    # Other content is cached
    OTHER_ADAPTER = "another adapter"
    OTHER_SALT = "another salt"
    OTHER_MEDIA = "another medium"
    CHANGED_TOKENS = "changed tokens"
    """Cached content has at least one token in common, and then continues differently."""

    # There is no record of it
    NEVER_STORED = "never stored"
    UNKNOWN = "unknown"
    """Never stored, or evicted so long ago that its ghost is gone."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Tokens ``[start, end)`` of a prompt that do not hit, and why.

    Tokens behind a gap do not hit because of the gap, even where they are cached.
    """

    start: int
    end: int
    cause: MissCause

    @property
    def num_tokens(self) -> int:
        """Count the tokens."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a prompt's hit ended, and why.

    Args:
        num_tokens: tokens of the prompt.
        num_hit_tokens: leading tokens that hit.
        cause: why the hit ended there.
        position: the first token that the cause concerns: the beginning of the missing block, or, for changed tokens,
            the first one that differs.
        group: index of the group that lacks the block; None where no group does.
        token_id: for changed tokens, the cached token at that position, or None where there is none; else None.
        age: blocks that the pool has allocated since the content was lost; None if it was not lost or has no record.
        misses: all tokens that do not hit, from ``num_hit_tokens`` to ``num_tokens``, in runs of one cause; empty in a
            recorded explanation.
    """

    num_tokens: int
    num_hit_tokens: int
    cause: MissCause
    position: int
    group: int | None = None
    token_id: int | None = None
    age: int | None = None
    misses: tuple[Miss, ...] = ()

    def __str__(self) -> str:
        text = f"{self.num_hit_tokens:,} of {self.num_tokens:,} tokens hit; {self.cause.value} at {self.position:,}"
        if self.group is not None:
            text += f" in group {self.group}"
        if self.token_id is not None:
            text += f", where {self.token_id} is cached"
        if self.age is not None:
            text += f", {self.age:,} blocks ago"
        return text


ORDER: Final = tuple(MissCause)
"""Causes by number; records store the number."""


def number_of(cause: MissCause) -> int:
    """Return the number of a cause."""
    return ORDER.index(cause)


class CacheEventKind(IntEnum):
    """What happened to a block's name."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3
    GAP = 4


STORED: Final = int(CacheEventKind.STORED)
REMOVED: Final = int(CacheEventKind.REMOVED)
CLEARED: Final = int(CacheEventKind.CLEARED)
GAP: Final = int(CacheEventKind.GAP)


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Events of one pool, oldest first.

    Beyond ``SpaceConfig.max_events`` the oldest events are lost, and a GAP comes first. A reader of a GAP must discard
    its record of the pool, since it has missed changes, and list all names anew with :meth:`BlockSpace.stored_blocks
    <pagedkv.BlockSpace.stored_blocks>`.

    Args:
        pool: name of the pool.
        kinds: int32 ``[n]``, values of :class:`CacheEventKind`.
        groups: int32 ``[n]``; -1 for CLEARED and GAP.
        block_ids: int32 ``[n]``; 0 for CLEARED, and for GAP the number of lost events.
        digests: uint8 ``[n, 32]``, the block's digest; zeros for CLEARED and GAP.
        parent_digests: uint8 ``[n, 32]``, for STORED the digest of the block before it (which may not be cached any
            more); zeros for a first block and for the other kinds.
    """

    pool: str
    kinds: npt.NDArray[np.int32]
    groups: npt.NDArray[np.int32]
    block_ids: npt.NDArray[np.int32]
    digests: npt.NDArray[np.uint8]
    parent_digests: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        """Count the events."""
        return len(self.kinds)


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlocks:
    """Blocks of one pool that are in the prefix index: all in the order of their ids, or the next to be evicted.

    Args:
        pool: name of the pool.
        groups: int32 ``[n]``, the group of each; block_ids: int32 ``[n]``.
        digests: uint8 ``[n, 32]``.
        parent_digests: uint8 ``[n, 32]``, as in :class:`~pagedkv.CacheEvents`; zeros for a first block, and if the
            parent is not known any more.
        is_parent_known: bool ``[n]``, false if the parent is not known any more.
    """

    pool: str
    groups: npt.NDArray[np.int32]
    block_ids: npt.NDArray[np.int32]
    digests: npt.NDArray[np.uint8]
    parent_digests: npt.NDArray[np.uint8]
    is_parent_known: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.block_ids)


@dataclass(frozen=True, slots=True, eq=False)
class TierEvents:
    """Events of the entries of one medium below device memory, oldest first; or all its entries, as stored ones.

    An entry holds a *run* of blocks, and its key is the digest of the last one; or an *end*, and its key is derived
    from the digest of the last block (:mod:`pagedkv.tiers.identity`). Keys have no epoch.

    Args:
        medium: name of the medium, as it is published: "CPU", "FOLDER", "REDIS", ...
        run_tokens: tokens of a run; 0 if the model's entries are ends alone.
        kinds: int32 ``[n]``, STORED or REMOVED.
        keys: uint8 ``[n, 32]``.
    """

    medium: str
    run_tokens: int
    kinds: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        """Count the events."""
        return len(self.kinds)


@dataclass(frozen=True, slots=True, eq=False)
class BlockContents:
    """What blocks of one pool hold, block by block.

    Args:
        token_ids: int32 ``[n, block size of the pool]``; only the first ``num_tokens`` of each row count.
        num_tokens: int32 ``[n]``, the tokens of each block: fewer than the block size for a state that is kept inside
            an interval, 0 for a block that is not cached any more.
        extra_keys: encoded extra keys by index, of the blocks that have any.
    """

    token_ids: Int32Array
    num_tokens: Int32Array
    extra_keys: Mapping[int, bytes]

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.num_tokens)
