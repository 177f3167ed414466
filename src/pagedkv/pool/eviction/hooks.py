"""The moments of :mod:`~pagedkv.pool.eviction.policy`, as the rest of the pool calls them.

Each asks the pool for its policy's number and does what that policy does. They are made from the registry when this
module is imported: a chain of comparisons, inlined into the caller, of which LRU takes the first branch. A table of
functions would be a call that is not inlined, which hands over every array of the pool.
"""

from collections.abc import Callable
from typing import Final

from pagedkv.arrays import Int32Array
from pagedkv.compilation.compiled import inlined, unsigned
from pagedkv.pool.blocks import POLICY, PoolArrays
from pagedkv.pool.eviction.policy import Choice, EvictionPolicy, ExpectHook, Hook, RequestHook
from pagedkv.pool.eviction.registry import POLICIES

__all__ = [
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


def _of_own_policy(hook_of: Callable[[EvictionPolicy], Hook | ExpectHook]) -> Hook:
    """Make the hook that does what the policy of the pool does: the last policy's, if it is none of those before."""
    *others, hook = map(hook_of, POLICIES.values())
    for number, other in reversed(list(enumerate(others))):
        hook = _either(number, other, hook)
    return hook


def _request_hook() -> RequestHook:
    *others, hook = (policy.note_request for policy in POLICIES.values())
    for number, other in reversed(list(enumerate(others))):
        hook = _either_request(number, other, hook)
    return hook


def _choice() -> Choice:
    *others, choice = (policy.choose_victim for policy in POLICIES.values())
    for number, other in reversed(list(enumerate(others))):
        choice = _either_choice(number, other, choice)
    return choice


def _either(number: int, hook: Hook, other: Hook) -> Hook:
    @inlined
    def own_hook(pool: PoolArrays, block: int) -> None:
        if pool.counts[POLICY] == number:
            hook(pool, block)
        else:
            other(pool, block)

    return own_hook


def _either_request(number: int, hook: RequestHook, other: RequestHook) -> RequestHook:
    @inlined
    def own_hook(pool: PoolArrays, blocks: Int32Array, num_outputs: int) -> None:
        if pool.counts[POLICY] == number:
            hook(pool, blocks, num_outputs)
        else:
            other(pool, blocks, num_outputs)

    return own_hook


def _either_choice(number: int, choice: Choice, other: Choice) -> Choice:
    @inlined
    def own_choice(pool: PoolArrays, first: int) -> int:
        if pool.counts[POLICY] == number:
            return unsigned(choice(pool, first))  # of one type: Numba unites signed and unsigned as floats
        return unsigned(other(pool, first))

    return own_choice


note_name: Final = _of_own_policy(lambda policy: policy.note_name)
expect: Final = _of_own_policy(lambda policy: policy.expect)
note_reuse: Final = _of_own_policy(lambda policy: policy.note_reuse)
note_recomputed: Final = _of_own_policy(lambda policy: policy.note_recomputed)
enqueue: Final = _of_own_policy(lambda policy: policy.enqueue)
note_eviction: Final = _of_own_policy(lambda policy: policy.note_eviction)
note_drop: Final = _of_own_policy(lambda policy: policy.note_drop)
note_claim: Final = _of_own_policy(lambda policy: policy.note_claim)
note_request: Final = _request_hook()
choose_victim: Final = _choice()
