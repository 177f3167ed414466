"""Moments of a block's life, at which what stands beside the core may act: the features of a pool.

The core calls each moment by its function here, and knows nothing of what acts then. Which code that is, the class of
the pool's arrays says (``moments``), so that it is settled when a loop is compiled: machine code holds that code alone,
and is kept under its sources. A pool whose arrays have no moments does what is given here: it is LRU, and has no
feature. What acts where there are features, :mod:`~pagedkv.memory.pool.features` says.

A free block has one of these ranks, and is handed out in their order::

    without content | spare (spare_blocks.py) | cached, as the eviction policy says | kept by a feature, such as a lease

Taking a block:

make_room
    A free block is about to be taken, the first that :func:`~pagedkv.memory.pool.free_queue.first` names: what features
    keep or forbid gives way, as far as it must.
note_payer
    For whom blocks are taken from now on, by the number of a tenant. Only where ``counts_takes``.
counts_takes
    Whether each block that is taken must have its ``make_room`` and ``note_take``, so that none are taken at once.
choose_victim
    All free blocks are cached, and none is spare. Given the first; returns which one is to go.
note_eviction
    A cached block was taken out of its list to make room. It is about to lose its name; no ``note_drop`` follows.
note_take
    A block was taken out of the free ones, for new content.
note_begin
    A block begins another life.

Names:

note_name, note_drop
    A block's name begins, or ends, for what orders cached blocks: when it gets and loses its name, and when it ceases
    to be spare, and becomes so.
note_named
    A block has got a name: it can be found from now on.
note_unnamed
    A block is about to be findable no longer, for a cause (:mod:`~pagedkv.memory.pool.causes`).
note_child
    A block is being named as the child of a parent in that life, whose ``SUCCESSOR`` does not lead to it yet.
next_child
    Which child the walks of a block's parent go to once the block, where they go now, has no name; itself if no other.
expect
    Content is about to be named: given the first word of its digest. A hint.
note_reuse, note_recomputed
    A named block was hit, or its content was computed once more. It is in use now.

Content:

note_copy
    A block of a pool becomes a copy of one here or on the other side: source, block, destination, place.
are_alike
    Whether two blocks of equal tokens, each given behind its pool, hold equal content: the same weights computed them.
is_fresher
    Whether hits may rest on a block for longer than on another one, which holds equal tokens.

Giving a block back:

note_request
    A sequence ends: its blocks are about to be given back. Told also how many tokens it had generated, -1 if nobody
    knows.
note_rest
    Nobody uses a block any more, with or without a name, nor does a step in flight.
enqueue
    Such a block has a name, and is not spare unless it ``stays``: it is to be put among its like.
note_cached
    Such a block has a name, and was put among its like, spare ones too.
put
    A block that was spare is to be put among cached ones.
note_rank
    A free block went from spare to cached, or back.
unlink
    A free block with a name is to be taken out, wherever it stands.
note_claim
    That was done because somebody uses it from now on.
note_vacant
    A free block has lost its name.
stays
    Whether a feature keeps a block, so that nothing else makes it spare.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pagedkv.memory.compilation.choice import MOMENTS, chosen_by
from pagedkv.memory.compilation.compiled import inlined
from pagedkv.memory.contract.arrays import Int32Array
from pagedkv.memory.pool import free_queue
from pagedkv.memory.pool.blocks import PoolArrays

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
    "note_drop",
    "note_eviction",
    "note_name",
    "note_named",
    "note_payer",
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

FETCHED_AHEAD: Final = 4  # blocks: enough for memory to come, few enough to be on its way at once

PoolHook: TypeAlias = Callable[[PoolArrays], None]
"""What is done with a pool."""

PoolQuestion: TypeAlias = Callable[[PoolArrays], bool]
"""What is asked of a pool."""

Hook: TypeAlias = Callable[[PoolArrays, int], None]
"""What is done with a pool and one of its blocks."""

Question: TypeAlias = Callable[[PoolArrays, int], bool]
"""What is asked of a pool and one of its blocks."""

CauseHook: TypeAlias = Callable[[PoolArrays, int, int], None]
"""What is done with a pool and one of its blocks, for a cause."""

ChildHook: TypeAlias = Callable[[PoolArrays, int, int, int], None]
"""What is done with a pool, a block, its parent and the life of that."""

CopyHook: TypeAlias = Callable[[PoolArrays, int, PoolArrays, int], None]
"""What is done with a pool and one of its blocks, and with a pool and a block that becomes a copy of that."""

Comparison: TypeAlias = Callable[[PoolArrays, int, PoolArrays, int], bool]
"""What is asked of two blocks, each behind its pool."""

Ranking: TypeAlias = Callable[[PoolArrays, int, int], bool]
"""What is asked of two blocks of a pool."""

ExpectHook: TypeAlias = Callable[[PoolArrays, int], None]
"""What is done with a pool and the first word of a digest."""

RequestHook: TypeAlias = Callable[[PoolArrays, Int32Array, int], None]
"""What is done with a pool, the blocks of one sequence (int32 ``[any]``, head first), and its number of outputs."""

Choice: TypeAlias = Callable[[PoolArrays, int], int]
"""Which block of a pool is meant, given one."""


@inlined
def leave_as_it_is(_pool: PoolArrays) -> None:
    """Do nothing."""


@inlined
def is_never_so(_pool: PoolArrays) -> bool:
    """Say no."""
    return False


@inlined
def do_nothing(_pool: PoolArrays, _block: int) -> None:
    """Do nothing."""


@inlined
def is_not_so(_pool: PoolArrays, _block: int) -> bool:
    """Say no."""
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
    """Say yes."""
    return True


@inlined
def is_no_fresher(_pool: PoolArrays, _block: int, _other: int) -> bool:
    """Say no."""
    return False


@inlined
def expect_nothing(_pool: PoolArrays, _word: int) -> None:
    """Do nothing."""


@inlined
def ignore_request(_pool: PoolArrays, _blocks: Int32Array, _num_outputs: int) -> None:
    """Do nothing."""


@inlined
def choose_first(_pool: PoolArrays, first: int) -> int:
    """Choose what is given."""
    return first


@inlined
def put_last(pool: PoolArrays, block: int) -> None:
    """Put a block that nobody uses at the back of the cold list."""
    free_queue.append(pool.records, pool.counts, block)


@inlined
def take_out(pool: PoolArrays, block: int) -> None:
    """Take a block out of the list in which it stands."""
    free_queue.remove(pool.records, pool.counts, block)


@dataclass(frozen=True, slots=True)
class Moments:
    """What acts at the moments of a pool's blocks. What is not given is LRU's, without any feature."""

    make_room: PoolHook = field(default=leave_as_it_is, repr=False)
    counts_takes: PoolQuestion = field(default=is_never_so, repr=False)
    note_payer: Hook = field(default=do_nothing, repr=False)
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
note_payer: Final = chosen_by(MOMENTS, "note_payer", do_nothing)
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
