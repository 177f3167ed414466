"""Moments: the hooks at which an eviction policy acts.

The next block to be allocated is the first of the cold list, or, if that is empty, the first of the protected list. A
policy chooses the position of a cached block in these lists, or returns the victim itself (``choose_victim``)::

    cold:       without content, newest freed first | cached blocks, the next to be evicted first
    protected:                                        cached blocks, the next to be evicted first

The moments:

note_name
    A block in use was named: its content was computed and may be hit from now on. Its digest and its parent
    (``PARENT``, ``PARENT_LIFE``) are recorded already.
expect
    Content is about to be named, ``FETCHED_AHEAD`` blocks of its sequence from now. Takes the first word of its digest.
    This is a hint for prefetching the policy's memory: it may be called more than once, or never.
note_reuse
    A named block was hit. It is in use now, and in no list.
note_recomputed
    The content of this named block was computed again, since it could not be hit: another block that the hit needs was
    missing, its parent or one of another group. The row that computed the content uses this block now.
enqueue
    A named block has no reference any more, and no step in flight uses it. The policy links it into one of the two
    lists, never before a block without content, sets its ``QUEUE`` to ``FREE`` and adds one to ``NUM_FREE``;
    :func:`~pagedkv.blocks.moments.put_last` does all that. It may move other free cached blocks as well.
note_eviction
    A cached block was taken out of its list to make room. It still has its name; ``note_drop`` follows.
note_drop
    A block is about to lose its name, for any cause and in any place; its next content is different. If it is free and
    still among the cached blocks, the pool takes it out of them next.
note_claim
    A cached block was taken out of its list because it is in use from now on. If it was spare, ``note_name`` came
    before; if it is hit, ``note_reuse`` follows.
note_request
    A sequence ends: its blocks (ids, head first, null blocks among them) are about to be released, and other sequences
    may still use them. Takes also the number of its generated tokens, -1 if unknown. Blocks that are released singly
    (behind a window, by a rollback or a swap) have no such moment.
choose_victim
    A block is needed, and all free blocks are cached. Takes the first block of the lists and returns the victim, which
    must be a free cached block; ``note_eviction`` of it follows.

For a policy, a block has a name from ``note_name`` to ``note_drop``. In between come hits and releases, in any possible
order: a hit on a block in use, for example, has no ``enqueue`` before it. Spare and leased blocks are excluded: the
policy is called as if their names were dropped, and set again later.

The class of the pool's arrays selects the functions (``policy``). A pool whose arrays have no policy evicts as LRU
does.
"""

from dataclasses import dataclass, field
from typing import Final

from pagedkv.blocks.moments import (
    Choice,
    ExpectHook,
    Hook,
    RequestHook,
    choose_first,
    do_nothing,
    expect_nothing,
    ignore_request,
    put_last,
)
from pagedkv.compilation.choice import POLICY, chosen_by

__all__ = [
    "PolicyMoments",
    "choose_victim",
    "enqueue",
    "expect",
    "note_claim",
    "note_drop",
    "note_eviction",
    "note_name",
    "note_recomputed",
    "note_request",
    "note_reuse",
]


@dataclass(frozen=True, slots=True)
class PolicyMoments:
    """The functions of a policy. The defaults are LRU: nothing, and released blocks go to the back."""

    note_name: Hook = field(default=do_nothing, repr=False)
    expect: ExpectHook = field(default=expect_nothing, repr=False)
    note_reuse: Hook = field(default=do_nothing, repr=False)
    note_recomputed: Hook = field(default=do_nothing, repr=False)
    enqueue: Hook = field(default=put_last, repr=False)
    note_eviction: Hook = field(default=do_nothing, repr=False)
    note_drop: Hook = field(default=do_nothing, repr=False)
    note_claim: Hook = field(default=do_nothing, repr=False)
    note_request: RequestHook = field(default=ignore_request, repr=False)
    choose_victim: Choice = field(default=choose_first, repr=False)


note_name: Final = chosen_by(POLICY, "note_name", do_nothing)
expect: Final = chosen_by(POLICY, "expect", expect_nothing)
note_reuse: Final = chosen_by(POLICY, "note_reuse", do_nothing)
note_recomputed: Final = chosen_by(POLICY, "note_recomputed", do_nothing)
enqueue: Final = chosen_by(POLICY, "enqueue", put_last)
note_eviction: Final = chosen_by(POLICY, "note_eviction", do_nothing)
note_drop: Final = chosen_by(POLICY, "note_drop", do_nothing)
note_claim: Final = chosen_by(POLICY, "note_claim", do_nothing)
note_request: Final = chosen_by(POLICY, "note_request", ignore_request)
choose_victim: Final = chosen_by(POLICY, "choose_victim", choose_first)
