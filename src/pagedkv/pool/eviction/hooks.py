"""The moments of :mod:`~pagedkv.pool.eviction.policy`, as the rest of the pool calls them.

Each does what the pool's policy does. Which policy that is tells the class of the pool's arrays, so that it is decided
when a loop is compiled: machine code holds one policy, and a loop that calls none of its moments is the same for all.
"""

from typing import Final

from pagedkv.compilation.choice import chosen_by_type
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

_ALL: Final = tuple(POLICIES.values())

note_name: Final = chosen_by_type({policy.arrays: policy.note_name for policy in _ALL})
expect: Final = chosen_by_type({policy.arrays: policy.expect for policy in _ALL})
note_reuse: Final = chosen_by_type({policy.arrays: policy.note_reuse for policy in _ALL})
note_recomputed: Final = chosen_by_type({policy.arrays: policy.note_recomputed for policy in _ALL})
enqueue: Final = chosen_by_type({policy.arrays: policy.enqueue for policy in _ALL})
note_eviction: Final = chosen_by_type({policy.arrays: policy.note_eviction for policy in _ALL})
note_drop: Final = chosen_by_type({policy.arrays: policy.note_drop for policy in _ALL})
note_claim: Final = chosen_by_type({policy.arrays: policy.note_claim for policy in _ALL})
note_request: Final = chosen_by_type({policy.arrays: policy.note_request for policy in _ALL})
choose_victim: Final = chosen_by_type({policy.arrays: policy.choose_victim for policy in _ALL})
