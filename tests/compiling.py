"""Whether loops are compiled here, and for which eviction policies.

Tests that count or time compiling skip themselves where loops are plain Python. Each policy has loops of its own,
two minutes of compiling; as plain Python all policies are tested.
"""

import os
from typing import Final

import pytest

from pagedkv.blocks.eviction.registry import POLICIES

__all__ = ["TESTED_POLICIES", "needs_compiled_loops"]

IS_PLAIN: Final = os.environ.get("NUMBA_DISABLE_JIT") == "1"
COMPILED_FOR: Final = tuple(os.environ.get("PAGEDKV_TEST_POLICIES", "lru").split())
"""`make test POLICIES="lru adaptive fifo hazard"` sets the variable."""
TESTED_POLICIES: Final = tuple(name for name in POLICIES if IS_PLAIN or name in COMPILED_FOR)
"""Policies with which spaces and simulations are tested here."""


needs_compiled_loops: Final = pytest.mark.skipif(
    IS_PLAIN,
    reason="loops are plain Python here (NUMBA_DISABLE_JIT), and this is about compiled ones",
)
