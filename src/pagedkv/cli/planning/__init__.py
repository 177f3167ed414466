"""What ``pagedkv plan`` does between its options and its answer.

In the order in which data flows::

    axes      what is swept, and the settings that follow
    store     figures of points that were run before, a file each
    runs      points in processes of their own
    document  everything found out, for JSON and the page
    tables    the answer for humans
"""
