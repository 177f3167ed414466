"""Measurements while a trace is served, one figure a module. No meter changes the replay.

::

    ages            counts by age, in fixed intervals
    block_history   time of each block's last release: ages of hits and of evictions
    misses          prompt tokens that did not hit, by cause
    occupancy       blocks live, cached and free: peaks, and means over time
    waste           slots without a token, paged and contiguous
    sharing         blocks that samples and beams share
    latencies       queueing, first token, whole request
    timeline        levels and counts over time, in a bounded number of intervals
    meters          all of them, for the scheduler and the clock
"""
