"""The log of names set and removed: a ring of events, which the caller drains.

A ring of size 0 records nothing.
"""

import numpy as np

from pagedkv.blocks.digests import without_root
from pagedkv.blocks.record import EVENT_FIELDS, NAME, NUM_EVENTS, PoolArrays
from pagedkv.compilation.compiled import featured, inlined
from pagedkv.contract.answers import CLEARED, GAP, STORED, CacheEvents
from pagedkv.contract.arguments import LARGEST_SIZE
from pagedkv.contract.arrays import DIGEST_WORDS, Uint32Array


def new_log(most: int) -> Uint32Array:
    """Make a ring for the latest ``most`` events."""
    return np.zeros((most, EVENT_FIELDS), np.uint32)


@featured
@inlined
def log_event(pool: PoolArrays, kind: int, block: int) -> None:
    """Record an event, over the oldest one if the log is full."""
    event = pool.counts[NUM_EVENTS] % len(pool.event_log)
    pool.counts[NUM_EVENTS] += 1
    pool.event_log[event, 0] = kind
    pool.event_log[event, 1] = pool.records[block, NAME]
    pool.event_log[event, 2] = block
    for word in range(DIGEST_WORDS):
        pool.event_log[event, 3 + word] = pool.digests[block, word]
        pool.event_log[event, 3 + DIGEST_WORDS + word] = pool.parent_digests[block, word] if kind == STORED else 0


def log_cleared(pool: PoolArrays) -> None:
    """Record that all names were removed; no effect if events are off."""
    log = pool.event_log
    if len(log):
        event = int(pool.counts[NUM_EVENTS]) % len(log)
        log[event] = 0
        log[event, 0] = CLEARED
        pool.counts[NUM_EVENTS] += 1


def drain(name: str, pool: PoolArrays) -> CacheEvents:
    """Take the events since the last call; if the ring was full, the oldest are missing. O(events)."""
    num_events, capacity = int(pool.counts[NUM_EVENTS]), len(pool.event_log)
    num_lost = max(0, num_events - capacity)
    log = pool.event_log[np.arange(num_lost, num_events) % max(1, capacity)]
    pool.counts[NUM_EVENTS] = 0
    if num_lost:
        gap = np.zeros((1, EVENT_FIELDS), np.uint32)
        gap[0, [0, 2]] = GAP, min(num_lost, LARGEST_SIZE)
        log = np.concatenate([gap, log])
    log[:, -DIGEST_WORDS:] = without_root(log[:, -DIGEST_WORDS:])
    words = log[:, 3:].astype(">u4").view(np.uint8).reshape(len(log), 2, 32)
    return CacheEvents(
        pool=name,
        kinds=log[:, 0].astype(np.int32),
        groups=log[:, 1].astype(np.int32) - 1,
        block_ids=log[:, 2].astype(np.int32),
        digests=words[:, 0].copy(),
        parent_digests=words[:, 1].copy(),
    )
