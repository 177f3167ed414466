"""Replays request traces through the production block space.

In the order in which data flows::

    request        Request and TokenizedRequest, the values that flow
    lines          numbered lines of a plain or gzip file
    block_runs     run-length coded block ids, and the tokens that an id stands for
    formats        what a line of each trace format means
    arrival_order  arrivals that fall are found out
    trace          TraceReader: a file as a stream of Request
    interleaving   sessions with clocks of their own, merged into one order; sorting for requests out of order
    token_blocks   block ids made from tokens; tokens: tokens made from block ids
    trace_writer   TraceWriter: requests as a file
    workload       ConversationWorkload: tokenized requests from a seed, without a file
    model          what a model keeps of a token; cost: how long a step takes
    serving        requests on a virtual clock, with continuous batching
    replayer       Replayer: requests one at a time, without a clock; summary: what came out of that
    capacity       hit ratio against capacity, of a cache without time

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
