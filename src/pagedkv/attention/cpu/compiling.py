"""How loops over numbers are compiled: as those of the core, but sums may be reordered, so that they use vectors.

Only what changes a sum's last bits is allowed: ``nnan`` and ``ninf`` are not, since a NaN that is read must be seen.
The machine code is kept on disk as the core's is.
"""

from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar, cast

import numba
from numba.core.dispatcher import Dispatcher

from pagedkv.compilation.loop_cache import LoopCache

__all__ = ["compiled_sums"]

P = ParamSpec("P")
R = TypeVar("R")

REORDERED: Final = frozenset({"reassoc", "contract", "nsz", "arcp"})


def compiled_sums(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a loop whose sums may be taken in any order. It runs without Python's lock."""
    options: dict[str, Any] = {"error_model": "numpy", "_nrt": False, "fastmath": set(REORDERED), "nogil": True}
    loop = cast("Any", numba.njit(**options)(function))
    if isinstance(loop, Dispatcher):
        cast("Any", loop)._cache = LoopCache(function)  # noqa: SLF001  # what ``cache=True`` sets, to Numba's own
    return cast("Callable[P, R]", loop)
