"""What intent brings: agent sessions served with leases and supersession, beside LRU, the adaptive policy, the optimum.

``python -m benchmarks.intent TRACE...`` serves traces with sessions through the production pool at each capacity of
``pagedkv curve``, one request after the other, on the clock of their arrivals::

    lru, adaptive        no intent
    supersession         a session's next prompt that shares half of the one before replaces it: what it left goes first
    leases of N s        what a request leaves is kept for N seconds
    leases until next    the same until the session's next request comes, and not behind its last: as if that were known
    both                 supersession, and leases until the next request
    t-lru, N             the last N tokens of each request go first
    answers kept, first  generated tokens are cached behind the prompt, never hit: as all else, or to be evicted first
    caps of a share      each session is a tenant that may take so much of the pool, and at its cap evicts its own

Leases until next and both need to know whether and when a session's next request comes, which a server does not, so
they are an upper bound for leases. Hit ratios are one table, the tokens of which a tenth of the requests has to compute
more another. Both are in docs/findings.md.
"""
