"""The memory system: which block holds which tokens' keys and values, and what a device does about it.

In the order of floors, the lowest first::

    contract               the words that all rooms share: specifications, plans, answers, events, errors
    compilation | device   how loops become machine code | the body, which carries plans out
    pool                   one pool's blocks, queue, eviction, names
    tables                 rows and tables of groups: operations as loops
    space                  BlockSpace: one module an operation
    scheduling | classic   continuous batching | one sequence at a time, in the words of classic block managers
    attention | tiers      attention over blocks | stores of cached blocks outside the device
    routing | wire         which replica serves a request | KV events as messages, and back
    tiering | sockets      which entries of stores are loaded and offered | KV events over ZeroMQ
    warming                loops compiled ahead

Knows no model, no request of a user, no trace and no clock.
"""
