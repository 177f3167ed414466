"""Hypothesis profiles. No deadline: the first call of a loop compiles it, which takes seconds, once.

`make test` draws the same examples everywhere and every time; `make test-long` draws new ones.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "pagedkv",
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],  # compiling; long runs of a machine
)
settings.register_profile("long", settings.get_profile("pagedkv"), derandomize=False)
settings.load_profile("pagedkv")
