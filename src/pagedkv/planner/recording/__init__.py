"""A running engine, recorded: what it says of its KV cache, and what its request log adds.

In the order in which data flows::

    wire           one message of KV events, of either dialect, as values
    subscription   the sockets: messages as they come, messages asked for again, whether anybody is there
    numbering      which message this is: the next one, one seen before, one behind a gap, one of a new process
    contents       which content the stored blocks have, as far as events tell
    residency      which blocks are there, by medium: occupancy and lifetimes, and since when that is exact
    recorder       follows one publisher until it is told to stop; what it found out
    exposition     the text of a metrics page; metrics: what engines say there of cache and hits
    joining        the requests of a log that came meanwhile, as a trace

Events show what was stored and removed, never hits or arrivals, so they alone make no trace: arrivals, lengths,
sessions and contents of requests are those of the log, blocks and their lifetimes those of the events. What neither
tells stays unknown. docs/recording.md says of each figure where it comes from.

Knows nothing of files that are written, terminals or signals. Sockets need pyzmq and messages msgspec
(``pip install 'pagedkv[record]'``).
"""
