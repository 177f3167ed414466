"""Why a name went: for whoever asks later. The pool says it when it takes a name away, and remembers nothing of it.

What remembers are ghosts (:mod:`~pagedkv.memory.pool.ghosts`), where a pool has any.
"""

from typing import Final

__all__ = [
    "CALLED_OFF",
    "DISMISSED",
    "EPOCH",
    "EVICTED",
    "INVALIDATED",
    "NUM_CAUSES",
    "OVERWRITTEN",
    "RESET",
    "SHED",
    "WITHDRAWN",
]

# Why a name went. 0 is no cause.
EVICTED: Final = 1  # handed out for other content, while it was cached
SHED: Final = 2  # handed out while it was spare: passed by a window, or superseded
OVERWRITTEN: Final = 3  # the row that held it was rolled back, or advanced its state in place
CALLED_OFF: Final = 4  # never computed: its step failed, or whoever was to compute it left
WITHDRAWN: Final = 5  # declared bad, or not to be told from what is
RESET: Final = 6
EPOCH: Final = 7  # other weights
INVALIDATED: Final = 8  # the memory was given back
DISMISSED: Final = 9  # forgotten on request
NUM_CAUSES: Final = 10
