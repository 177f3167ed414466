"""Replays request traces through the production block space.

In the order in which data flows::

    lines        numbered lines of a plain or gzip file
    block_runs   run-length coded block ids, and the tokens that an id stands for
    formats      what a line of each trace format means
    trace        TraceReader: a file as a stream of Request
    tokens       tokenized(): tokens made from block ids
    workload     ConversationWorkload: tokenized requests from a seed, without a file
    replayer     Replayer: requests through the block space, one at a time
    summary      ReplaySummary: what came out
    capacity     hit ratio against capacity, of a cache without time

Reading files needs msgspec (``pip install 'pagedkv[cli]'``), so :class:`~pagedkv.replay.trace.TraceReader` is imported
from its own module; everything here needs no more than the core does.
"""

from pagedkv.replay.replayer import ReplayConfig, Replayer
from pagedkv.replay.request import Request, TokenizedRequest
from pagedkv.replay.summary import ReplaySummary
from pagedkv.replay.tokens import tokenized
from pagedkv.replay.workload import ConversationWorkload

__all__ = [
    "ConversationWorkload",
    "ReplayConfig",
    "ReplaySummary",
    "Replayer",
    "Request",
    "TokenizedRequest",
    "tokenized",
]
