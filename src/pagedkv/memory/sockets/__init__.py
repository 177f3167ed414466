"""The sockets of KV events: a publisher beside an engine, and what follows it.

::

    opening         sockets at endpoints
    publisher       an engine's events: published, sent again, snapshots
    follower        one publisher of ours, as messages that an index takes
    subscription    one publisher of any engine, message by message

What goes through them is in :mod:`pagedkv.memory.wire`, and named here again, so that users have one door. They need
pyzmq and msgspec (``pip install 'pagedkv[record]'``).
"""

from pagedkv.memory.sockets.follower import EventFollower
from pagedkv.memory.sockets.publisher import EventPublisher
from pagedkv.memory.sockets.subscription import Endpoints, Subscription
from pagedkv.memory.wire import Alive, Applied, CacheSnapshot, FollowedMessage, FollowingRules, Snapshot, follow

__all__ = [
    "Alive",
    "Applied",
    "CacheSnapshot",
    "Endpoints",
    "EventFollower",
    "EventPublisher",
    "FollowedMessage",
    "FollowingRules",
    "Snapshot",
    "Subscription",
    "follow",
]
