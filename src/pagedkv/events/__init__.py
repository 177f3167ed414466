"""The sockets of KV events: an engine's publisher, and its followers.

::

    publisher       EventPublisher: publishes an engine's events, sends them again, sends snapshots
    follower        EventFollower: follows a publisher of pagedkv; yields messages for an index
                    Subscription: receives the messages of a publisher of any engine

The messages are in :mod:`pagedkv.wire`; those that users need can be imported from here too. Both need pyzmq and
msgspec (``pip install 'pagedkv[record]'``).
"""

from pagedkv.events.follower import Endpoints, EventFollower, Subscription
from pagedkv.events.publisher import EventPublisher
from pagedkv.wire import Alive, Applied, CacheSnapshot, FollowedMessage, FollowingRules, Snapshot, follow

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
