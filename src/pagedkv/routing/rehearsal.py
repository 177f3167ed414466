"""Routes a few prompts, to compile all loops of a router."""

from typing import Final

import numpy as np

from pagedkv.blocks.digests import hash_request_tokens
from pagedkv.contract.answers import STORED, CacheEvents, TierEvents
from pagedkv.contract.keys import NO_KEYS, RequestKeys
from pagedkv.contract.spec import FullAttention, GroupSpec, SlidingWindow
from pagedkv.routing.prompts import PromptHasher
from pagedkv.routing.replica_index import ReplicaIndex
from pagedkv.routing.residency import SMALLEST
from pagedkv.routing.routers import Router

GROUPS: Final[tuple[tuple[GroupSpec, ...], ...]] = ((FullAttention(4),), (FullAttention(4), SlidingWindow(8, 4)))


def rehearse() -> None:
    """Store and remove blocks, with growing tables, and choose: for one group of whole prefixes, and for two groups."""
    tokens = np.arange(4 * SMALLEST, dtype=np.int32)
    named = np.frombuffer(b"".join(hash_request_tokens(tokens, 4)), np.uint8).reshape(-1, 32)
    hasher = PromptHasher([4], least_tokens=8)
    for keys in (NO_KEYS, RequestKeys(salt=b"a")):
        hasher.hash(tokens[:8], keys)
        hasher.hash(tokens[:16], keys)
    for groups in GROUPS:
        router = Router(ReplicaIndex(groups))
        for name in ("a", "b"):
            router.add_replica(name)
        for number, kind in enumerate((1, 2, 1)):  # stored, removed, stored again
            kinds = np.full(len(named), kind, np.int32)
            events = CacheEvents(
                groups[0].pool, kinds, np.zeros_like(kinds), np.zeros_like(kinds), named, np.zeros_like(named)
            )
            router.apply("a", "1", number, [events], 0.0)
        router.apply("b", "1", 0, [TierEvents("CPU", 8, np.full(len(named), STORED, np.int32), named)], 0.0)
        router.choose(1, tokens[:41], 0.0)
        router.choose(2, tokens[::-1].copy(), 0.0)
        router.prefilled(1)
        router.ended(1)
        router.remove_replica("a")
