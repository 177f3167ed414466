"""The planner: how much memory a load needs, and how fast it is served, without running a model.

::

    traces       requests, files of them, workloads
    capacity     hit ratio against capacity, and the optimum
    recording    a running engine's events, joined with its log

Beside it stand :mod:`pagedkv.models` (a model's groups and bytes, read from its config), :mod:`pagedkv.simulation` (a
trace through the space, on a virtual clock or one request at a time) and :mod:`pagedkv.report` (a page with the
results).
"""
