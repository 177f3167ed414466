"""KV events, out and in: a publisher beside an engine, and its followers. A door to :mod:`pagedkv.memory.sockets`."""

from pagedkv.memory.sockets import (
    Alive,
    Applied,
    CacheSnapshot,
    EventFollower,
    EventPublisher,
    FollowedMessage,
    FollowingRules,
    Snapshot,
    follow,
)

__all__ = [
    "Alive",
    "Applied",
    "CacheSnapshot",
    "EventFollower",
    "EventPublisher",
    "FollowedMessage",
    "FollowingRules",
    "Snapshot",
    "follow",
]
