"""KV events: a publisher for an engine, and followers. Public import path of :mod:`pagedkv.memory.sockets`."""

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
