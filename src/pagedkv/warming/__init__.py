"""Compiling loops before the first request.

``parts`` lists the loops that each part of the library calls; ``warm_up`` compiles these on all cores, for this
processor or for a target; ``stamps`` record that this was done; ``ready`` does it before a first request if necessary.
"""

from pagedkv.warming.parts import ON_CPU, ROUTING, Part, of_curves, of_model_curves, of_spaces, of_stores
from pagedkv.warming.ready import make_ready
from pagedkv.warming.warm_up import WarmUp, warm_up

__all__ = [
    "ON_CPU",
    "ROUTING",
    "Part",
    "WarmUp",
    "make_ready",
    "of_curves",
    "of_model_curves",
    "of_spaces",
    "of_stores",
    "warm_up",
]
