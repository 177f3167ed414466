"""The inspector's page over a replay: ``pagedkv replay --inspect``.

::

    options     InspectOptions: where the page is served, and how fast the replay runs
    pace        Pace: lets virtual time pass, and runs work of the page's server meanwhile
    following   ReplayFollower: reports a replay's requests and steps to the inspector
    replay_page ReplayPage: the page from the first request until Ctrl-C

The options alone are imported without ``--inspect``.
"""
