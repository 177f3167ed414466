"""What docstrings show is what the code does."""

import doctest
import importlib
import pkgutil

import pytest

import pagedkv

FOREIGN = "pagedkv.plugins."
"""Imports the engines of others, which are not there."""
MODULES = [
    "pagedkv",
    *(
        module.name
        for module in pkgutil.walk_packages(pagedkv.__path__, "pagedkv.")
        if not module.name.startswith(FOREIGN)
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_what_docstrings_show_is_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_docstrings_show_something() -> None:
    """Or the test above would pass on nothing."""
    finder = doctest.DocTestFinder()
    shown = {name for name in MODULES if any(test.examples for test in finder.find(importlib.import_module(name)))}
    assert shown >= {
        "pagedkv",
        "pagedkv.blocks.free_queue",
        "pagedkv.classic.manager",
        "pagedkv.classic.block_table",
    }
