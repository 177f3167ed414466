"""Compiling loops before the first request.

``rehearsal`` does all operations of a space once; ``rehearsals`` lists it and the rehearsals of other rooms.
``recording`` finds the loops that they reach; ``warm_up`` compiles these on all cores, for this processor or for a
target; ``stamps`` record that this was done; ``ready`` does it before a first request if necessary.
"""

from pagedkv.warming.ready import make_ready
from pagedkv.warming.rehearsals import (
    ATTENTION,
    ROUTING,
    Rehearsal,
    of_curves,
    of_model_curves,
    of_spaces,
    of_stores,
)
from pagedkv.warming.warm_up import WarmUp, warm_up

__all__ = [
    "ATTENTION",
    "ROUTING",
    "Rehearsal",
    "WarmUp",
    "make_ready",
    "of_curves",
    "of_model_curves",
    "of_spaces",
    "of_stores",
    "warm_up",
]
