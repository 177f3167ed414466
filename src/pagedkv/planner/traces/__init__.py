"""Requests: read from trace files, merged, sorted, converted, or generated from a seed.

In the order in which data flows::

    request        Request and TokenizedRequest, the values that flow; runs of block ids; tenants
    lines          numbered lines or objects of a file: plain, gzip, zst, an array, Parquet
    clocks         times in a file's unit, turned into seconds, generated or spread; windows of recorded time
    formats        reads a line of each trace format
    reader         TraceReader: a file as a stream of Request, without its bad lines
    merging        one order: sessions with clocks of their own, requests out of order, several logs
    token_blocks   tokens made from texts and block ids, block ids made from tokens; requests without their texts
    writer         TraceWriter: requests as a file
    workload       ConversationWorkload: tokenized requests from a seed, without a file

Independent of block pools, models and engines. Reading files needs msgspec (``pip install 'pagedkv[cli]'``), so
:class:`~pagedkv.planner.traces.reader.TraceReader` is imported from its own module; the names below need NumPy alone.
"""

from pagedkv.planner.traces.request import Request, TokenizedRequest
from pagedkv.planner.traces.token_blocks import tokenize, tokenized
from pagedkv.planner.traces.workload import ConversationWorkload

__all__ = ["ConversationWorkload", "Request", "TokenizedRequest", "tokenize", "tokenized"]
