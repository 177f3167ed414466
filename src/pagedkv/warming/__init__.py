"""Loops compiled ahead of the first request.

``rehearsal`` does all that a space can do, ``recording`` finds out which loops that takes, ``warm_up`` compiles them on
all cores; ``ready`` has that done before a first request.
"""

from pagedkv.warming.ready import make_ready
from pagedkv.warming.rehearsal import rehearse
from pagedkv.warming.warm_up import WarmUp, warm_up

__all__ = ["WarmUp", "make_ready", "rehearse", "warm_up"]
