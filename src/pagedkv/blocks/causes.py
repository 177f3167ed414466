"""The causes for which names are lost. The pool passes one whenever it removes a name, but does not store it.

Ghosts store them (:mod:`~pagedkv.blocks.ghosts`), in pools that have ghosts.
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

# 0 is no cause.
EVICTED: Final = 1  # allocated for other content, while it was cached
SHED: Final = 2  # allocated for other content, while it was spare: left behind by a window, or superseded
OVERWRITTEN: Final = 3  # the row that referred to it was rolled back, or advanced its state in place
CALLED_OFF: Final = 4  # never computed: its step failed, or the row that was to compute it was freed
WITHDRAWN: Final = 5  # declared bad, or not distinguishable from bad content
RESET: Final = 6
EPOCH: Final = 7  # other weights
INVALIDATED: Final = 8  # device memory released
DISMISSED: Final = 9  # forgotten on request
NUM_CAUSES: Final = 10
