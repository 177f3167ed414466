"""Whether loops are compiled here: tests that count or time compiling skip themselves where they are plain Python."""

from typing import Final

import numba
import pytest

__all__ = ["needs_compiled_loops"]

needs_compiled_loops: Final = pytest.mark.skipif(
    bool(numba.config.DISABLE_JIT),
    reason="loops are plain Python here (NUMBA_DISABLE_JIT), and this is about compiled ones",
)
