"""The five moments of :mod:`~pagedkv.pool.eviction.policy`, as the rest of the pool calls them.

Each asks the pool for its policy's number and does what that policy does. They are made from the registry when this
module is imported: a chain of comparisons, inlined into the caller, of which LRU takes the first branch. A table of
functions would be a call that is not inlined, which hands over every array of the pool.
"""

from collections.abc import Callable
from typing import Final

from pagedkv.compilation.compiled import inlined
from pagedkv.pool.blocks import POLICY, PoolArrays
from pagedkv.pool.eviction.policy import EvictionPolicy, Hook
from pagedkv.pool.eviction.registry import POLICIES

__all__ = ["enqueue", "note_drop", "note_eviction", "note_name", "note_reuse"]


def _of_own_policy(hook_of: Callable[[EvictionPolicy], Hook]) -> Hook:
    """Make the hook that does what the policy of the pool does: the last policy's, if it is none of those before."""
    *others, hook = map(hook_of, POLICIES.values())
    for number, other in reversed(list(enumerate(others))):
        hook = _either(number, other, hook)
    return hook


def _either(number: int, hook: Hook, other: Hook) -> Hook:
    @inlined
    def own_hook(pool: PoolArrays, block: int) -> None:
        if pool.counts[POLICY] == number:
            hook(pool, block)
        else:
            other(pool, block)

    return own_hook


note_name: Final = _of_own_policy(lambda policy: policy.note_name)
note_reuse: Final = _of_own_policy(lambda policy: policy.note_reuse)
enqueue: Final = _of_own_policy(lambda policy: policy.enqueue)
note_eviction: Final = _of_own_policy(lambda policy: policy.note_eviction)
note_drop: Final = _of_own_policy(lambda policy: policy.note_drop)
