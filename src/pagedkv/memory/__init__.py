"""The memory system: assigns blocks of memory to the keys and values of tokens, and executes its plans on a device.

In the order of layers, the lowest first::

    contract               types that all packages share: specifications, plans, answers, events, errors
    compilation | device   compiles loops to machine code | executes plans on a device
    pool                   one pool's blocks, queue, eviction, names
    tables                 rows and tables of groups: operations as loops
    space                  BlockSpace: one module for each operation
    scheduling | classic   continuous batching | one sequence at a time, with the interface of classic block managers
    attention | tiers      attention over blocks | stores of cached blocks outside the device
    routing | wire         chooses the replica of a request | KV events as messages, and back
    tiering | sockets      chooses the entries of stores to load and to offer | KV events over ZeroMQ
    warming                compiles loops before the first request

It does not depend on models, users' requests, traces or clocks.
"""
