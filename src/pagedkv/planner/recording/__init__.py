"""A recording of a running engine: its KV cache events and metrics, joined with its request log.

In the order in which data flows::

    wire           one message of KV events, of either dialect, as values
    subscription   the sockets: messages as they arrive, messages requested again, whether a publisher is connected
    recorder       follows one publisher until it is stopped: the content of the stored blocks, as far as events show
                   it, and the stored blocks by medium: occupancy and lifetimes, and since when they are exact
    metrics        a metrics page: the figures of cache and hits on it
    joining        the requests of a log during the recording, as a trace

Events show which blocks were stored and removed, never hits or arrivals, so they alone make no trace. Arrivals,
lengths, sessions and contents of requests are those of the log; blocks and their lifetimes are those of the events.
Facts in neither stay unknown. docs/recording.md gives the source of each figure.

Independent of output files, terminals and signals. Sockets need pyzmq and messages msgspec
(``pip install 'pagedkv[record]'``).
"""
