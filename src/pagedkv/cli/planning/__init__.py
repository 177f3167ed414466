"""What ``pagedkv plan`` does between its options and its answer.

In the order in which data flows::

    axes      what is swept, and the settings that follow
    prices    what tokens cost, by prices as typed
    store     figures of points that were run before, a file each
    runs      points in processes of their own
    loads     which loads each setting is run under, as typed or as a search asks
    document  everything found out, for JSON and the page
    tables    the answer for humans
"""
