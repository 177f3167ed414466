"""Whether loops are compiled here: tests that count or time compiling skip themselves where they are plain Python."""

import os
from typing import Final

import pytest

__all__ = ["needs_compiled_loops"]

needs_compiled_loops: Final = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1",
    reason="loops are plain Python here (NUMBA_DISABLE_JIT), and this is about compiled ones",
)
