"""Loops compiled ahead of the first request.

``rehearsal`` does all that a space can do; ``rehearsals`` names it and what other rooms have of the kind.
``recording`` finds out which loops they reach, ``warm_up`` compiles them on all cores, for this processor or for a
target, ``stamps`` note that it is done; ``ready`` has it done before a first request.
"""

from pagedkv.memory.warming.ready import make_ready
from pagedkv.memory.warming.rehearsals import ATTENTION, Rehearsal, of_curves, of_model_curves, of_spaces
from pagedkv.memory.warming.warm_up import WarmUp, warm_up

__all__ = [
    "ATTENTION",
    "Rehearsal",
    "WarmUp",
    "make_ready",
    "of_curves",
    "of_model_curves",
    "of_spaces",
    "warm_up",
]
