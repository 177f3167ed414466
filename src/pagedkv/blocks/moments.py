"""Moments: the hooks at which a pool's eviction policy and optional features act on a block.

The core calls the function of each moment here, and imports no feature. The class of the pool's arrays selects the
functions behind them (``moments``) when a loop is compiled: the machine code contains only the selected code, and is
cached under the contents of its sources. A pool whose arrays have no moments uses the defaults of this module, which
are LRU without any feature. The functions of pools with features are in :mod:`~pagedkv.blocks.bindings`.

A free block has one of these ranks; blocks are allocated in this order::

    without content | spare (spare_blocks.py) | cached, in the policy's order | kept by a feature, such as a lease

Allocating a block:

make_room
    A free block is about to be allocated, the one that :func:`~pagedkv.blocks.free_queue.first` returns. Features
    that keep blocks, or that limit tenants, make one available if necessary.
note_current_tenant
    Blocks are charged to this tenant, given by its number, from now on. Called only if ``counts_takes``.
counts_takes
    Whether ``make_room`` and ``note_take`` must be called for each allocated block, so that none are taken in one
    piece.
choose_victim
    All free blocks are cached, and none is spare. Takes the first of the list; returns the one to be evicted.
note_eviction
    A cached block was taken out of its list to make room. It is about to lose its name; no ``note_drop`` follows.
note_take
    A block was taken out of the free ones, for new content.
note_begin
    A block starts a new life.

Names:

note_name, note_drop
    For the policy, a block gets or loses its name: when it really does, and when it ceases to be spare or becomes so.
note_named
    A block has got a name: it can be hit from now on.
note_unnamed
    A block is about to lose its name, for a cause (:mod:`~pagedkv.blocks.record`).
note_child
    A block is being named as the child of a parent in a given life. The parent's ``SUCCESSOR`` is not set to it yet.
next_child
    Takes a block that is about to lose its name, and that is its parent's ``SUCCESSOR``; returns the next
    ``SUCCESSOR``, or the block itself if there is no other child.
expect
    Content with this first word of its digest is about to be named. A hint.
note_reuse, note_recomputed
    A named block was hit, or its content was computed again. It is in use now.

Content:

note_copy
    A block becomes a copy of one here or on the other side (host or device). Takes source, block, destination, place.
are_alike
    Whether two blocks with equal tokens, each given after its pool, have equal content: the same weights computed them.
is_fresher
    Whether a block can be hit for longer than another one with equal tokens.

Releasing a block:

note_request
    A sequence ends: its blocks are about to be released. Takes also the number of its generated tokens, -1 if unknown.
note_rest
    A block, named or not, has no reference any more, and no step in flight uses it.
enqueue
    A block has no reference, is named, and is not spare unless it ``stays``: puts it among the cached blocks.
note_cached
    A block without a reference was put among the cached blocks, spare ones included.
put
    Puts a block that was spare among the cached blocks.
note_rank
    A free block went from spare to cached, or back.
unlink
    Takes a free named block out of whichever list it is in.
note_claim
    A block was unlinked because it is in use from now on.
note_vacant
    A free block has lost its name.
stays
    Whether a feature keeps a block, so that nothing else makes it spare.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pagedkv.blocks import free_queue
from pagedkv.blocks.record import PoolArrays
from pagedkv.compilation.choice import MOMENTS, chosen_by
from pagedkv.compilation.compiled import inlined
from pagedkv.contract.arrays import Int32Array

__all__ = [
    "FETCHED_AHEAD",
    "CauseHook",
    "ChildHook",
    "Choice",
    "Comparison",
    "CopyHook",
    "ExpectHook",
    "Hook",
    "Moments",
    "PoolHook",
    "PoolQuestion",
    "Question",
    "Ranking",
    "RequestHook",
    "are_alike",
    "choose_first",
    "choose_victim",
    "counts_takes",
    "do_nothing",
    "enqueue",
    "expect",
    "expect_nothing",
    "ignore_request",
    "is_fresher",
    "make_room",
    "next_child",
    "note_begin",
    "note_cached",
    "note_child",
    "note_claim",
    "note_copy",
    "note_current_tenant",
    "note_drop",
    "note_eviction",
    "note_name",
    "note_named",
    "note_rank",
    "note_recomputed",
    "note_request",
    "note_rest",
    "note_reuse",
    "note_take",
    "note_unnamed",
    "note_vacant",
    "put",
    "put_last",
    "stays",
    "unlink",
]

FETCHED_AHEAD: Final = 4  # blocks: enough to hide the latency of memory, few enough to be fetched at the same time

PoolHook: TypeAlias = Callable[[PoolArrays], None]
"""Acts on a pool."""

PoolQuestion: TypeAlias = Callable[[PoolArrays], bool]
"""Answers yes or no about a pool."""

Hook: TypeAlias = Callable[[PoolArrays, int], None]
"""Acts on a pool and one of its blocks."""

Question: TypeAlias = Callable[[PoolArrays, int], bool]
"""Answers yes or no about a pool and one of its blocks."""

CauseHook: TypeAlias = Callable[[PoolArrays, int, int], None]
"""Acts on a pool and one of its blocks, for a cause."""

ChildHook: TypeAlias = Callable[[PoolArrays, int, int, int], None]
"""Acts on a pool, a block, its parent, and the parent's life."""

CopyHook: TypeAlias = Callable[[PoolArrays, int, PoolArrays, int], None]
"""Acts on a pool and one of its blocks, and on a pool and a block that becomes a copy of it."""

Comparison: TypeAlias = Callable[[PoolArrays, int, PoolArrays, int], bool]
"""Answers yes or no about two blocks, each given after its pool."""

Ranking: TypeAlias = Callable[[PoolArrays, int, int], bool]
"""Answers yes or no about two blocks of a pool."""

ExpectHook: TypeAlias = Callable[[PoolArrays, int], None]
"""Acts on a pool and the first word of a digest."""

RequestHook: TypeAlias = Callable[[PoolArrays, Int32Array, int], None]
"""Acts on a pool, the blocks of one sequence (int32 ``[any]``, head first), and its number of generated tokens."""

Choice: TypeAlias = Callable[[PoolArrays, int], int]
"""Returns a block of a pool, given another one."""


@inlined
def leave_as_it_is(_pool: PoolArrays) -> None:
    """Do nothing."""


@inlined
def is_never_so(_pool: PoolArrays) -> bool:
    """Return False."""
    return False


@inlined
def do_nothing(_pool: PoolArrays, _block: int) -> None:
    """Do nothing."""


@inlined
def is_not_so(_pool: PoolArrays, _block: int) -> bool:
    """Return False."""
    return False


@inlined
def ignore_cause(_pool: PoolArrays, _block: int, _cause: int) -> None:
    """Do nothing."""


@inlined
def ignore_child(_pool: PoolArrays, _block: int, _parent: int, _parent_life: int) -> None:
    """Do nothing."""


@inlined
def copy_nothing(_source: PoolArrays, _block: int, _destination: PoolArrays, _place: int) -> None:
    """Do nothing."""


@inlined
def are_always_alike(_pool: PoolArrays, _block: int, _other_pool: PoolArrays, _other: int) -> bool:
    """Return True."""
    return True


@inlined
def is_no_fresher(_pool: PoolArrays, _block: int, _other: int) -> bool:
    """Return False."""
    return False


@inlined
def expect_nothing(_pool: PoolArrays, _word: int) -> None:
    """Do nothing."""


@inlined
def ignore_request(_pool: PoolArrays, _blocks: Int32Array, _num_outputs: int) -> None:
    """Do nothing."""


@inlined
def choose_first(_pool: PoolArrays, first: int) -> int:
    """Return the given block."""
    return first


@inlined
def put_last(pool: PoolArrays, block: int) -> None:
    """Put an unreferenced block at the back of the cold list."""
    free_queue.append(pool.records, pool.counts, block)


@inlined
def take_out(pool: PoolArrays, block: int) -> None:
    """Take a block out of its list."""
    free_queue.remove(pool.records, pool.counts, block)


@dataclass(frozen=True, slots=True)
class Moments:
    """The functions that act at the moments of a pool's blocks; the defaults are LRU without any feature."""

    make_room: PoolHook = field(default=leave_as_it_is, repr=False)
    counts_takes: PoolQuestion = field(default=is_never_so, repr=False)
    note_current_tenant: Hook = field(default=do_nothing, repr=False)
    choose_victim: Choice = field(default=choose_first, repr=False)
    note_eviction: Hook = field(default=do_nothing, repr=False)
    note_take: Hook = field(default=do_nothing, repr=False)
    note_begin: Hook = field(default=do_nothing, repr=False)
    note_name: Hook = field(default=do_nothing, repr=False)
    note_drop: Hook = field(default=do_nothing, repr=False)
    note_named: Hook = field(default=do_nothing, repr=False)
    note_unnamed: CauseHook = field(default=ignore_cause, repr=False)
    note_child: ChildHook = field(default=ignore_child, repr=False)
    next_child: Choice = field(default=choose_first, repr=False)
    expect: ExpectHook = field(default=expect_nothing, repr=False)
    note_reuse: Hook = field(default=do_nothing, repr=False)
    note_recomputed: Hook = field(default=do_nothing, repr=False)
    note_copy: CopyHook = field(default=copy_nothing, repr=False)
    are_alike: Comparison = field(default=are_always_alike, repr=False)
    is_fresher: Ranking = field(default=is_no_fresher, repr=False)
    note_request: RequestHook = field(default=ignore_request, repr=False)
    note_rest: Hook = field(default=do_nothing, repr=False)
    enqueue: Hook = field(default=put_last, repr=False)
    note_cached: Hook = field(default=do_nothing, repr=False)
    put: Hook = field(default=put_last, repr=False)
    note_rank: Hook = field(default=do_nothing, repr=False)
    unlink: Hook = field(default=take_out, repr=False)
    note_claim: Hook = field(default=do_nothing, repr=False)
    note_vacant: Hook = field(default=do_nothing, repr=False)
    stays: Question = field(default=is_not_so, repr=False)


make_room: Final = chosen_by(MOMENTS, "make_room", leave_as_it_is)
counts_takes: Final = chosen_by(MOMENTS, "counts_takes", is_never_so)
note_current_tenant: Final = chosen_by(MOMENTS, "note_current_tenant", do_nothing)
choose_victim: Final = chosen_by(MOMENTS, "choose_victim", choose_first)
note_eviction: Final = chosen_by(MOMENTS, "note_eviction", do_nothing)
note_take: Final = chosen_by(MOMENTS, "note_take", do_nothing)
note_begin: Final = chosen_by(MOMENTS, "note_begin", do_nothing)
note_name: Final = chosen_by(MOMENTS, "note_name", do_nothing)
note_drop: Final = chosen_by(MOMENTS, "note_drop", do_nothing)
note_named: Final = chosen_by(MOMENTS, "note_named", do_nothing)
note_unnamed: Final = chosen_by(MOMENTS, "note_unnamed", ignore_cause)
note_child: Final = chosen_by(MOMENTS, "note_child", ignore_child)
next_child: Final = chosen_by(MOMENTS, "next_child", choose_first)
expect: Final = chosen_by(MOMENTS, "expect", expect_nothing)
note_reuse: Final = chosen_by(MOMENTS, "note_reuse", do_nothing)
note_recomputed: Final = chosen_by(MOMENTS, "note_recomputed", do_nothing)
note_copy: Final = chosen_by(MOMENTS, "note_copy", copy_nothing)
are_alike: Final = chosen_by(MOMENTS, "are_alike", are_always_alike)
is_fresher: Final = chosen_by(MOMENTS, "is_fresher", is_no_fresher)
note_request: Final = chosen_by(MOMENTS, "note_request", ignore_request)
note_rest: Final = chosen_by(MOMENTS, "note_rest", do_nothing)
enqueue: Final = chosen_by(MOMENTS, "enqueue", put_last)
note_cached: Final = chosen_by(MOMENTS, "note_cached", do_nothing)
put: Final = chosen_by(MOMENTS, "put", put_last)
note_rank: Final = chosen_by(MOMENTS, "note_rank", do_nothing)
unlink: Final = chosen_by(MOMENTS, "unlink", take_out)
note_claim: Final = chosen_by(MOMENTS, "note_claim", do_nothing)
note_vacant: Final = chosen_by(MOMENTS, "note_vacant", do_nothing)
stays: Final = chosen_by(MOMENTS, "stays", is_not_so)
