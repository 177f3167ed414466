"""The work of ``pagedkv plan`` between its options and its result.

In the order in which data flows::

    axes      the compared values, and the settings made of them
    prices    the cost of tokens, by the user's prices
    store     figures of points that were run before, one file each
    runs      points in separate processes
    ray_runs  points as tasks of Ray
    loads     the loads of each setting, typed or chosen by a search
    beside    runs for comparison with each cluster: routing in turn, and one pool
    document  all results, for JSON and the page
    tables    the result for humans
"""
