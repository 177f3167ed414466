"""Cases of a test that run each time, beside those of the long tests."""

from collections.abc import Collection, Iterable
from typing import TypeVar

import pytest

__all__ = ["long_but"]

_T = TypeVar("_T")


def long_but(each_time: Collection[_T], cases: Iterable[_T]) -> list[object]:
    """Mark all cases as long but those that run each time; for ``pytest.mark.parametrize`` and ``pytest.fixture``.

    A tuple is the values of several parameters.
    """
    return [case if case in each_time else _long(case) for case in cases]


def _long(case: object) -> object:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
