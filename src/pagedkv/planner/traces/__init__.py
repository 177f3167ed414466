"""Requests: read from trace files, merged, sorted, converted, or generated from a seed.

In the order in which data flows::

    request        Request and TokenizedRequest, the values that flow
    lines          numbered lines of a plain, gzip or zst file (zstd_stream); file_kinds: files that are not text
    json_array     the objects of a file that is an array; parquet_rows: those of a Parquet file
    clocks         times in a file's unit, turned into seconds; texts: texts as tokens
    block_runs     run-length coded block ids, and the number of tokens of an id
    formats        reads a line of each trace format
    arrival_order  refuses arrivals that go back in time
    bad_lines      skips and counts bad lines; stamps: times that are generated, or spread
    reader         TraceReader: a file as a stream of Request
    interleaving   sessions with clocks of their own, merged into one order; sorting for requests out of order
    anonymizing    requests without their texts: salted digests of blocks
    token_blocks   block ids made from tokens; tokens: tokens made from block ids
    writer         TraceWriter: requests as a file
    workload       ConversationWorkload: tokenized requests from a seed, without a file

Independent of block pools, models and engines. Reading files needs msgspec (``pip install 'pagedkv[cli]'``), so
:class:`~pagedkv.planner.traces.reader.TraceReader` is imported from its own module; the names below need NumPy alone.
"""

from pagedkv.planner.traces.request import Request, TokenizedRequest
from pagedkv.planner.traces.tokens import tokenize, tokenized
from pagedkv.planner.traces.workload import ConversationWorkload

__all__ = ["ConversationWorkload", "Request", "TokenizedRequest", "tokenize", "tokenized"]
