"""Measurements while a trace is served, of one figure a class. No meter changes the replay.

::

    meters          ages, misses, occupancy, waste, sharing, latencies, timelines; all of them, for scheduler and clock
"""
