"""Hypothesis profiles. No deadline: the first call of a loop compiles it, which takes seconds, once."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "pagedkv",
    deadline=None,
    derandomize="CI" in os.environ,  # there the same runs every time; elsewhere new ones, and failures are remembered
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],  # compiling; long runs of a machine
)
settings.register_profile("long", settings.get_profile("pagedkv"), derandomize=False)
settings.load_profile("pagedkv")
