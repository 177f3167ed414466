"""A recording of a running engine: its KV cache events and metrics, joined with its request log.

In the order in which data flows::

    wire           one message of KV events, of either dialect, as values
    subscription   the sockets: messages as they arrive, messages requested again, whether a publisher is connected
    numbering      the place of a message: the next one, one seen before, one after a gap, one of a new process
    contents       which content the stored blocks have, as far as events show it
    residency      which blocks are stored, by medium: occupancy and lifetimes, and since when that is exact
    recorder       follows one publisher until it is stopped; holds the results
    exposition     the text of a metrics page; metrics: the figures of cache and hits on it
    joining        the requests of a log during the recording, as a trace

Events show which blocks were stored and removed, never hits or arrivals, so they alone make no trace. Arrivals,
lengths, sessions and contents of requests are those of the log, blocks and their lifetimes those of the events. Facts
that neither has stay unknown. docs/recording.md gives the source of each figure.

Knows nothing of output files, terminals or signals. Sockets need pyzmq and messages msgspec
(``pip install 'pagedkv[record]'``).
"""
