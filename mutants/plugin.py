"""A plugin for pytest in the copy: tells which tests fail, stops tests that never end, and does not shrink.

Loaded with ``-p mutants.plugin``. A failing test's id goes to the file named by ``MUTANTS_FAILED``, a line each. A test
that runs longer than ``MUTANTS_TEST_SECONDS`` fails: many faults turn a loop into one without end. What Hypothesis
finds is enough as it is: to make it small would take minutes and tell no more.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import Phase, settings

__all__ = ["TooLongError", "time_limit"]


class TooLongError(BaseException):
    """A test took too long. No Exception, so that Hypothesis does not try the same example again."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TooLongError in the body after so many seconds."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooLongError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_sessionstart() -> None:
    """Take shrinking out of the profile that the tests' conftest.py has loaded, and remember no examples."""
    for name in ("pagedkv", "long"):
        profile = settings(settings.get_profile(name), phases=(Phase.explicit, Phase.generate), database=None)
        settings.register_profile(name, profile)
    settings.load_profile("pagedkv")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Limit the time of each test."""
    with time_limit(int(os.environ["MUTANTS_TEST_SECONDS"])):
        yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that failed."""
    if report.failed:
        _note(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a module that cannot be imported."""
    if report.failed:
        _note(report.nodeid)


def _note(node_id: str) -> None:
    with Path(os.environ["MUTANTS_FAILED"]).open("a", encoding="utf-8") as file:
        file.write(f"{node_id}\n")
