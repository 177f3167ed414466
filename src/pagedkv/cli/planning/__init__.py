"""The work of ``pagedkv plan`` between its options and its result.

In the order in which data flows::

    axes      the compared values, and the settings made of them; the cost of tokens, by the user's prices
    loads     the loads of each setting, typed or searched; figures that were stored; runs to compare clusters with
    runs      points in separate processes
    ray_runs  points as tasks of Ray
    document  all results, for JSON and the page
    tables    the result for humans
"""
