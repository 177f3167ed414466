"""The planner: how much memory a load needs, and how fast it is served, without running a model.

::

    traces       requests, files of them, workloads
    models       a model's groups and bytes, read from its config
    capacity     hit ratio against capacity, and the optimum
    simulation   a trace through the space, on a virtual clock or one request at a time
    recording    a running engine's events, joined with its log
    report       a page with the results
"""
