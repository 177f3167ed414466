"""Moments at which an eviction policy may act.

The next block to be handed out is the first of the cold list, and only when that is empty the first of the protected
list. A policy decides where in the two a cached block stands, or names the victim itself (``choose_victim``)::

    cold:       without content, newest freed first | cached blocks, the next to be evicted first
    protected:                                        cached blocks, the next to be evicted first

The moments:

note_name
    The content of a block in use got a name: it was computed, and may be hit from now on. Its digest and what it
    continues (``PARENT``, ``PARENT_LIFE``) are written.
expect
    Content is about to be named, ``FETCHED_AHEAD`` blocks of its sequence from now: given the first word of its digest.
    A hint, so that the policy's memory is on its way by then: it may come more than once, and never.
note_reuse
    A named block was hit. It is in use now, and in no list.
note_recomputed
    Content was computed once more although this named block has it, since it could not be hit: something else was
    missing that a hit takes, what it continues or another group's blocks. Whoever computed it uses this block now.
enqueue
    Nobody uses a named block any more, nor does a step in flight. The policy links it into one of the two lists, never
    before a block without content, sets its ``QUEUE`` to ``FREE`` and adds one to ``NUM_FREE``:
    :func:`~pagedkv.memory.pool.moments.put_last` does all that. It may move other free cached blocks as well.
note_eviction
    A cached block was taken out of its list to make room. Its name is still there; ``note_drop`` follows.
note_drop
    A block is about to lose its name, for whatever reason and wherever it is: what it holds next is other content. If
    it is free, the pool takes it from among the cached blocks next, unless it has.
note_claim
    A cached block was taken out of its list because somebody uses it from now on. If it was spare, ``note_name`` came
    before; if it is hit, ``note_reuse`` follows.
note_request
    A sequence ends: its blocks (ids, head first, null blocks among them) are about to be given back, which may leave
    them in use by others. Told also how many tokens it had generated, -1 if nobody knows. What blocks are given back
    for by themselves (behind a window, by a rollback or a swap) has no such moment.
choose_victim
    A block is wanted, and all free blocks are cached. Given the first in the lists; returns which one is to go. It must
    be a free cached block, and ``note_eviction`` of it follows.

So a block's name begins with ``note_name`` and ends with ``note_drop``. Between the two are hits and releases, in any
order that makes sense: a hit on a block in use has no ``enqueue`` before it. Blocks that are spare or leased are none
of the policy's: to it their names were dropped, and begin anew.

What acts here, the class of the pool's arrays says (``policy``). A pool whose arrays say nothing evicts as LRU does.
"""

from dataclasses import dataclass, field
from typing import Final

from pagedkv.memory.compilation.choice import POLICY, chosen_by
from pagedkv.memory.pool.moments import (
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
    """What a policy does. What is not given is LRU's: nothing, and released blocks go last."""

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
