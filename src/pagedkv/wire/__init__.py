"""KV events on the wire: changes of a cache as messages, and messages as changes of an index.

In the order in which data flows::

    encoding     what the engine's thread copies after a step, and that as MessagePack, in the form of vLLM
    decoding     MessagePack to values, in the forms of vLLM and SGLang, and to the events of a block space
    following    the batches of one publisher in order: gaps, lifetimes, snapshots; frames of messages at sockets
    learning     other engines' names of blocks, learnt from tokens and parents in their events
    unnamed      the batches of a publisher that names no lifetime, in order

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
    names_lifetime,
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
from pagedkv.wire.learning import LearntNames
from pagedkv.wire.unnamed import UnnamedFollowing

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
    "LearntNames",
    "Message",
    "OutgoingRequest",
    "Request",
    "SentBatches",
    "Snapshot",
    "UnnamedFollowing",
    "answer",
    "answered",
    "broadcast",
    "changes_of",
    "decode_batch",
    "end_of_answer",
    "follow",
    "listed_pools",
    "names_lifetime",
    "published",
    "request_frames",
    "requested",
]
