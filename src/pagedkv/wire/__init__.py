"""KV events on the wire: changes of a cache as messages, and messages as changes of an index.

In the order in which data flows::

    changes         what the engine's thread copies after a step: events, and the contents of stored blocks
    parent_order    the order of a snapshot: each block after its parent
    encoding        changes as MessagePack, in the form of vLLM
    frames          frames of published messages, of requests and of answers
    sent_batches    the latest batches, to be sent again
    decoding        MessagePack to values, in the forms of vLLM and SGLang
    cache_events    values to the events of a block space
    following       the batches of one publisher in order: gaps, lifetimes, snapshots

No socket, no thread, no clock: these are in :mod:`pagedkv.events`. Messages need msgspec
(``pip install 'pagedkv[record]'``).
"""

from pagedkv.wire.changes import CachedSpace, CacheSnapshot, Changes, changes_of, listed_pools
from pagedkv.wire.decoding import (
    DEVICE,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    Event,
    EventBatch,
    decode_batch,
)
from pagedkv.wire.encoding import UNKNOWN_PARENT, BatchEncoder
from pagedkv.wire.following import (
    Alive,
    Applied,
    FollowedMessage,
    Following,
    FollowingRules,
    OutgoingRequest,
    Snapshot,
    follow,
)
from pagedkv.wire.frames import (
    ENDPOINT_ADVICE,
    SNAPSHOT_REQUEST,
    Message,
    Request,
    answer,
    answered,
    broadcast,
    end_of_answer,
    published,
    request_frames,
    requested,
)
from pagedkv.wire.sent_batches import SentBatches

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
