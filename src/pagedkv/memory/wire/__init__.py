"""KV events on the wire: changes of a cache as messages, and messages as changes of an index.

In the order in which data flows::

    changes         what the engine's thread copies after a step: events, and what the stored blocks hold
    parent_order    the order of a snapshot: each block after its parent
    encoding        changes as MessagePack, in the form of vLLM
    frames          frames of published messages, of requests and of answers
    sent_batches    the latest batches, to be sent again
    decoding        MessagePack as values, in the forms of vLLM and SGLang
    cache_events    values as the events of a block space
    following       the batches of one publisher in order: gaps, lifetimes, snapshots

No socket, no thread, no clock: :mod:`pagedkv.memory.sockets` has those. Messages need msgspec
(``pip install 'pagedkv[record]'``).
"""

from pagedkv.memory.wire.changes import CachedSpace, CacheSnapshot, Changes, changes_of, listed_pools
from pagedkv.memory.wire.decoding import (
    DEVICE,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    Event,
    EventBatch,
    decode_batch,
)
from pagedkv.memory.wire.encoding import UNKNOWN_PARENT, BatchEncoder
from pagedkv.memory.wire.following import (
    Alive,
    Applied,
    FollowedMessage,
    Following,
    FollowingRules,
    Snapshot,
    Wanted,
    follow,
)
from pagedkv.memory.wire.frames import (
    SNAPSHOT_REQUEST,
    WHAT_TO_NAME,
    Message,
    Request,
    answer,
    answered,
    broadcast,
    end_of_answer,
    published,
    question,
    requested,
)
from pagedkv.memory.wire.sent_batches import SentBatches

__all__ = [
    "DEVICE",
    "SNAPSHOT_REQUEST",
    "UNKNOWN_PARENT",
    "WHAT_TO_NAME",
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
    "Request",
    "SentBatches",
    "Snapshot",
    "Wanted",
    "answer",
    "answered",
    "broadcast",
    "changes_of",
    "decode_batch",
    "end_of_answer",
    "follow",
    "listed_pools",
    "published",
    "question",
    "requested",
]
