"""KV events on the wire: changes of a cache as messages, and messages as changes of an index.

In the order in which data flows::

    encoding     what the engine's thread copies after a step, and that as MessagePack, in the form of vLLM
    decoding     MessagePack to values, in the forms of vLLM and SGLang, and to the events of a block space
    following    the batches of one publisher in order: gaps, lifetimes, snapshots; frames of messages at sockets

No socket, no thread, no clock: these are in :mod:`pagedkv.events`. Messages need msgspec
(``pip install 'pagedkv[record]'``).
"""

from pagedkv.wire.decoding import (
    DEVICE,
    UNKNOWN_PARENT,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    Event,
    EventBatch,
    decode_batch,
)
from pagedkv.wire.encoding import (
    BatchEncoder,
    CachedSpace,
    CacheSnapshot,
    Changes,
    changes_of,
    listed_pools,
)
from pagedkv.wire.following import (
    ENDPOINT_ADVICE,
    SNAPSHOT_REQUEST,
    Alive,
    Applied,
    FollowedMessage,
    Following,
    FollowingRules,
    Message,
    OutgoingRequest,
    Request,
    SentBatches,
    Snapshot,
    answer,
    answered,
    broadcast,
    end_of_answer,
    follow,
    published,
    request_frames,
    requested,
)

__all__ = [
    "DEVICE",
    "ENDPOINT_ADVICE",
    "SNAPSHOT_REQUEST",
    "UNKNOWN_PARENT",
    "Alive",
    "Applied",
    "BatchEncoder",
    "BlockHash",
    "BlocksRemoved",
    "BlocksStored",
    "CacheSnapshot",
    "CachedSpace",
    "Changes",
    "Cleared",
    "Event",
    "EventBatch",
    "FollowedMessage",
    "Following",
    "FollowingRules",
    "Message",
    "OutgoingRequest",
    "Request",
    "SentBatches",
    "Snapshot",
    "answer",
    "answered",
    "broadcast",
    "changes_of",
    "decode_batch",
    "end_of_answer",
    "follow",
    "listed_pools",
    "published",
    "request_frames",
    "requested",
]
